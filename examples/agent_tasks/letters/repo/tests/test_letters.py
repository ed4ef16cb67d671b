import unittest

from letters import fill


class LettersTest(unittest.TestCase):
    def test_one_value(self):
        self.assertEqual(fill("Dear {name},", {"name": "Ada"}), "Dear Ada,")

    def test_two_on_a_line(self):
        self.assertEqual(fill("{a} and {b}", {"a": 1, "b": 2}), "1 and 2")

    def test_backslashes_stay(self):
        self.assertEqual(fill("in {folder}", {"folder": "C:\\new\\1"}), "in C:\\new\\1")

    def test_values_are_no_templates(self):
        self.assertEqual(fill("{a}{b}", {"a": "{b}", "b": "x"}), "{b}x")

    def test_braces(self):
        self.assertEqual(fill("{{{name}}} {{}}", {"name": "x"}), "{x} {}")

    def test_names_with_signs(self):
        self.assertEqual(fill("{a.b} {a+}", {"a.b": 1, "a+": 2}), "1 2")

    def test_a_missing_value(self):
        with self.assertRaises(KeyError):
            fill("{name}", {})
