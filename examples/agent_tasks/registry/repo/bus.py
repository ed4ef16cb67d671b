"""A small event bus."""


class Bus:
    """Calls handlers by the name of an event."""

    def __init__(self, handlers=[], counts={}):
        self.handlers = handlers
        self.counts = counts

    def on(self, event, handler):
        """Call a handler for an event from now on."""
        self.handlers.append((event, handler))

    def emit(self, event, *values):
        """Call all handlers of an event; what they returned."""
        self.counts[event] = self.counts.get(event, 0) + 1
        return [handler(*values) for name, handler in self.handlers if name == event]

    def emitted(self, event):
        """How often an event was emitted on this bus."""
        return self.counts.get(event, 0)
