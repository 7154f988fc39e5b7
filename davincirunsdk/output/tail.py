"""The newest lines of a job, as many as a display of fixed size can hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Lines:
    lines: deque[tuple[int, str, bool]] = field(default_factory=deque)
    size: int = 0


class Tail:
    """Keeps the newest lines, and of each rank some: the rank that holds most gives up its oldest.

    Args:
        lines: How many lines to keep in all.
        size: How many characters to keep in all.

    Attributes:
        lines_left_out: How many lines are not here any more, or never were.
        size_left_out: Bytes of them, about.
    """

    def __init__(self, *, lines: int, size: int) -> None:
        self.lines_left_out: int = 0
        self.size_left_out: int = 0
        self._most_lines = lines
        self._most_size = size
        self._count = 0
        self._size = 0
        self._place = 0
        self._ranks: dict[int, _Lines] = {}

    def add(self, rank: int, line: str) -> None:
        """Add a rank's next line."""
        self._add(rank, line, notice=False)

    def add_notice(self, rank: int, line: str) -> None:
        """Add a line of ours, in the place of a notice just before it; it never counts as left out."""
        held = self._ranks.get(rank)
        if held is not None and held.lines and held.lines[-1][2]:
            self._grow(held, -1, -len(held.lines.pop()[1]))
        self._add(rank, line, notice=True)

    def _add(self, rank: int, line: str, *, notice: bool) -> None:
        held = self._ranks.get(rank)
        if held is None:
            held = self._ranks[rank] = _Lines()
        self._place += 1
        held.lines.append((self._place, line, notice))
        self._grow(held, 1, len(line))
        while self._count > self._most_lines or self._size > self._most_size:
            fattest = max(self._ranks.values(), key=lambda each: (each.size, len(each.lines)))
            _, gone, was_notice = fattest.lines.popleft()
            self._grow(fattest, -1, -len(gone))
            if not was_notice:
                self.leave_out(1, len(gone) + 1)

    def leave_out(self, lines: int, size: int) -> None:
        """Count lines that are not here."""
        self.lines_left_out += lines
        self.size_left_out += size

    def lines(self) -> list[tuple[int, str]]:
        """Return rank and text of each line kept, in the order they came."""
        return [(rank, text) for rank, text, _ in self._merged()]

    def shortened(self, *, lines: int, size: int) -> Tail:
        """Return a smaller tail of the same lines."""
        if self._count <= lines and self._size <= size:
            return self
        shorter = Tail(lines=lines, size=size)
        shorter.leave_out(self.lines_left_out, self.size_left_out)
        for rank, text, notice in self._merged():
            shorter._add(rank, text, notice=notice)
        return shorter

    def _merged(self) -> list[tuple[int, str, bool]]:
        placed = [
            (place, rank, text, notice)
            for rank, held in self._ranks.items()
            for place, text, notice in held.lines
        ]
        return [(rank, text, notice) for _, rank, text, notice in sorted(placed)]

    def _grow(self, held: _Lines, lines: int, size: int) -> None:
        held.size += size
        self._size += size
        self._count += lines
