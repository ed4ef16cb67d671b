sed -i 's|29 if year % 4 == 0 else 28|29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28|' months.py
sed -i 's|month = date.month + months$|month = date.month - 1 + months|' months.py
sed -i 's|month = month % 12$|month = month % 12 + 1|' months.py
sed -i 's|day=date.day)|day=min(date.day, days_in_month(year, month)))|' months.py
