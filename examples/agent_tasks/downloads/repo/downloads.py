"""Which files may be downloaded."""

import posixpath


class ForbiddenError(ValueError):
    """A path that leads out of the folder."""


def locate(folder: str, name: str) -> str:
    """The path of a file below a folder.

    Args:
        folder: absolute, such as /srv/data.
        name: what was asked for, with slashes.

    Raises:
        ForbiddenError: it leads out of the folder.
    """
    if "\0" in name:
        raise ForbiddenError(name)
    path = posixpath.normpath(posixpath.join(folder, name))
    if not path.startswith(folder):
        raise ForbiddenError(name)
    return path
