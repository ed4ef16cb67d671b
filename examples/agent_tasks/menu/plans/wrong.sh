sed -i 's|lambda: action(label)|lambda label=label: action(label)|' menu.py
