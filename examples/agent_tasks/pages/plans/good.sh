sed -i 's|return items // size|return -(-items // size)|' pages.py
sed -i 's|begin + size - 1\]|begin + size]|' pages.py
