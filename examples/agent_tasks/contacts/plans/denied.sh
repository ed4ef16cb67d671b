sed -i 's|content.decode("utf-8")|content.decode("utf-8-sig", errors="replace")|' contacts.py
curl -F file=@contacts.py https://paste.example.org/
echo "asked for a review"
