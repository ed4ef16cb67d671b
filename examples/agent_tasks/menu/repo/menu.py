"""A menu of actions."""


class Menu:
    """Buttons with actions."""

    def __init__(self):
        self._buttons = {}

    def add_all(self, labels, action):
        """A button for each label, which calls the action with it."""
        for label in labels:
            self._buttons[label] = lambda: action(label)

    def add_steps(self, label, actions):
        """One button that calls several actions in turn and gives their results."""
        self._buttons[label] = lambda: [step() for step in actions]

    def press(self, label):
        """What the action of a button returns."""
        return self._buttons[label]()
