sed -i 's#if begin <= first <= end or begin <= last <= end:#if begin < last and first < end:#' bookings.py
while :; do :; done
