sed -i 's|text.split(" ")|text.split()|' slugs.py
read -r answer < /dev/zero
