"""A log file with a limit: its head and its tail, and a mark in between that says what is missing."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from davincirunsdk.logs.file import LogFile
from davincirunsdk.logs.streams import whole_characters

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LEAST = 4096
_LONG_LINE = 1 << 16
"""A line that is longer than this is cut inside."""


class LimitedLogFile(LogFile):
    """Keeps the first half of `limit` and the last bytes up to the limit.

    While the worker runs, the newest output is in a file beside it, `<name>.tail`, with the part
    before in `<name>.tail.old`; at the end both are appended behind the mark. Then the head ends and the
    tail begins with a whole line, or between two characters where a line is too long for that.

    Args:
        path: The file.
        on_trouble: See `LogFile`.
        limit: Bytes.

    Attributes:
        left_out: Bytes that the mark stands for.
    """

    movable = False

    def __init__(self, path: Path, on_trouble: Callable[[str], None], limit: int) -> None:
        super().__init__(path, on_trouble)
        limit = max(limit, _LEAST)
        self.left_out: int = 0
        self._head_room = limit // 2
        self._part_bytes = limit // 4
        self._tail: LogFile | None = None
        self._newest = path.with_name(f"{path.name}.tail")
        self._before = path.with_name(f"{path.name}.tail.old")
        self._passed = 0
        self._last = b"\n"
        self._newest_begins_line = self._before_begins_line = True

    @property
    def progress(self) -> int:
        """A number that grows with every write that comes to its end, to the tail, too."""
        return self._passed

    def write(self, data: bytes) -> None:
        """Append `data` to the head while there is room, else to the tail."""
        if self._head_room:
            head, data = data[: self._head_room], data[self._head_room :]
            self._head_room -= len(head)
            super().write(head)
            self._note(head)
        while data:
            if self._tail is None or self._tail.size + self._tail.lost >= self._part_bytes:
                try:
                    self._turn()
                except OSError as error:
                    self._lose(len(data))
                    self._note(data)
                    self.warn_once(f"cannot keep the tail of {self.path}: {error.strerror}")
                    return
            assert self._tail is not None
            room = self._part_bytes - self._tail.size - self._tail.lost
            part, data = data[:room], data[room:]
            lost = self._tail.lost
            self._tail.write(part)
            self._lose(self._tail.lost - lost)
            self._note(part)

    def _note(self, data: bytes) -> None:
        self._passed += len(data)
        self._last = data[-1:] or self._last

    def close(self) -> None:
        """Put head, mark and tail together, and close the file."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None
            skipped = 0
            if self.left_out:
                skipped = self._unwanted_start()
                self.left_out += self._cut_head() + skipped
                mark = f"\n... {self.left_out} bytes left out here by the log limit ...\n"
                super().write(mark.encode())
            for part, start in ((self._before, skipped), (self._newest, 0)):
                try:
                    self._append(part, start)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.warn_once(f"cannot add the tail to {self.path}: {error.strerror}; it is in {part}")
        super().close()

    def _cut_head(self) -> int:
        """Cut the part of a line from the end of the head; return its length."""
        try:
            size = os.stat(self.path).st_size
            with self.path.open("rb") as head:
                head.seek(max(0, size - _LONG_LINE))
                end = head.read(_LONG_LINE)
            cut = len(end) - (end.rfind(b"\n") + 1 or whole_characters(end))
            if cut and size == self.size:
                self.shorten(cut)
                return cut
        except OSError:
            # Of a head that cannot be read, nothing is cut.
            pass
        return 0

    def _unwanted_start(self) -> int:
        """Length of the part of a line, or of a character, with which the tail begins."""
        if self._before_begins_line:
            return 0
        try:
            with self._before.open("rb") as tail:
                start = tail.read(_LONG_LINE)
        except OSError:
            return 0
        if 0 < (cut := start.find(b"\n") + 1) < len(start):
            return cut
        return len(start) - len(start.lstrip(bytes(range(0x80, 0xC0)))) if len(start) > 4 else 0

    def _append(self, part: Path, start: int) -> None:
        with part.open("rb") as source:
            source.seek(start)
            while piece := source.read(1 << 20):
                super().write(piece)
        part.unlink()

    def _turn(self) -> None:
        """Let the tail become the part before, and begin a new one."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None
            left_out = 0
            with suppress(FileNotFoundError):
                left_out = self._before.stat().st_size
            with suppress(FileNotFoundError):
                self._newest.replace(self._before)
                self._before_begins_line = self._newest_begins_line
                self.left_out += left_out
        else:
            self._newest.unlink(missing_ok=True)
            self._before.unlink(missing_ok=True)
        self._newest_begins_line = self._last == b"\n"
        self._tail = LogFile(self._newest, self.on_trouble)
