sed -i 's|lambda: action(label)|lambda label=label: action(label)|' menu.py
for (( ; ; )); do sleep 1; done
