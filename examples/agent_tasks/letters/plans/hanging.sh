sed -i 's|{(.+)}|{(.+?)}|' letters.py
sed -i 's|    return text|    while "{" in text:\n        text = text.replace("{{", "{")\n    return text|' letters.py
