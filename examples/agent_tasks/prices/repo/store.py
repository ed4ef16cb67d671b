"""Where prices are kept."""


class Store:
    """A slow store; it counts what it is asked."""

    def __init__(self):
        self._prices = {}
        self.reads = 0

    def read(self, article):
        """A price, or None."""
        self.reads += 1
        return self._prices.get(article)

    def write(self, article, price):
        """Set a price."""
        self._prices[article] = price

    def delete(self, article):
        """Remove a price."""
        self._prices.pop(article, None)
