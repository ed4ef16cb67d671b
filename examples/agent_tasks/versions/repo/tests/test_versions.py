import unittest

from versions import is_update, newest


class VersionsTest(unittest.TestCase):
    def test_numbers_are_no_texts(self):
        self.assertTrue(is_update("1.9", "1.10"))
        self.assertFalse(is_update("1.10", "1.9"))

    def test_newest(self):
        self.assertEqual(newest(["0.9", "0.10.1", "0.10", "0.2"]), "0.10.1")

    def test_a_candidate_comes_before_its_release(self):
        self.assertTrue(is_update("2.0rc2", "2.0"))
        self.assertFalse(is_update("2.0", "2.0rc2"))

    def test_candidates_among_themselves(self):
        self.assertTrue(is_update("2.0rc9", "2.0rc10"))

    def test_a_candidate_comes_after_the_release_before(self):
        self.assertTrue(is_update("1.9", "2.0rc1"))

    def test_the_same_is_no_update(self):
        self.assertFalse(is_update("1.4", "1.4"))

    def test_what_is_no_version(self):
        with self.assertRaises(ValueError):
            is_update("1.0", "latest")
