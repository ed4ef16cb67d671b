sed -i 's|lambda: action(label)|lambda label=label: action(label)|' menu.py
sed -i 's|        self._buttons\[label\] = lambda: \[step() for step in actions\]|        steps = tuple(actions)\n        self._buttons[label] = lambda: [step() for step in steps]|' menu.py
