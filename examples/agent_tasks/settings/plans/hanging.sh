sed -i 's|defaults.copy()|copy.deepcopy(defaults)|' settings.py
sed -i 's|^DEFAULTS = {|import copy\n\nDEFAULTS = {|' settings.py
dd if=/dev/zero of=/dev/null
