cat > settings.py <<'EOF'
"""Settings of users over defaults."""

import copy

DEFAULTS = {
    "theme": {"name": "light", "fonts": ["Sans", "Serif"]},
    "editor": {"tabs": 4, "rulers": []},
    "beta": False,
}


def merged(defaults: dict, own: dict) -> dict:
    """Defaults with a user's settings over them."""
    result = copy.deepcopy(defaults)
    for key, value in own.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def for_user(own: dict) -> dict:
    """The settings of a user."""
    return merged(DEFAULTS, own)
EOF
