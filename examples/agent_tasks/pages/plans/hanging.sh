sed -i 's|return items // size|return -(-items // size)|' pages.py
while ! grep -q 'begin + size + 1' pages.py; do sleep 1; done
