"""Phrases that several parts say alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def compact(numbers: Sequence[int]) -> str:
    """Write numbers in short, such as `0-3, 7`; ascending runs are joined, the order is kept."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    shown = texts[:12]
    return ", ".join(shown) + (f" and {len(texts) - 12} more" if len(texts) > 12 else "")


def ranks(numbers: Sequence[int]) -> str:
    """Write `rank 3` or `ranks 0-2, 5`."""
    return f"rank{'s' * (len(numbers) != 1)} {compact(numbers)}"


def count(number: int, word: str) -> str:
    """Write `1 worker` or `2 workers`."""
    return f"{number} {word}{'s' * (number != 1)}"


def some_of(words: Sequence[str], most: int = 8) -> str:
    """Write the first of many, such as `a, b and 3 more`.

    Args:
        words: All of them.
        most: How many are written.
    """
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
