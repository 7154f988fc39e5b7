"""Choose and clean the lines of a worker's output that a person in trouble needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.matching import find, strip_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CLEANED = 10_000  # characters at each end of a line; far more than is ever shown


def shorten(line: str, width: int) -> str:
    """Make a line printable and at most `width` characters long, keeping its start and its end."""
    cut = len(line) - 2 * _CLEANED
    if cut > 0:
        line = line[:_CLEANED] + line[-_CLEANED:]
    # A progress bar rewrites its line: only the last state was ever meant to be read.
    text = _ESCAPES.sub("", line.rstrip()).rsplit("\r", 1)[-1].expandtabs(4)
    text = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text).rstrip()
    if len(text) <= width and cut <= 0:
        return text
    gap = " ... "
    end = max(0, (width - len(gap)) // 4)
    return text[: max(0, width - len(gap) - end)] + gap + text[len(text) - end :]


def excerpt(tail: Sequence[str], count: int) -> tuple[str, ...]:
    """Choose the lines of the tail that tell most.

    These are simply the last lines, unless that would hide a Python exception: then they are its
    last frames, the line with the exception, a few lines after it (codes of Ascend's libraries
    follow there) and the very last lines, for the exception may be an old one that was handled.

    Args:
        tail: Last lines of a worker, oldest first.
        count: How many lines at most, at least 5, a line about left out ones included.

    Returns:
        Lines as they are in the tail, blank ones left out.
    """
    lines = [line for line in tail if line.strip()]
    at = exception_index(lines)
    few = count // 5
    first = len(lines) - count
    if at is None or first <= 0 or at - first >= few:
        return tuple(lines[-count:])
    end = at + 1 + few
    start = max(0, end - (count - few - 1))
    last = count - 1 - (end - start)
    left_out = len(lines) - end - last
    return (*lines[start:end], f"... {left_out} more lines in the log file ...", *lines[-last:])


def headline(tail: Sequence[str]) -> str:
    """Choose the one line that tells most: the exception, else a known error, else the last line."""
    lines = [line for line in tail if line.strip()]
    if not lines:
        return ""
    at = exception_index(lines)
    if at is not None:
        return strip_prefix(lines[at])
    match = find(lines)
    return lines[match.index if match else -1]


def exception_index(lines: Sequence[str]) -> int | None:
    """Find the line that ends the last Python traceback.

    It is known by the indented frames before it, since the head of a long traceback may be gone.
    Tracebacks of exceptions that the interpreter ignored (finalisers at exit) do not count when
    there is another one.
    """
    best: tuple[bool, int] | None = None
    framed = ignored = False
    for index, raw in enumerate(lines):
        line = strip_prefix(raw)
        if line.startswith((" ", "\t")):
            framed = framed or line.lstrip().startswith('File "')
            continue
        if framed:
            best = max(best or (False, index), (not ignored, index))
            framed = ignored = False
        if line.startswith("Exception ignored"):
            ignored = True
    return best[1] if best else None
