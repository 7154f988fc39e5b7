"""A log file with a limit: its head and its tail, and a mark in between that says what is missing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from davincirunsdk.logs.file import LogFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LEAST = 4096


class LimitedLogFile(LogFile):
    """Keeps the first half of `limit` and the last bytes up to the limit.

    While the worker runs, the newest output is in a file beside it, `<name>.tail`, with the part
    before in `<name>.tail.old`; at the end both are appended behind the mark.

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

    def write(self, data: bytes) -> None:
        """Append `data` to the head while there is room, else to the tail."""
        if self._head_room:
            head, data = data[: self._head_room], data[self._head_room :]
            self._head_room -= len(head)
            super().write(head)
        while data:
            if self._tail is None or self._tail.size + self._tail.lost >= self._part_bytes:
                try:
                    self._turn()
                except OSError as error:
                    self._lose(len(data))
                    self.warn_once(f"cannot keep the tail of {self.path}: {error.strerror}")
                    return
            assert self._tail is not None
            room = self._part_bytes - self._tail.size - self._tail.lost
            part, data = data[:room], data[room:]
            lost = self._tail.lost
            self._tail.write(part)
            self._lose(self._tail.lost - lost)

    def close(self) -> None:
        """Put head, mark and tail together, and close the file."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None
            if self.left_out:
                mark = f"\n... {self.left_out} bytes left out here by the log limit ...\n"
                super().write(mark.encode())
            for part in (self._before, self._newest):
                try:
                    self._append(part)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.warn_once(f"cannot add the tail to {self.path}: {error.strerror}; it is in {part}")
        super().close()

    def _append(self, part: Path) -> None:
        with part.open("rb") as source:
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
                self.left_out += left_out
        else:
            self._newest.unlink(missing_ok=True)
            self._before.unlink(missing_ok=True)
        self._tail = LogFile(self._newest, self.on_trouble)
