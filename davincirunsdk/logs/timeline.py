"""When which bytes of output came, cheaply: exact for the last ones, coarser the older they are."""

from __future__ import annotations

_MOST = 2048
"""Entries that are kept; when there are more, every second one of the older half goes."""
_APART = 0.001
"""Seconds that two entries are apart at least."""


class Timeline:
    """Notes how many bytes had come when. One thread notes, any may ask."""

    def __init__(self) -> None:
        self._total = 0
        self._entries: list[tuple[int, float]] = []

    def note(self, size: int, now: float) -> None:
        """Take note of `size` more bytes at the wall-clock second `now`."""
        self._total += size
        entries = self._entries
        if entries and now - entries[-1][1] < _APART:
            entries[-1] = (self._total, entries[-1][1])
            return
        entries.append((self._total, now))
        if len(entries) > _MOST:
            half = len(entries) // 2
            self._entries = entries[1:half:2] + entries[half:]

    def of_last(self, size: int) -> tuple[tuple[int, float], ...]:
        """List pairs of a number of bytes, counted in the last `size` ones, and when so many had come."""
        entries, start = list(self._entries), self._total - size
        return tuple((total - start, moment) for total, moment in entries if total > start)
