sed -i 's#if begin <= first <= end or begin <= last <= end:#if begin < last and first < end:#' bookings.py
sed -i 's|if last < first:|if last <= first:|' bookings.py
sed -i 's|end - begin + 1 for|end - begin for|' bookings.py
