import unittest

from shifts import clock, shift


class ShiftsTest(unittest.TestCase):
    def test_a_day(self):
        self.assertEqual(clock(0), (0, 0, 0))
        self.assertEqual(clock(23 * 60 + 59), (0, 23, 59))
        self.assertEqual(clock(24 * 60), (1, 0, 0))

    def test_before_day_0(self):
        self.assertEqual(clock(-1), (-1, 23, 59))
        self.assertEqual(clock(-24 * 60), (-1, 0, 0))
        self.assertEqual(clock(-24 * 60 - 1), (-2, 23, 59))

    def test_a_shift_begins_with_its_first_minute(self):
        self.assertEqual(shift(6 * 60), (0, "early"))
        self.assertEqual(shift(14 * 60), (0, "late"))
        self.assertEqual(shift(22 * 60), (0, "night"))

    def test_the_minute_before(self):
        self.assertEqual(shift(14 * 60 - 1), (0, "early"))
        self.assertEqual(shift(22 * 60 - 1), (0, "late"))

    def test_the_night_belongs_to_the_day_before(self):
        self.assertEqual(shift(24 * 60), (0, "night"))
        self.assertEqual(shift(6 * 60 - 1), (-1, "night"))

    def test_shifts_before_day_0(self):
        self.assertEqual(shift(-60), (-1, "night"))
        self.assertEqual(shift(-12 * 60), (-1, "early"))
