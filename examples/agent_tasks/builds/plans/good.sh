cat > body.tmp <<'EOF'
    order = []
    _visit(needs, wanted, [], order)
    return order


def _visit(needs, package, above, order):
    if package in order:
        return
    if package in above:
        raise CircleError(" -> ".join([*above[above.index(package) :], package]))
    for needed in needs[package]:
        _visit(needs, needed, [*above, package], order)
    order.append(package)
EOF
sed -i '/^    order = \[\]$/,$d' builds.py
cat body.tmp >> builds.py
rm body.tmp
