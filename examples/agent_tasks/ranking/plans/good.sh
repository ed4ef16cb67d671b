sed -i 's|key=lambda team: (team\[1\], team\[2\], team\[0\]), reverse=True|key=lambda team: (-team[1], -team[2], team[0])|' ranking.py
sed -i 's|    for name, points, difference in table(teams):|    for place, (name, points, difference) in enumerate(table(teams), start=1):|' ranking.py
sed -i 's|if points != last:|if (points, difference) != last:|' ranking.py
sed -i 's|rank += 1|rank = place|' ranking.py
sed -i 's|last = points|last = points, difference|' ranking.py
