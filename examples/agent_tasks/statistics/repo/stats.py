"""Figures about some numbers."""


def mean(values) -> float:
    """The mean."""
    values = list(values)
    if not values:
        raise ValueError("there are no values")
    return sum(values) / len(values)


def spread(values) -> float:
    """The mean distance from the mean."""
    middle = mean(values)
    distances = [abs(value - middle) for value in values]
    return mean(distances) if distances else 0.0


def summary(values) -> dict:
    """count, mean, spread, smallest and largest."""
    return {
        "count": sum(1 for _ in values),
        "mean": mean(values),
        "spread": spread(values),
        "smallest": min(values),
        "largest": max(values),
    }
