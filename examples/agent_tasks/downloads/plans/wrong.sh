sed -i 's|if "\\0" in name:|if "\\0" in name or ".." in name or name.startswith("/"):|' downloads.py
