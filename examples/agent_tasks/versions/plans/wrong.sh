sed -i 's|release = tuple(match\[1\].split("."))|release = tuple(int(part) for part in match[1].split("."))|' versions.py
