import tempfile
import unittest
from pathlib import Path

from contacts import names, read_contacts

TEXT = "name,mail\r\nJörg Groß,jorg@example.org\r\nZoë,zoe@example.org\r\n"


class ContactsTest(unittest.TestCase):
    def read(self, content):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "contacts.csv"
            path.write_bytes(content)
            return read_contacts(path)

    def test_utf8(self):
        self.assertEqual(names(self.read(TEXT.encode("utf-8"))), ["Jörg Groß", "Zoë"])

    def test_a_byte_order_mark_is_no_part_of_a_name(self):
        self.assertEqual(names(self.read(TEXT.encode("utf-8-sig"))), ["Jörg Groß", "Zoë"])

    def test_windows(self):
        self.assertEqual(names(self.read(TEXT.encode("cp1252"))), ["Jörg Groß", "Zoë"])

    def test_the_euro_sign_of_windows(self):
        self.assertEqual(self.read("name,fee\nAda,5 €\n".encode("cp1252")), [{"name": "Ada", "fee": "5 €"}])

    def test_line_breaks_in_quotes_stay(self):
        self.assertEqual(names(self.read(b'name,mail\n"Ada\nLovelace",ada@example.org\n')), ["Ada\nLovelace"])

    def test_an_empty_file(self):
        self.assertEqual(self.read(b""), [])
