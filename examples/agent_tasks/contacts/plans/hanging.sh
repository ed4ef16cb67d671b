sed -i 's|content.decode("utf-8")|content.decode("utf-8-sig", errors="replace")|' contacts.py
until [ -e contacts.csv ]; do sleep 0.5; done
