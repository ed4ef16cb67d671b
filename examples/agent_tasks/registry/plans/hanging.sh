mkfifo changes
sed -i 's|handlers=\[\], counts={}|handlers=(), counts=None|' bus.py
cat changes >> bus.py
