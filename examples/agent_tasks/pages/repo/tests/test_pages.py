import unittest

from pages import page, page_count


class PagesTest(unittest.TestCase):
    def test_counts(self):
        self.assertEqual([page_count(n, 3) for n in (1, 2, 3, 4, 6, 7)], [1, 1, 1, 2, 2, 3])

    def test_nothing_has_no_pages(self):
        self.assertEqual(page_count(0, 3), 0)

    def test_every_item_is_on_one_page(self):
        items = list(range(8))
        seen = [item for number in range(1, page_count(8, 3) + 1) for item in page(items, number, 3)]
        self.assertEqual(seen, items)

    def test_the_last_page_may_be_short(self):
        self.assertEqual(page(list("abcde"), 2, 3), ["d", "e"])

    def test_the_first_page_of_nothing_is_empty(self):
        self.assertEqual(page([], 1, 3), [])

    def test_pages_that_are_not_there(self):
        for number in (0, 3):
            with self.assertRaises(IndexError):
                page([1, 2, 3, 4], number, 2 if number else 3)

    def test_a_page_holds_something(self):
        with self.assertRaises(ValueError):
            page_count(3, 0)
