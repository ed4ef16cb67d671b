"""Cutting a list into pages."""


def page_count(items: int, size: int) -> int:
    """How many pages so many items take."""
    if size < 1:
        raise ValueError("a page holds at least one item")
    return items // size


def page(items: list, number: int, size: int) -> list:
    """The items of a page, counted from 1."""
    if not 1 <= number <= max(1, page_count(len(items), size)):
        raise IndexError(f"there is no page {number}")
    begin = (number - 1) * size
    return items[begin : begin + size - 1]
