sed -i 's|from decimal import Decimal|from decimal import ROUND_HALF_UP, Decimal|' shares.py
sed -i 's|return Decimal(str(round(float(amount), 2))).quantize(CENT)|return Decimal(amount).quantize(CENT, ROUND_HALF_UP)|' shares.py
sed -i 's|part = to_cents(to_cents(amount) / people)|each, odd = divmod(int(to_cents(amount) / CENT), people)|' shares.py
sed -i 's|return \[part\] \* people|return [(each + (index < odd)) * CENT for index in range(people)]|' shares.py
