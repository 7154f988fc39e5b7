"""Following a job's files: logs of its ranks, its events, its end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

from davincirunsdk.leftovers.proc import Proc
from davincirunsdk.output.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from davincirunsdk.ctl.jobs import HostJob

_STEP = 0.2
"""Seconds between looks at growing files: people read them, and a network disk tells of no change."""

_BLOCK = 1 << 20
_LINE_BYTES = 200
"""What a line is taken to have at most, to find the last ones without reading a large file."""


def show_tail(job: HostJob, ranks: Sequence[int], lines: int) -> None:
    """Print the last lines of ranks' logs, each with its rank before it."""
    for rank, file in _opened(job, ranks).items():
        last = file.last(lines)
        for line in [*last, *file.rest()][-lines:] if lines else []:
            _print(rank, line)
        file.close()
    sys.stdout.flush()


def follow(job: HostJob, ranks: Sequence[int], lines: int) -> Mapping[str, object] | None:
    """Print the last lines of ranks' logs, and what they write from then on, until the job ends.

    Returns:
        The job's last event, None when its launcher was lost.
    """
    files = _opened(job, ranks)
    end: Mapping[str, object] | None = None
    try:
        for rank, file in files.items():
            for line in file.last(lines):
                _print(rank, line)
        for last in _until_end(job):
            end = last
            for rank, file in files.items():
                for line in file.lines():
                    _print(rank, line)
            sys.stdout.flush()
        for rank, file in files.items():
            for line in file.rest():
                _print(rank, line)
        sys.stdout.flush()
    finally:
        for file in files.values():
            file.close()
    return end


def _opened(job: HostJob, ranks: Sequence[int]) -> dict[int, _Growing]:
    files = {}
    for rank in ranks:
        try:
            files[rank] = _Growing(job.record.logs[rank])
        except OSError as error:
            sys.stdout.write(f"{_prefix(rank)}cannot be read: {error.strerror}\n")
    return files


def copy_events(job: HostJob, *, follow: bool) -> None:
    """Print a job's events as they stand in its file, and with `follow` those to come."""
    file = _Growing(job.events)
    try:
        for _ in _until_end(job) if follow else [None]:
            for line in file.lines():
                sys.stdout.buffer.write(line + b"\n")
            sys.stdout.flush()
    finally:
        file.close()


def wait(job: HostJob) -> Mapping[str, object] | None:
    """Wait for a job's end.

    Returns:
        Its last event, None when its launcher was lost.
    """
    end: Mapping[str, object] | None = None
    for last in _until_end(job):
        end = last
    return end


def last_event(path: Path) -> Mapping[str, object] | None:
    """Read the last event of a job that is over, None when its launcher was lost."""
    events = _Growing(path)
    try:
        return next((event for line in events.lines() if (event := _finished(line)) is not None), None)
    finally:
        events.close()


def news(job: HostJob) -> Callable[[], Iterator[bytes]]:
    """Events of a job from now on: a function that gives those that have come since its last call."""
    file = _Growing(job.events)
    file.last(0)
    return file.lines


def is_gone(job: HostJob) -> bool:
    """Tell whether a job's launcher has ended."""
    look = Proc().look(job.launcher)
    return look is None or look.is_dead


def _until_end(job: HostJob) -> Iterator[Mapping[str, object] | None]:
    """Yield at every look; the last time with the job's last event, or None when its launcher is lost."""
    proc = Proc()
    launcher = proc.look(job.launcher)
    events = _Growing(job.events)
    try:
        while True:
            look = proc.look(job.launcher)
            gone = look is None or look.is_dead or launcher is None or look.started != launcher.started
            end = next((event for line in events.lines() if (event := _finished(line)) is not None), None)
            if end is not None or gone:
                yield end
                return
            yield None
            time.sleep(_STEP)
    finally:
        events.close()


def _finished(line: bytes) -> Mapping[str, object] | None:
    if b'"finished"' not in line:
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, Mapping) and event.get("kind") == "finished" else None


class _Growing:
    """A file that somebody writes: its lines as they get complete, and those of one that takes its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("rb")
        self._rest = b""

    def last(self, count: int) -> list[bytes]:
        """Go to the end as it is now; the last whole lines before it, states of bars counting as lines."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - max(4096, _LINE_BYTES * count)))
        *whole, self._rest = self._file.read().split(b"\n")
        lines = [line for text in whole for line in text.split(b"\r") if line]
        return lines[-count:] if count else []

    def lines(self) -> Iterator[bytes]:
        """What has come since the last call."""
        yield from self._whole()
        if self._is_replaced():
            # Another attempt has begun: it has a file of its own, and this one has got its number.
            yield from self._whole()
            yield from self.rest()
            self.close()
            self._file = self._path.open("rb")
            yield from self._whole()

    def rest(self) -> list[bytes]:
        """What stands behind the last whole line, once."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def close(self) -> None:
        self._file.close()

    def _whole(self) -> Iterator[bytes]:
        while data := self._file.read(_BLOCK):
            *whole, rest = (self._rest + data).split(b"\n")
            # A bar that never ends its line.
            self._rest = rest[-_BLOCK:]
            yield from whole

    def _is_replaced(self) -> bool:
        try:
            now = self._path.stat()
        except OSError:
            return False
        here = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (here.st_dev, here.st_ino)


def _print(rank: int, line: bytes) -> None:
    text = clean(line.rpartition(b"\r")[2].decode(errors="replace"), colour=False)
    sys.stdout.write(f"{_prefix(rank)}{text}\n")


def _prefix(rank: int) -> str:
    return "[scheduler] " if rank < 0 else f"[rank {rank}] "
