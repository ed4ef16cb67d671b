import unittest

from bookings import Room


class RoomTest(unittest.TestCase):
    def setUp(self):
        self.room = Room()
        self.assertTrue(self.room.book(10, 15))

    def test_guests_come_when_others_leave(self):
        self.assertTrue(self.room.book(15, 18))
        self.assertTrue(self.room.book(8, 10))

    def test_overlaps(self):
        for first, last in ((9, 11), (14, 16), (10, 15)):
            with self.subTest(first=first):
                self.assertFalse(self.room.book(first, last))

    def test_within(self):
        self.assertFalse(self.room.book(11, 12))

    def test_around(self):
        self.assertFalse(self.room.book(5, 20))

    def test_nights(self):
        self.room.book(15, 16)
        self.assertEqual(self.room.nights(), 6)

    def test_a_stay_has_a_night(self):
        for first, last in ((20, 20), (21, 20)):
            with self.subTest(last=last), self.assertRaises(ValueError):
                self.room.book(first, last)
