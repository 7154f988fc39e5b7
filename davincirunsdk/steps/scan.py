"""From a worker's output to its progress, at a cost that does not grow with the output."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from davincirunsdk.steps.shapes import SHAPES, read_line
from davincirunsdk.steps.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.steps.channel import Slot
    from davincirunsdk.steps.shapes import Shape
    from davincirunsdk.types import Progress

_BYTES_A_SECOND = 1 << 20
"""Output of one worker up to which every line is looked at."""
_LINES_A_SECOND = 2000
"""The same in lines: looking at short ones costs more than carrying them, and would hold the worker."""
_TAIL_BYTES = 1 << 16
"""What is looked at, once a second, of a worker that writes more."""
_LINE_BYTES = 4096
"""An unfinished line is kept up to this length, from its end."""


class StepScanner:
    """Follows one worker's steps: in its output, and in what its script says itself.

    `see` is called in the thread that carries the output, everything else from any thread.

    Args:
        tell: Takes the progress when it has changed, at most once a second, in the caller's thread.
        slot: Where the script writes its own progress, None where it cannot.
        pattern: The user's shape, tried before the known ones.
    """

    def __init__(
        self, tell: Callable[[Progress], None], slot: Slot | None = None, pattern: Shape | None = None
    ) -> None:
        self._tell = tell
        self._slot = slot
        self._shapes = SHAPES if pattern is None else (pattern, *SHAPES)
        self._tracker = Tracker()
        self._lock = threading.Lock()
        self._rest = b""
        self._tail = bytearray()
        self._flooded = False
        self._second = 0
        self._seen = 0
        self._lines = 0
        self._told: Progress | None = None
        self._told_at = 0.0

    def see(self, data: bytes) -> None:
        """Take output, which may end anywhere."""
        now = time.time()
        with self._lock:
            if int(now) != self._second:
                self._look_at_tail(now)
                self._flooded = self._is_too_much()
                self._second, self._seen, self._lines = int(now), 0, 0
            self._seen += len(data)
            self._lines += data.count(b"\n") + data.count(b"\r")
            if self._flooded or self._is_too_much():
                self._tail += data[-_TAIL_BYTES:]
                del self._tail[:-_TAIL_BYTES]
            else:
                self._scan(data, now)
        self.announce()

    def _is_too_much(self) -> bool:
        return self._seen > _BYTES_A_SECOND or self._lines > _LINES_A_SECOND

    def skip(self) -> None:
        """Know that output went by unseen before what is seen next."""
        with self._lock:
            self._rest = b""

    @property
    def progress(self) -> Progress | None:
        """How far the training is."""
        now = time.time()
        with self._lock:
            self._look_at_tail(now)
            if self._slot is not None and (reading := self._slot.read()) is not None:
                self._tracker.take(*reading)
            return self._tracker.progress

    def announce(self, *, last: bool = False) -> None:
        """Hand the progress on if it has changed.

        Args:
            last: Also when that was done within this second.
        """
        now = time.monotonic()
        if now - self._told_at < 1.0 and not last:
            return
        progress = self.progress
        if progress is not None and progress != self._told:
            self._told, self._told_at = progress, now
            self._tell(progress)

    def _look_at_tail(self, now: float) -> None:
        if self._tail:
            tail, self._tail = bytes(self._tail), bytearray()
            # What came before it was not looked at.
            self._rest = b""
            self._scan(tail, now)

    def _scan(self, data: bytes, now: float) -> None:
        *lines, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-_LINE_BYTES:]
        for line in lines[-_LINES_A_SECOND:]:
            self._read(line, now)
        # A bar is written without an end; it is whole when its bracket is closed.
        if rest.rstrip().endswith((b"]", b"\x1b[A")):
            self._read(rest, now)

    def _read(self, line: bytes, now: float) -> None:
        if line and (reading := read_line(line.decode(errors="replace"), self._shapes)) is not None:
            self._tracker.take(reading, now)
