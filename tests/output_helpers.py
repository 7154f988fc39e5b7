"""A job that only exists for its display, and a terminal to look at."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.output import Snapshot
from davincirunsdk.types import JobState, LogBlock, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.output import Sink


def worker(rank: int, **changes: object) -> WorkerStatus:
    """Return the status of a running worker, with changes."""
    values: dict[str, object] = {
        "rank": rank,
        "local_rank": rank,
        "device_id": rank,
        "pid": 4000 + rank,
        "state": WorkerState.RUNNING,
        "exit_code": None,
        "started": time.time() - 3723,
        "ended": None,
        "log_path": Path(f"/logs/job-proc-rank-{rank}-device-{rank}.txt"),
        "log_bytes": 1_234_567,
        "last_output": None,
        "last_line": "",
        "lost_bytes": 0,
        "name": f"rank {rank}",
    }
    return WorkerStatus(**(values | changes))  # type: ignore[arg-type]


@dataclass
class Job:
    """A job whose state a test sets by hand."""

    workers: tuple[WorkerStatus, ...] = field(default_factory=lambda: (worker(0), worker(1)))
    state: JobState = JobState.RUNNING
    report: str = ""

    @property
    def names(self) -> dict[int, str]:
        return {each.rank: each.name for each in self.workers}

    def snapshot(self) -> Snapshot:
        return Snapshot(
            job_id="job-1", state=self.state, workers=self.workers, log_dir=Path("/logs"), report=self.report
        )


def say(sink: Sink, rank: int, data: bytes) -> None:
    """Let a worker say something."""
    sink.write(LogBlock(rank=rank, data=data, time=time.time()))


class Pty:
    """A pseudo-terminal of 24 rows that is read all the time."""

    def __init__(self, columns: int = 80) -> None:
        self.main, other = os.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = open(other, "w", encoding="utf-8")
        self.raw = b""
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.main, 1 << 16)
            except OSError:
                return
            with self._news:
                self.raw += data
                self._news.notify_all()

    def wait_for(self, text: str, timeout: float = 10) -> None:
        """Wait until the screen shows a text."""
        self.wait_until(lambda rows: text in "\n".join(rows), timeout)

    def wait_until(self, accept: Callable[[list[str]], bool], timeout: float = 10) -> None:
        """Wait until the screen is as wanted."""
        with self._news:
            assert self._news.wait_for(lambda: accept(self.screen()), timeout), self.screen()

    def screen(self) -> list[str]:
        """Return all rows from the first one on, without colours."""
        return screen(self.raw.decode(errors="replace"))

    def close(self) -> None:
        self.stream.close()
        self._thread.join(10)
        os.close(self.main)


def screen(output: str) -> list[str]:
    """Play output on an endless screen and return its rows, without the empty ones at the end."""
    rows: list[str] = [""]
    row = column = 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", output):
        if token == "\n":
            row += 1
            if row == len(rows):
                rows.append("")
        elif token == "\r":
            column = 0
        elif token == "\x1b[J":
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
        elif token.startswith("\x1b"):
            assert token[-1] in "Am", f"an unexpected control sequence: {token!r}"
            if token[-1] == "A":
                row -= int(token[2:-1])
        else:
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
            column += 1
    while rows and not rows[-1]:
        rows.pop()
    return rows
