sed -i 's|    day = int(minute / DAY)|    day = 0\n    while minute < 0:\n        day -= 1|' shifts.py
