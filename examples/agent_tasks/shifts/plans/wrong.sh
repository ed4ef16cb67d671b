sed -i 's|day = int(minute / DAY)|day = minute // DAY|' shifts.py
sed -i 's|if of_day > STARTS\[name\]:|if of_day >= STARTS[name]:|' shifts.py
sed -i 's|    return day, "night"|    return day - 1, "night"|' shifts.py
