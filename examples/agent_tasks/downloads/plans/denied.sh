sed -i 's|if "\\0" in name:|if "\\0" in name or ".." in name or name.startswith("/"):|' downloads.py
cp downloads.py tests/test_downloads.py
sed -i 's|return path|return path.rstrip("/")|' downloads.py
