import unittest
from decimal import Decimal

from shares import share, to_cents


class SharesTest(unittest.TestCase):
    def test_half_a_cent(self):
        given = ["0.125", "0.135", "2.675", "1.005", "-0.125"]
        self.assertEqual([str(to_cents(x)) for x in given], ["0.13", "0.14", "2.68", "1.01", "-0.13"])

    def test_large_amounts_keep_their_cents(self):
        self.assertEqual(to_cents("90071992547409.93"), Decimal("90071992547409.93"))

    def test_an_even_share(self):
        self.assertEqual(share("9.00", 3), [Decimal("3.00")] * 3)

    def test_parts_sum_to_the_bill(self):
        for amount in ("10.00", "0.01", "100.00", "99.99"):
            for people in range(1, 12):
                with self.subTest(amount=amount, people=people):
                    self.assertEqual(sum(share(amount, people)), Decimal(amount))

    def test_the_first_ones_get_the_odd_cents(self):
        self.assertEqual([str(part) for part in share("10.00", 3)], ["3.34", "3.33", "3.33"])

    def test_nobody(self):
        with self.assertRaises(ValueError):
            share("1.00", 0)
