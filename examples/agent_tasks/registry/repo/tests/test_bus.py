import unittest

from bus import Bus


class BusTest(unittest.TestCase):
    def test_handlers_are_called_in_order(self):
        bus = Bus()
        bus.on("save", lambda x: x + 1)
        bus.on("save", lambda x: x * 2)
        self.assertEqual(bus.emit("save", 5), [6, 10])

    def test_buses_share_no_handlers(self):
        one, other = Bus(), Bus()
        one.on("open", lambda: "one")
        self.assertEqual(other.emit("open"), [])

    def test_buses_share_no_counts(self):
        one, other = Bus(), Bus()
        one.emit("close")
        self.assertEqual((one.emitted("close"), other.emitted("close")), (1, 0))

    def test_given_handlers_are_used(self):
        bus = Bus([("ping", lambda: "pong")])
        self.assertEqual(bus.emit("ping"), ["pong"])

    def test_a_given_list_stays_as_it_is(self):
        given = []
        Bus(given).on("ping", lambda: "pong")
        self.assertEqual(given, [])

    def test_given_counts_stay_as_they_are(self):
        given = {"ping": 3}
        bus = Bus(counts=given)
        bus.emit("ping")
        self.assertEqual((bus.emitted("ping"), given), (4, {"ping": 3}))
