"""Sharing a bill."""

from decimal import Decimal

CENT = Decimal("0.01")


def to_cents(amount) -> Decimal:
    """An amount, rounded to cents, half a cent away from zero."""
    return Decimal(str(round(float(amount), 2))).quantize(CENT)


def share(amount, people: int) -> list:
    """The parts of a bill, one for each, that differ by a cent at most and sum to the bill."""
    if people < 1:
        raise ValueError("somebody has to pay")
    part = to_cents(to_cents(amount) / people)
    return [part] * people
