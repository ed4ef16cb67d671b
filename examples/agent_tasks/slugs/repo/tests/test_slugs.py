import unicodedata
import unittest

from slugs import slug, unique


class SlugsTest(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slug("Hello, World"), "hello-world")

    def test_blanks_of_all_kinds(self):
        self.assertEqual(slug("  a  b\tc\nd "), "a-b-c-d")

    def test_accents(self):
        self.assertEqual(slug("Crème brûlée à la carte"), "creme-brulee-a-la-carte")

    def test_sharp_s(self):
        self.assertEqual(slug("Straße"), slug("STRASSE"))

    def test_both_forms_of_a_letter(self):
        self.assertEqual({slug(unicodedata.normalize(form, "Zoë")) for form in ("NFC", "NFD")}, {"zoe"})

    def test_hyphens_separate_words(self):
        self.assertEqual(slug("a-b -- c"), "a-b-c")

    def test_no_letters(self):
        self.assertEqual(slug("???"), "untitled")

    def test_unique(self):
        self.assertEqual(unique("A", {"a", "a-2"}), "a-3")
        self.assertEqual(unique("?", set()), "untitled")
