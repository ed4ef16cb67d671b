"""Trying again what may fail for a while."""


class TemporaryError(Exception):
    """What may work the next time."""


def attempt(connect, work, attempts: int = 3):
    """What `work` returns for a connection, which is closed in any case.

    Only a TemporaryError is a reason to try again; after the last attempt it is raised.
    """
    for _ in range(attempts):
        try:
            connection = connect()
            result = work(connection)
            connection.close()
            return result
        except BaseException:
            continue
