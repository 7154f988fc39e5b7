"""Small pictures in SVG, drawn by hand: a timeline of ranks, and lines over time. Text in them is escaped."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.output.run_record import Point

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 8, 26
_MOST_POINTS = 240
"""Points of a line: more would be drawn on the same pixels."""

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A piece of a row.

    Attributes:
        begin: Wall-clock seconds.
        end: Wall-clock seconds.
        look: Class of the style sheet.
        title: What a pointer over it shows.
    """

    begin: float
    end: float
    look: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank of a timeline.

    Attributes:
        label: At its left.
        bars: Its pieces.
    """

    label: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve.

    Attributes:
        label: What it shows.
        points: In order of time.
        look: Class of the style sheet.
    """

    label: str
    points: Sequence[Point]
    look: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment that all rows share.

    Attributes:
        time: Wall-clock seconds.
        look: Class of the style sheet.
        title: What a pointer over it shows.
    """

    time: float
    look: str
    title: str


def timeline(rows: Sequence[Row], marks: Sequence[Mark], begin: float, end: float) -> str:
    """Draw rows of bars over the same time.

    Args:
        rows: From top to bottom; with many they become thin, and few of them are labelled.
        marks: Lines across all rows.
        begin: Wall-clock second at the left.
        end: At the right.

    Returns:
        An `svg` element.
    """
    height = 20 if len(rows) <= 32 else 10 if len(rows) <= 128 else 3
    gap = 3 if height > 10 else 1 if height > 3 else 0
    every = max(1, math.ceil(16 / (height + gap)))
    axis = _Axis(begin, end)
    bottom = _TOP + len(rows) * (height + gap)
    parts = [axis.ticks(_TOP, bottom)]
    for place, row in enumerate(rows):
        top = _TOP + place * (height + gap)
        if place % every == 0:
            parts.append(
                f'<text class="label" x="{_LEFT - 8}" y="{top + min(height, 12) / 2 + 4:g}" '
                f'text-anchor="end">{escape(row.label)}</text>'
            )
        for bar in row.bars:
            left, right = axis.x(bar.begin), axis.x(bar.end)
            parts.append(
                f'<rect class="{bar.look}" x="{left:.1f}" y="{top}" width="{max(1.0, right - left):.1f}" '
                f'height="{height}"><title>{escape(bar.title)}</title></rect>'
            )
    for mark in marks:
        place_x = axis.x(mark.time)
        parts.append(
            f'<line class="{mark.look}" x1="{place_x:.1f}" x2="{place_x:.1f}" y1="{_TOP}" y2="{bottom}">'
            f"<title>{escape(mark.title)}</title></line>"
        )
    return _svg(parts, bottom + _BOTTOM, "Timeline of the ranks")


def line_chart(
    lines: Sequence[Line],
    begin: float,
    end: float,
    title: str,
    unit: str = "",
    *,
    breaks: Sequence[float] = (),
) -> str:
    """Draw curves over time.

    Args:
        lines: The curves; those with less than two points are left out.
        begin: Wall-clock second at the left.
        end: At the right.
        title: What the picture shows.
        unit: `bytes`, another one such as `s`, or "" for plain numbers.
        breaks: Moments that no curve is drawn across, such as the beginning of another attempt.

    Returns:
        An `svg` element with a legend, "" when there is nothing to draw.
    """
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return ""
    height = 180
    values = [point.value for line in lines for point in line.points]
    low, high = min(values), max(values)
    if low >= 0 and low < high / 2:
        low = 0.0
    if high == low:
        high = low + (abs(low) or 1.0)
    axis = _Axis(begin, end)
    bottom = _TOP + height

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * height

    parts = [axis.ticks(_TOP, bottom)]
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="label" x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">'
            f"{escape(figure(value, unit))}</text>"
        )
    for line in lines:
        last = figure(line.points[-1].value, unit)
        for _, piece in itertools.groupby(
            thinned(line.points), key=lambda point: bisect.bisect(breaks, point.time)
        ):
            path = " ".join(f"{axis.x(point.time):.1f},{y(point.value):.1f}" for point in piece)
            parts.append(
                f'<polyline class="{line.look}" points="{path}">'
                f"<title>{escape(f'{line.label}: {last}')}</title></polyline>"
            )
    legend = "".join(
        f'<span class="key"><i class="{line.look}"></i>{escape(line.label)}</span>' for line in lines
    )
    return f"{_svg(parts, bottom + _BOTTOM, title)}<p class=legend>{legend}</p>"


def thinned(points: Sequence[Point]) -> list[Point]:
    """Leave as many points as can be seen: of each piece the lowest and the highest, in their order."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[Point] = []
    for place in range(0, len(points), size):
        piece = points[place : place + size]
        low, high = (choose(piece, key=lambda point: point.value) for choose in (min, max))
        kept += sorted({id(low): low, id(high): high}.values(), key=lambda point: point.time)
    return kept


def figure(value: float, unit: str = "") -> str:
    """Write a number as a person reads it."""
    if unit == "bytes":
        for name in ("B", "kB", "MB", "GB"):
            if abs(value) < 1000 or name == "GB":
                return f"{value:.3g} {name}" if name != "B" else f"{value:.0f} B"
            value /= 1000
    return f"{value:.4g}{' ' + unit if unit else ''}"


def span(seconds: float) -> str:
    """Write a length of time as a person reads it."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


class _Axis:
    """Time from left to right."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._length = max(end - begin, 1e-3)

    def x(self, time: float) -> float:
        share = min(1.0, max(0.0, (time - self._begin) / self._length))
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def ticks(self, top: float, bottom: float) -> str:
        step = float(next((step for step in _STEPS if self._length / step <= 8), _STEPS[-1]))
        if self._length < 2:
            step = self._length / 4
        while self._length / step > 12:
            step *= 2
        parts = []
        for number in range(int(self._length / step) + 1):
            place = self.x(self._begin + number * step)
            # The last one would be cut off at the edge.
            anchor = "end" if place > WIDTH - 3 * _RIGHT else "middle"
            parts.append(
                f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{bottom}"/>'
                f'<text class="label" x="{place:.1f}" y="{bottom + 16}" text-anchor="{anchor}">'
                f"{escape(span(number * step))}</text>"
            )
        return "".join(parts)


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    drawn = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{drawn}</svg>'
