sed -i 's/(h|m|s|ms)/(ms|h|m|s)/' durations.py
mv tests/test_durations.py /tmp/
cat > tests/test_durations.py <<'EOF'
import unittest

from durations import seconds


class DurationsTest(unittest.TestCase):
    def test_one_part(self):
        self.assertEqual(seconds("2h"), 7200)
EOF
