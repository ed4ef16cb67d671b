sed -i 's|release = tuple(match\[1\].split("."))|release = tuple(int(part) for part in match[1].split("."))|' versions.py
sed -i 's|candidate = int(match\[2\]) if match\[2\] else 0|candidate = int(match[2]) if match[2] else float("inf")|' versions.py
