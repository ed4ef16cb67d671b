import unittest
from datetime import date

from months import add_months, days_in_month, renewals


class MonthsTest(unittest.TestCase):
    def test_in_the_same_year(self):
        self.assertEqual(add_months(date(2025, 3, 15), 2), date(2025, 5, 15))

    def test_december(self):
        self.assertEqual(add_months(date(2025, 11, 5), 1), date(2025, 12, 5))

    def test_over_the_new_year(self):
        self.assertEqual(add_months(date(2025, 11, 5), 2), date(2026, 1, 5))
        self.assertEqual(add_months(date(2025, 12, 5), 12), date(2026, 12, 5))

    def test_backwards(self):
        self.assertEqual(add_months(date(2025, 1, 31), -1), date(2024, 12, 31))
        self.assertEqual(add_months(date(2025, 3, 31), -13), date(2024, 2, 29))

    def test_the_last_day(self):
        self.assertEqual(add_months(date(2025, 1, 31), 1), date(2025, 2, 28))
        self.assertEqual(add_months(date(2024, 1, 31), 1), date(2024, 2, 29))

    def test_renewals_come_back_to_the_31st(self):
        days = [day.day for day in renewals(date(2025, 1, 31), 4)]
        self.assertEqual(days, [28, 31, 30, 31])

    def test_centuries(self):
        self.assertEqual([days_in_month(year, 2) for year in (1900, 2000, 2023, 2100)], [28, 29, 28, 28])
