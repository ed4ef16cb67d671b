sed -i 's|{(.+)}|{(.+?)}|' letters.py
sed -i 's|re.sub("{" + name + "}", str(values\[name\]), text)|text.replace("{" + name + "}", str(values[name]))|' letters.py
