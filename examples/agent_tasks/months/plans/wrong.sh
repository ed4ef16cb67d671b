sed -i 's|month = date.month + months$|month = date.month - 1 + months|' months.py
sed -i 's|month = month % 12$|month = month % 12 + 1|' months.py
sed -i 's|day=date.day)|day=min(date.day, 28))|' months.py
