"""Letters from templates: {name} is replaced by a value, {{ and }} are braces."""

import re

_PLACE = re.compile(r"{(.+)}")


def fill(template: str, values: dict) -> str:
    """The letter; KeyError where a value is missing."""
    text = template
    for name in _PLACE.findall(template):
        text = re.sub("{" + name + "}", str(values[name]), text)
    return text
