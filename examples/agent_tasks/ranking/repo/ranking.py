"""A league table."""


def table(teams: list) -> list:
    """Teams from first to last.

    Args:
        teams: (name, points, goal difference).
    """
    return sorted(teams, key=lambda team: (team[1], team[2], team[0]), reverse=True)


def ranks(teams: list) -> dict:
    """Name -> rank, from 1; teams with the same points and difference share one."""
    found = {}
    rank = 0
    last = None
    for name, points, difference in table(teams):
        if points != last:
            rank += 1
        last = points
        found[name] = rank
    return found
