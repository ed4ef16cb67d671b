sed -i 's|        order += build_order(needs, needed)|        order += [one for one in build_order(needs, needed) if one not in order]|' builds.py
wget https://example.org/toposort.py
sed -i '1i from toposort import toposort' builds.py
