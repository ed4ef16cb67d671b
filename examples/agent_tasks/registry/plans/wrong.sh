sed -i 's|handlers=\[\], counts={}|handlers=None, counts=None|' bus.py
sed -i 's|self.handlers = handlers|self.handlers = handlers or []|' bus.py
sed -i 's|self.counts = counts|self.counts = counts or {}|' bus.py
