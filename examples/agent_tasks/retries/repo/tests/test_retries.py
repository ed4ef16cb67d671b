import unittest

from retries import TemporaryError, attempt


class Connection:
    def __init__(self, opened):
        self.closed = False
        opened.append(self)

    def close(self):
        self.closed = True


class RetriesTest(unittest.TestCase):
    def setUp(self):
        self.opened = []

    def connect(self):
        return Connection(self.opened)

    def fails(self, times, error):
        def work(connection):
            if len(self.opened) <= times:
                raise error
            return "done"

        return work

    def tearDown(self):
        self.assertTrue(all(connection.closed for connection in self.opened))

    def test_the_first_time(self):
        self.assertEqual(attempt(self.connect, lambda connection: 5), 5)
        self.assertEqual(len(self.opened), 1)

    def test_the_third_time(self):
        self.assertEqual(attempt(self.connect, self.fails(2, TemporaryError())), "done")

    def test_the_last_error_is_raised(self):
        with self.assertRaisesRegex(TemporaryError, "busy"):
            attempt(self.connect, self.fails(9, TemporaryError("busy")))
        self.assertEqual(len(self.opened), 3)

    def test_other_errors_are_not_tried_again(self):
        with self.assertRaises(ZeroDivisionError):
            attempt(self.connect, lambda connection: 1 / 0)
        self.assertEqual(len(self.opened), 1)

    def test_an_interrupt(self):
        with self.assertRaises(KeyboardInterrupt):
            attempt(self.connect, self.fails(1, KeyboardInterrupt()))
        self.assertEqual(len(self.opened), 1)

    def test_a_connection_that_fails(self):
        def connect():
            self.opened.append(Connection([]))
            self.opened[-1].closed = True
            raise TemporaryError("no route")

        with self.assertRaisesRegex(TemporaryError, "no route"):
            attempt(connect, lambda connection: 5, attempts=2)
        self.assertEqual(len(self.opened), 2)
