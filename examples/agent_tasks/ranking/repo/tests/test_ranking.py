import unittest

from ranking import ranks, table

TEAMS = [("Zebras", 9, 4), ("Ants", 9, 4), ("Bears", 12, -1), ("Cats", 9, 7), ("Dogs", 3, 0)]


class RankingTest(unittest.TestCase):
    def test_points_then_difference_then_name(self):
        self.assertEqual([team[0] for team in table(TEAMS)], ["Bears", "Cats", "Ants", "Zebras", "Dogs"])

    def test_the_order_of_the_input_does_not_matter(self):
        self.assertEqual(table(TEAMS), table(TEAMS[::-1]))

    def test_shared_ranks_count(self):
        self.assertEqual(ranks(TEAMS), {"Bears": 1, "Cats": 2, "Ants": 3, "Zebras": 3, "Dogs": 5})

    def test_negative_differences(self):
        self.assertEqual(ranks([("a", 1, -5), ("b", 1, -2)]), {"b": 1, "a": 2})

    def test_nobody(self):
        self.assertEqual((table([]), ranks([])), ([], {}))
