sed -i 's|day = int(minute / DAY)|day, rest = divmod(minute, DAY)|' shifts.py
sed -i '/rest = abs(minute) % DAY/d' shifts.py
sed -i 's|if of_day > STARTS\[name\]:|if of_day >= STARTS[name]:|' shifts.py
sed -i 's|    return day, "night"|    return day - 1, "night"|' shifts.py
