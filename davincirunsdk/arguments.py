"""What a user may write: words of a command, choices of ranks, numbers. Refused before anything is done."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence


def command_words(command: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Check a command and return its words.

    Raises:
        TypeError: It is one string, or holds something that is neither string nor path-like.
        ValueError: It is empty.
    """
    if isinstance(command, str):
        raise TypeError(
            f"command is one string: {command!r}; expected a list of words, write {command.split()!r}"
        )
    words = []
    for word in cast("Sequence[object]", command):
        if not isinstance(word, (str, os.PathLike)):
            raise TypeError(f"command holds {word!r} ({type(word).__name__}): expected strings or path-likes")
        words.append(os.fspath(word))
        if "\0" in words[-1]:
            raise ValueError(f"command holds a NUL character: {word!r}; no program can be given one")
    if not words or not words[0]:
        raise ValueError("command is empty: expected a list of words such as ['python', 'train.py']")
    return tuple(words)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read a choice of ranks.

    Args:
        text: `all`, `none`, `0`, or such as `0,2-3`.

    Returns:
        The ranks, None for all.

    Raises:
        ValueError: It makes no sense.
    """
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise ValueError(f"{part!r} in {text!r} is no rank: expected all, none, or such as 0,2-3")
        if dash and int(last) < int(first):
            raise ValueError(f"{part!r} in {text!r} runs backwards: expected the smaller rank first")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def whole_number(name: str, value: object, least: int, most: float = math.inf) -> int | None:
    """Check a number that may be None.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of its range.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if not least <= value <= most:
        limit = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"{name} is {value}: expected {limit}")
    return value
