"""Prices, kept at hand."""


class Prices:
    """Prices of a store; each is read once as long as it does not change."""

    def __init__(self, store):
        self._store = store
        self._known = {}

    def get(self, article):
        """A price, or None."""
        if article not in self._known:
            self._known[article] = self._store.read(article)
        return self._known[article]

    def set(self, article, price):
        """Change a price."""
        self._store.write(article, price)
        self._known.setdefault(article, price)

    def remove(self, article):
        """Take an article out of the shop."""
        self._store.delete(article)

    def total(self, articles):
        """What some articles cost together; KeyError where one has no price."""
        prices = [self.get(article) for article in articles]
        if None in prices:
            raise KeyError(articles[prices.index(None)])
        return sum(prices)
