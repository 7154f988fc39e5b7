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
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from davincirunsdk.ctl.jobs import HostJob

_STEP = 0.2
"""Seconds between looks at growing files: people read them, and a network disk tells of no change."""

_BLOCK = 1 << 20
_LINE_BYTES = 200
"""What a line is taken to have at most, to find the last ones without reading a large file."""


def show_tail(job: HostJob, ranks: Sequence[int], lines: int) -> None:
    """Print the last lines of ranks' logs, each with its rank before it."""
    for rank in ranks:
        path = job.record.logs[rank]
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - max(4096, _LINE_BYTES * lines)))
                data = file.read()
        except OSError as error:
            sys.stdout.write(f"{_prefix(rank)}cannot be read: {error.strerror}\n")
            continue
        last = data.replace(b"\r", b"\n").split(b"\n")
        for line in [line for line in last if line][-lines:] if lines else []:
            _print(rank, line)
    sys.stdout.flush()


def follow(job: HostJob, ranks: Sequence[int]) -> Mapping[str, object] | None:
    """Print what ranks write from now on, line by line, until the job ends.

    Returns:
        The job's last event, None when its launcher was lost.
    """
    files = {}
    for rank in ranks:
        try:
            files[rank] = _Growing(job.record.logs[rank])
        except OSError:
            continue
    end: Mapping[str, object] | None = None
    try:
        for last in _until_end(job):
            end = last
            for rank, file in files.items():
                for line in file.lines():
                    _print(rank, line)
            sys.stdout.flush()
    finally:
        for file in files.values():
            file.close()
    return end


def copy_events(job: HostJob, *, follow: bool) -> None:
    """Print a job's events as they stand in its file, and with `follow` those to come."""
    file = _Growing(job.events, from_begin=True)
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
    events = _Growing(path, from_begin=True)
    try:
        return next((event for line in events.lines() if (event := _finished(line)) is not None), None)
    finally:
        events.close()


def _until_end(job: HostJob) -> Iterator[Mapping[str, object] | None]:
    """Yield at every look; the last time with the job's last event, or None when its launcher is lost."""
    proc = Proc()
    launcher = proc.look(job.launcher)
    events = _Growing(job.events, from_begin=True)
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
    """A file that somebody writes: its lines as they get complete."""

    def __init__(self, path: Path, *, from_begin: bool = False) -> None:
        self._file: IO[bytes] = path.open("rb")
        self._rest = b""
        if not from_begin:
            self._file.seek(0, os.SEEK_END)

    def lines(self) -> Iterator[bytes]:
        while data := self._file.read(_BLOCK):
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole

    def close(self) -> None:
        self._file.close()


def _print(rank: int, line: bytes) -> None:
    text = clean(line.rpartition(b"\r")[2].decode(errors="replace"), colour=False)
    sys.stdout.write(f"{_prefix(rank)}{text}\n")


def _prefix(rank: int) -> str:
    return "[scheduler] " if rank < 0 else f"[rank {rank}] "
