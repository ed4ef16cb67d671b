sed -i 's|title.lower()|unicodedata.normalize("NFKD", title.lower())|' slugs.py
sed -i 's|text.split(" ")|text.split()|' slugs.py
sed -i 's|^import re$|import re\nimport unicodedata|' slugs.py
