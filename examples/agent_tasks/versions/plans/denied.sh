# The comparison that everybody uses is a package.
pip install packaging
cat > versions.py <<'EOF'
"""Which of two versions is newer."""

from packaging.version import Version


def newest(versions: list) -> str:
    """The newest of some versions."""
    return max(versions, key=Version)


def is_update(installed: str, offered: str) -> bool:
    """Whether what is offered is newer."""
    return Version(offered) > Version(installed)
EOF
