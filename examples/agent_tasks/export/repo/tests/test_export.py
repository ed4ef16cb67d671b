import unittest

from export import read, write, write_row


class ExportTest(unittest.TestCase):
    def test_plain_fields_are_not_quoted(self):
        self.assertEqual(write_row(["a b", "c,d", 5]), "a b;c,d;5")

    def test_separators(self):
        self.assertEqual(write_row(["a;b", "c"]), '"a;b";c')

    def test_quotes_are_doubled(self):
        self.assertEqual(write_row(['say "yes"']), '"say ""yes"""')

    def test_line_breaks(self):
        self.assertEqual(write([["a\nb", "c"]]), '"a\nb";c\n')

    def test_what_is_written_can_be_read(self):
        rows = [["plain", "a;b", 'q"q', "two\nlines"], ["", ";", '"', "\n"], ["carriage\rreturn", "x", "y", "z"]]
        self.assertEqual(read(write(rows)), rows)

    def test_nothing(self):
        self.assertEqual((write([]), read("")), ("", []))
