"""Shifts of a factory."""

DAY = 24 * 60
STARTS = {"early": 6 * 60, "late": 14 * 60, "night": 22 * 60}


def clock(minute: int) -> tuple:
    """(day, hour, minute) of a minute after the midnight of day 0; days before are negative."""
    day = int(minute / DAY)
    rest = abs(minute) % DAY
    return day, rest // 60, rest % 60


def shift(minute: int) -> tuple:
    """(day on which it began, its name)."""
    day, hour, rest = clock(minute)
    of_day = hour * 60 + rest
    for name in ("night", "late", "early"):
        if of_day > STARTS[name]:
            return day, name
    return day, "night"
