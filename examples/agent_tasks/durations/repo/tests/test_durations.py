import unittest

from durations import seconds


class DurationsTest(unittest.TestCase):
    def test_one_part(self):
        self.assertEqual([seconds(text) for text in ("2h", "3m", "4s")], [7200, 180, 4])

    def test_parts_add_up(self):
        self.assertEqual(seconds("1h30m"), 5400)
        self.assertEqual(seconds("1h 1m 1s"), 3661)

    def test_milliseconds(self):
        self.assertAlmostEqual(seconds("250ms"), 0.25)
        self.assertAlmostEqual(seconds("1s500ms"), 1.5)

    def test_fractions_and_blanks(self):
        self.assertAlmostEqual(seconds(" 1.5 h "), 5400)

    def test_what_is_no_duration(self):
        for text in ("", "10", "5x", "h", "1h5", "-1s", "1h,5m"):
            with self.subTest(text), self.assertRaises(ValueError):
                seconds(text)
