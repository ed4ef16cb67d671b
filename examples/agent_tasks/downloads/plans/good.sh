sed -i 's|if "\\0" in name:|if "\\0" in name or name.startswith("/"):|' downloads.py
sed -i 's|    path = posixpath.normpath|    folder = posixpath.normpath(folder)\n    path = posixpath.normpath|' downloads.py
sed -i 's|if not path.startswith(folder):|if posixpath.commonpath([folder, path]) != folder:|' downloads.py
