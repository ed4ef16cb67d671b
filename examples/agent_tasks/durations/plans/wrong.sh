sed -i 's/(h|m|s|ms)/(ms|h|m|s)/' durations.py
sed -i 's|total = float(number)|total += float(number)|' durations.py
