"""A worker's output as lines fit to be judged: decoded, dated, without colours and launchers' prefixes."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONGEST = 6000
"""Characters of one line that are looked at, three quarters of them at its start."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_STAMP = re.compile(
    r"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[T _-](\d\d):(\d\d):(\d\d)(?:[.,:](\d{3})(?:[.:]?(\d{3}))?)?"
    r"(?:\d{0,3}(Z|[+-]\d\d:?\d\d)(?!\d))?",
    re.ASCII,
)
_PREFIX = re.compile(
    r"""
      \[(?:rank|default|trainer|worker|actor|node|host|proc(?:ess)?|local[ _]?rank|role|gpu|npu|r|task)
        [\s_+|:.\#/-]{0,2}\d+[^\]\[\n]{0,40}\][:>]?[ ]?                 # torchrun, accelerate, our own display
    | \[\d{1,6}(?:,\d{1,6})*\](?:<[a-z]{3,8}>:?|:)[ ]?                  # mpirun
    | \([^()\n]{0,80}\b(?:pid|rank)=\d+[^()\n]{0,80}\)[ ]?              # Ray
    | \d{1,6}:(?:[ ]|$)                                                 # srun --label
    | [\w.-]{1,60}(?:\[\d+\])?[ ]{0,20}\|[ ]                            # compose
    | \[(?:pod|container)/[^\]\n]{1,200}\][ ]                           # kubectl logs --prefix
    | <\w{1,20}[ :=-]?\d+>:?[ ]?
    | \d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?[ ]  # container run times
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_SOURCE = re.compile(
    r"\s*(?:\[|\(|<)?(?:rank|default|trainer|worker|local[ _]?rank|r|task)?[\s_+|:.#/=-]{0,2}(\d+)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of output.

    Attributes:
        text: What the worker wrote, without colours and launchers' prefixes; its indent is kept.
        time: Wall-clock second when it came, or else what it says itself; None when neither is known.
    """

    text: str
    time: float | None


def cut_lines(output: bytes, times: Sequence[tuple[int, float]] = ()) -> list[Line]:
    """Cut output into lines; the states of a progress bar are lines, too, and blank ones are left out.

    Args:
        output: The bytes.
        times: Pairs of a number of bytes and the wall-clock second when so many had come, ascending.

    Returns:
        The lines, oldest first.
    """
    ends = [count for count, _ in times]
    lines: list[Line] = []
    at = 0
    for piece in output.split(b"\n"):
        end = at + len(piece) + 1
        at = end
        if not piece.strip():
            continue
        came = None
        if ends:
            came = times[min(bisect_right(ends, min(end, len(output)) - 1), len(ends) - 1)][1]
        text = _shortened(piece)
        for state in text.split("\r") if "\r" in text else (text,):
            if cleaned := clean(state):
                moment = came if came is not None else stamp_of(cleaned[:120])
                lines.append(Line(text=strip_prefix(cleaned), time=moment))
    return lines


def _shortened(piece: bytes) -> str:
    if len(piece) > 4 * _LONGEST:
        piece = piece[: 3 * _LONGEST] + b" ... " + piece[-_LONGEST:]
    text = piece.decode(errors="replace")
    cut = _LONGEST // 4
    return text if len(text) <= _LONGEST else f"{text[: 3 * cut]} ... {text[-cut:]}"


def clean(text: str) -> str:
    """Take colours, tabs and what cannot be printed out of a line, keep its indent."""
    if not text.isprintable():
        text = _ESCAPES.sub("", text).expandtabs(4)
        text = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
    return text.rstrip()


def strip_prefix(text: str) -> str:
    """Take away what launchers and log collectors put before a worker's line, such as `[rank3]: `."""
    for _ in range(3):
        # Of a blank line the prefix has lost the space at its end.
        found = _PREFIX.match(f"{text} ")
        if found is None or found.end() == 0:
            break
        text = text[found.end() :]
    return text


def rank_in_prefix(text: str) -> int | None:
    """Tell which rank a launcher's prefix names, None when the line has none."""
    text = clean(text[:300]).lstrip()
    for _ in range(3):
        found = _PREFIX.match(text)
        if found is None or found.end() == 0:
            return None
        if number := re.search(r"rank[ =:_]?(\d+)", found[0], re.IGNORECASE):
            return int(number[1])
        if several := re.match(r"\[\d+,(\d+)\]", found[0]):
            return int(several[1])
        # A log collector puts its time first.
        if not found[0][:4].isdigit() and (named := _SOURCE.match(found[0])) is not None:
            return int(named[1])
        text = text[found.end() :]
    return None


def stamp_of(text: str) -> float | None:
    """Read the time that a line gives itself; one without a zone is taken as local."""
    found = _STAMP.search(text)
    if found is None:
        return None
    year, month, day, hour, minute, second, milli, micro, zone = found.groups()
    try:
        moment = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second))
        if zone:
            moment = datetime.fromisoformat(f"{moment.isoformat()}{_offset(zone)}")
        seconds = moment.timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return seconds + int(milli or 0) / 1e3 + int(micro or 0) / 1e6


def _offset(zone: str) -> str:
    if zone == "Z":
        return "+00:00"
    return zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"


_MASKED = re.compile(
    r"0x[0-9a-f]+|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b|\b[0-9a-f]{8,}\b|\d+(?:[.,:]\d+)*(?:[eE][+-]?\d+)?",
    re.IGNORECASE,
)
_BARS = re.compile(r"[|█▏▎▍▌▋▊▉#=>\-\s]{3,}")


def mask(text: str) -> str:
    """Make a line comparable: numbers, addresses and bars of any length become alike."""
    return _BARS.sub(" ", _MASKED.sub("#", text)).strip()
