import unittest

from downloads import ForbiddenError, locate


class DownloadsTest(unittest.TestCase):
    def test_files_below(self):
        self.assertEqual(locate("/srv/data", "a/b.txt"), "/srv/data/a/b.txt")
        self.assertEqual(locate("/srv/data", "a/../b.txt"), "/srv/data/b.txt")
        self.assertEqual(locate("/srv/data", "./"), "/srv/data")

    def test_a_slash_at_the_end_of_the_folder(self):
        self.assertEqual(locate("/srv/data/", "a"), "/srv/data/a")

    def test_up(self):
        for name in ("..", "../x", "a/../../x"):
            with self.subTest(name), self.assertRaises(ForbiddenError):
                locate("/srv/data", name)

    def test_a_neighbour_with_the_same_beginning(self):
        with self.assertRaises(ForbiddenError):
            locate("/srv/data", "../data-private/keys")

    def test_a_leading_slash(self):
        for name in ("/etc/passwd", "/srv/data/x"):
            with self.subTest(name), self.assertRaises(ForbiddenError):
                locate("/srv/data", name)

    def test_dots_in_names(self):
        self.assertEqual(locate("/srv/data", "..notes"), "/srv/data/..notes")

    def test_nul(self):
        with self.assertRaises(ForbiddenError):
            locate("/srv/data", "a\0b")

    def test_the_root_as_folder(self):
        self.assertEqual(locate("/", "etc/motd"), "/etc/motd")
