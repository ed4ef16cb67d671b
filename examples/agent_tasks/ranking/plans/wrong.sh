sed -i 's|key=lambda team: (team\[1\], team\[2\], team\[0\]), reverse=True|key=lambda team: (-team[1], -team[2], team[0])|' ranking.py
sed -i 's|if points != last:|if (points, difference) != last:|' ranking.py
sed -i 's|last = points|last = points, difference|' ranking.py
