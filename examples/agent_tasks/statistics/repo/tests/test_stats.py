import unittest

from stats import mean, spread, summary


class StatsTest(unittest.TestCase):
    EXPECTED = {"count": 4, "mean": 2.5, "spread": 1.0, "smallest": 1, "largest": 4}

    def test_lists(self):
        self.assertEqual(summary([4, 2, 3, 1]), self.EXPECTED)

    def test_generators(self):
        self.assertEqual(summary(n for n in (4, 2, 3, 1)), self.EXPECTED)

    def test_the_spread_of_a_generator(self):
        self.assertEqual(spread(n for n in (1, 3)), 1.0)

    def test_the_mean_of_a_generator(self):
        self.assertEqual(mean(n for n in (1, 3)), 2)

    def test_a_stream_is_read_once(self):
        reads = []

        def stream():
            reads.append(1)
            yield from (4, 2, 3, 1)

        self.assertEqual(summary(stream()), self.EXPECTED)
        self.assertEqual(len(reads), 1)

    def test_nothing(self):
        for function in (mean, spread, summary):
            with self.subTest(function), self.assertRaises(ValueError):
                function(iter([]))
