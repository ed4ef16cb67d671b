sed -i 's|        order += build_order(needs, needed)|        order += [one for one in build_order(needs, needed) if one not in order]|' builds.py
sed -i 's|    order = \[\]$|    order = []\n    while wanted in needs[wanted]:\n        pass|' builds.py
