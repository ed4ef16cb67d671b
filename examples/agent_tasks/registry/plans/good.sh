sed -i 's|handlers=\[\], counts={}|handlers=(), counts=None|' bus.py
sed -i 's|self.handlers = handlers|self.handlers = list(handlers)|' bus.py
sed -i 's|self.counts = counts|self.counts = dict(counts or {})|' bus.py
