"""Dates a number of months away."""

import datetime


def days_in_month(year: int, month: int) -> int:
    """28 to 31."""
    if month == 2:
        return 29 if year % 4 == 0 else 28
    return 30 if month in (4, 6, 9, 11) else 31


def add_months(date: datetime.date, months: int) -> datetime.date:
    """The same day so many months later, or before; the last day where a month has fewer days."""
    month = date.month + months
    year = date.year + month // 12
    month = month % 12
    return date.replace(year=year, month=month, day=date.day)


def renewals(begin: datetime.date, count: int) -> list:
    """The dates of the first renewals of a monthly subscription."""
    return [add_months(begin, number) for number in range(1, count + 1)]
