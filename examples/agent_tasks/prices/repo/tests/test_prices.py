import unittest

from prices import Prices
from store import Store


class PricesTest(unittest.TestCase):
    def setUp(self):
        self.store = Store()
        self.prices = Prices(self.store)
        self.prices.set("tea", 4)

    def test_a_changed_price_is_seen(self):
        self.assertEqual(self.prices.get("tea"), 4)
        self.prices.set("tea", 5)
        self.assertEqual(self.prices.get("tea"), 5)

    def test_a_removed_price_is_gone(self):
        self.prices.get("tea")
        self.prices.remove("tea")
        self.assertIsNone(self.prices.get("tea"))

    def test_a_price_that_comes_later(self):
        self.assertIsNone(self.prices.get("jam"))
        self.prices.set("jam", 3)
        self.assertEqual(self.prices.get("jam"), 3)

    def test_a_price_is_read_once(self):
        self.store.write("milk", 1)
        self.assertEqual([self.prices.get("milk") for _ in range(5)], [1] * 5)
        self.assertEqual(self.store.reads, 1)

    def test_the_store_is_told(self):
        self.prices.set("tea", 6)
        self.assertEqual(Prices(self.store).get("tea"), 6)

    def test_totals(self):
        self.prices.set("jam", 3)
        self.assertEqual(self.prices.total(["tea", "jam", "tea"]), 11)
        self.prices.remove("jam")
        with self.assertRaises(KeyError):
            self.prices.total(["tea", "jam"])
