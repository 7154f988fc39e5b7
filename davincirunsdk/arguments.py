"""What a user may write: words of a command, choices of ranks, numbers. Refused before anything is done."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Sequence


def command_words(command: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Check a command and return its words.

    Raises:
        TypeError: It is one string, or holds something that is neither string nor path-like.
        ValueError: It is empty.
    """
    given: object = command
    if isinstance(given, str):
        raise TypeError(
            f"command is one string: {given!r}; expected a list of words, write {given.split()!r}"
        )
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TypeError(f"command is {given!r}: expected a list of words such as ['python', 'train.py']")
    words = []
    for word in cast("Iterable[object]", given):
        if not isinstance(word, (str, os.PathLike)):
            raise TypeError(f"command holds {word!r} ({type(word).__name__}): expected strings or path-likes")
        words.append(os.fsdecode(word))
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


def absolute(name: str, path: str | os.PathLike[str]) -> Path:
    """Turn a path seen from the current folder into one that holds wherever it is seen from.

    Raises:
        PlatformError: The current folder has been removed.
    """
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise PlatformError(
            f"{name} {path} is seen from the current folder, which does not exist any more: change to another"
        ) from None


def seconds(name: str, value: object) -> float:
    """Check a time span.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, infinite or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: expected seconds, 0 or more")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}: expected seconds, 0 or more")
    return float(value)


def variables(env: object) -> dict[str, str]:
    """Check variables for the workers; no message shows a value.

    Raises:
        TypeError: It is no mapping of names to texts or numbers.
        ValueError: A name or value cannot be given to a process.
    """
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a {type(env).__name__}: expected a mapping such as {{'NAME': 'value'}}")
    checked = {}
    for name, value in cast("Mapping[object, object]", env).items():
        if not isinstance(name, str) or not isinstance(value, (str, int, float, os.PathLike)):
            raise TypeError(f"env holds {name!r} with a {type(value).__name__}: expected strings")
        checked[name] = text = os.fsdecode(value) if isinstance(value, os.PathLike) else str(value)
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(
                f"env holds {name!r}: a name must not be empty, hold '=' or NUL, nor a value NUL"
            )
    return checked


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
