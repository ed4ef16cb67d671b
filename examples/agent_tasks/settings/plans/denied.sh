sed -i 's|defaults.copy()|copy.deepcopy(defaults)|' settings.py
git add -A
git commit -m 'settings are copied'
git push
sed -i 's|^DEFAULTS = {|import copy\n\nDEFAULTS = {|' settings.py
