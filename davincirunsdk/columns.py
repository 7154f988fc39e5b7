"""How wide a text is on a terminal."""

from __future__ import annotations

import unicodedata


def width(text: str) -> int:
    """Count the columns that a text takes; East Asian characters take two."""
    if text.isascii():
        return len(text)
    return sum(_columns(one) for one in text)


def cut(text: str, columns: int) -> str:
    """Keep what fits into so many columns."""
    used = 0
    for index, one in enumerate(text):
        used += _columns(one)
        if used > columns:
            return text[:index]
    return text


def _columns(one: str) -> int:
    if unicodedata.combining(one) or unicodedata.category(one) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
