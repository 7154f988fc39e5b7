"""Checks of single arguments: each gives what is kept, or says what was found and what was expected."""

from __future__ import annotations

import inspect
import math
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.types import RunResult

    Hook: TypeAlias = str | Callable[[RunResult], object]
else:
    # What is sent to other nodes, whose wire reads this, has none that is a function.
    Hook = str


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
        text: `all`, `none`, `0`, or for example `0,2-3`.

    Returns:
        The ranks, None for all.

    Raises:
        ValueError: It is none of these.
    """
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise ValueError(f"{part!r} in {text!r} is not a rank: expected all, none, or for example 0,2-3")
        if dash and int(last) < int(first):
            raise ValueError(f"{part!r} in {text!r} runs backwards: expected the smaller rank first")
        if len(first) > 9 or len(last) > 9:
            raise ValueError(f"{part!r} in {text!r} is out of range: expected ranks of the job")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def parse_prefix(text: str) -> tuple[str, ...]:
    """Read what stands before each line: see `output.parse_prefix`."""
    from davincirunsdk.output import parse_prefix as parse

    return parse(text)


def parse_binding(text: str) -> object:
    """Read how workers are bound to CPUs: a word, or a list of CPUs."""
    from davincirunsdk.host.binding import MODES, parse_cpus

    return text if text in MODES else parse_cpus(text)


def absolute(name: str, path: object) -> Path:
    """Turn a path seen from the current folder into one that holds wherever it is seen from.

    Raises:
        PlatformError: The current folder has been removed.
        TypeError: It is not a path.
        ValueError: It is empty or holds a NUL.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} is {path!r}: expected a path")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValueError(f"{name} is {text!r}: expected a path")
    try:
        return Path(text).absolute()
    except FileNotFoundError:
        raise PlatformError(
            f"{name} {path} is seen from the current folder, which does not exist any more: change to another"
        ) from None


def seconds(name: str, value: object) -> float:
    """Check a time span.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative, infinite or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: expected seconds, 0 or more")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}: expected seconds, 0 or more")
    return float(value)


def silence(name: str, value: object) -> float:
    """Check how long another node may be silent: beats have to fit in.

    Raises:
        TypeError: It is not a number.
        ValueError: It is less than a second.
    """
    if seconds(name, value) < 1:
        raise ValueError(f"{name} is {value}: expected seconds, 1 or more")
    return seconds(name, value)


def positive(name: str, value: object) -> float:
    """Check a time span that has to be longer than nothing."""
    span = seconds(name, value)
    if not span:
        raise ValueError(f"{name} is {value}: expected seconds, more than 0")
    return span


def handled_signal(name: str, value: object) -> str:
    """Check the name of a signal that a process can handle, and return it as `SIGUSR1`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: expected the name of a signal, such as 'USR1'")
    word = f"SIG{value.upper().removeprefix('SIG')}"
    if word not in signal.Signals.__members__ or word in ("SIGKILL", "SIGSTOP"):
        raise ValueError(
            f"{name} is {value!r}: expected a signal that a process can handle, such as 'INT' or 'USR1'"
        )
    return word


def variables(name: str, env: object) -> dict[str, str]:
    """Check variables for the workers; no message shows a value.

    Raises:
        TypeError: It is not a mapping of names to texts or numbers.
        ValueError: A name or value cannot be given to a process.
    """
    if not isinstance(env, Mapping):
        raise TypeError(f"{name} is a {type(env).__name__}: expected a mapping such as {{'NAME': 'value'}}")
    checked = {}
    for key, value in cast("Mapping[object, object]", env).items():
        if not isinstance(key, str) or not isinstance(value, (str, int, float, os.PathLike)):
            raise TypeError(f"{name} holds {key!r} with a {type(value).__name__}: expected strings")
        checked[key] = text = os.fsdecode(value) if isinstance(value, os.PathLike) else str(value)
        if not key or "=" in key or "\0" in key + text:
            raise ValueError(
                f"{name} holds {key!r}: a name must not be empty, hold '=' or NUL, nor a value NUL"
            )
    return checked


def whole_number(name: str, value: object, least: int, most: float = math.inf) -> int:
    """Check a number.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if not least <= value <= most:
        limit = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"{name} is {value}: expected {limit}")
    return value


def node_range(name: str, value: object) -> tuple[int, int]:
    """Read a number of nodes, or a range of it such as `2:4`.

    Returns:
        The least and the most.

    Raises:
        TypeError: It is neither a whole number nor a text.
        ValueError: It is out of range, or no range.
    """
    if not isinstance(value, str):
        count = whole_number(name, value, 1)
        return count, count
    least, colon, most = value.partition(":")
    if not (least + (most or least)).isascii() or not least.isdigit() or (colon and not most.isdigit()):
        raise ValueError(
            f"{name} is {value!r}: expected a number of nodes, or the least and the most, as 2:4"
        )
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"{name} is {value!r}: expected at least 1, and the smaller number first")
    return found


def number(least: int, most: float = math.inf) -> Callable[[str, object], int]:
    """Make the check of a whole number from `least` to `most`."""
    return lambda name, value: whole_number(name, value, least, most)


def one_of(choices: Sequence[str]) -> Callable[[str, object], Any]:
    """Make the check of a choice.

    Args:
        choices: All that may be given.
    """

    def check(name: str, value: object) -> object:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: expected one of {', '.join(choices)}")
        return value

    return check


def flag(name: str, value: object) -> bool:
    """Check a yes or no.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: expected True or False")
    return value


def text(name: str, value: object) -> str:
    """Check a text.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty or holds a control character.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: expected a string")
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{name} is {value!r}: expected a text without control characters")
    return value


def job_name(name: str, value: object) -> str:
    """Check the name of a job, which names files, too.

    Raises:
        TypeError: It is not a string.
        ValueError: No file can be named so.
    """
    word = text(name, value)
    if "/" in word or word.startswith((".", "-")) or len(os.fsencode(word)) > 100:
        raise ValueError(
            f"{name} is {value!r}: expected a name for log files: without '/', not beginning with '.' or "
            "'-', at most 100 bytes long"
        )
    return word


def text_that(parse: Callable[[str], object], example: str) -> Callable[[str, object], str]:
    """Make the check of a text that another function can read."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}: expected a string such as {example!r}")
        try:
            parse(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return value

    return check


def hook(name: str, value: object) -> Hook:
    """Check what is to run at the end."""
    if callable(value) and not inspect.iscoroutinefunction(value):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{name} is {value!r}: expected a command such as 'notify.sh --mail me', or a plain function "
            "that takes a RunResult"
        )
    return text_that(shlex.split, "")(name, value)


def refuse_unknown(given: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse keywords that nobody would look at.

    Raises:
        TypeError: There is one; the text names the nearest that is known.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            import difflib

            near = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
            raise TypeError(f"unexpected keyword argument {name!r}: {meant}")
