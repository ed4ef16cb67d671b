sed -i 's|self._known.setdefault(article, price)|self._known[article] = price|' prices.py
sleep 3600
