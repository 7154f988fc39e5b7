"""Text of a report: labels, wrapping by columns, one screen."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from davincirunsdk.columns import cut, width
from davincirunsdk.diagnosis.lines import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 98
"""Columns: a terminal of 100, less two for frames."""
LABEL = 14
_DECISIVE_ROWS = 4
_WORDS = re.compile(r"\s+|[\x21-\x7e]+|[^\x21-\x7e\s]")


def printable(text: str) -> str:
    """Make a line printable; of a progress bar's states the last is kept."""
    return clean(text.rstrip().rsplit("\r", 1)[-1])


def shorten(text: str, columns: int) -> str:
    """Make a line printable and at most so many columns wide, keeping its start and its end."""
    text = printable(text[:10_000] + text[-10_000:] if len(text) > 20_000 else text)
    if width(text) <= columns:
        return text
    gap = " ... "
    end = max(0, (columns - len(gap)) // 4)
    head = cut(text, max(0, columns - len(gap) - end))
    tail = cut(text[::-1], end)[::-1]
    return head + gap + tail


def wrap(text: str, columns: int, rows: int | None = None) -> list[str]:
    """Break a text into rows, at spaces where that can be; of what is too long the middle is left out.

    Args:
        text: One line.
        columns: Width of a row.
        rows: Most rows, None for any number.
    """
    text = printable(text)
    if rows is not None and width(text) > columns * rows - rows * 4:
        text = shorten(text, columns * rows - rows * 12)
    lines = [""]
    for token in _WORDS.findall(text):
        if width(lines[-1]) + width(token) <= columns:
            lines[-1] += token
            continue
        if token.isspace():
            lines.append("")
            continue
        if lines[-1].strip() and width(token) <= columns:
            lines[-1] = lines[-1].rstrip()
            lines.append(token)
            continue
        while width(lines[-1]) + width(token) > columns:
            piece = cut(token, columns - width(lines[-1]))
            lines[-1] += piece
            token = token[len(piece) :]
            lines.append("")
        lines[-1] += token
    kept = [line.rstrip() for line in lines if line.strip()] or [""]
    if rows is None or len(kept) <= rows:
        return kept
    # Rows that break at words hold less than their width.
    return (
        wrap(shorten(text, width(text) - columns // 3), columns, rows)
        if width(text) > columns
        else kept[:rows]
    )


def label(key: str) -> str:
    """The left column of a field."""
    text = f"{key}:" if key else ""
    return text + " " * max(1 if text else LABEL, LABEL - width(text))


def field(key: str, value: str, rows: int | None = None) -> list[str]:
    """A labelled text, wrapped under its label."""
    parts = wrap(value, WIDTH - max(LABEL, width(label(key))), rows)
    return [label(key) + parts[0], *(label("") + part for part in parts[1:])]


def decisive(text: str, indent: str) -> list[str]:
    """A line that must not be cut: wrapped to a few rows, only a monster loses its middle."""
    room = WIDTH - width(indent)
    bare = text.lstrip()
    own = text[: len(text) - len(bare)][:24]
    parts = wrap(bare, room - len(own), _DECISIVE_ROWS)
    return [indent + own + parts[0], *(f"{indent}{own}{part}" for part in parts[1:])]


def common_indent(texts: Sequence[str]) -> int:
    """Count the blanks that all lines start with."""
    return min((len(text) - len(text.lstrip()) for text in texts if text.strip()), default=0)


def stamp(seconds: float | None, *, date: bool = True) -> str:
    """Write a time as local time with milliseconds; "" when it is not known."""
    if seconds is None:
        return ""
    try:
        moment = datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, ValueError, OSError):
        return ""
    clock = moment.strftime("%H:%M:%S.") + f"{moment.microsecond // 1000:03d}"
    return f"{moment:%Y-%m-%d} {clock} {moment:%z}" if date else clock


def duration(seconds: float, lang: str) -> str:
    """Write a span of time in words, such as `3 min 12 s`."""
    zh = lang == "zh"
    if not 0 <= seconds < 1e10:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} {'秒' if zh else 's'}"
    whole = int(seconds)
    parts = [(whole // 86400, "天" if zh else "d"), (whole // 3600 % 24, "小时" if zh else "h"),
             (whole // 60 % 60, "分" if zh else "min"), (whole % 60, "秒" if zh else "s")]  # fmt: skip
    while parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{number} {unit}" for number, unit in parts[:2])
