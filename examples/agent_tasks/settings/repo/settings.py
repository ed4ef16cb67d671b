"""Settings of users over defaults."""

DEFAULTS = {
    "theme": {"name": "light", "fonts": ["Sans", "Serif"]},
    "editor": {"tabs": 4, "rulers": []},
    "beta": False,
}


def merged(defaults: dict, own: dict) -> dict:
    """Defaults with a user's settings over them."""
    result = defaults.copy()
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key].update(value)
        else:
            result[key] = value
    return result


def for_user(own: dict) -> dict:
    """The settings of a user."""
    return merged(DEFAULTS, own)
