"""What the workers of `workers/kinds.py` have recorded: which processes of a job there are and were."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
PY = sys.executable

KINDS = {
    "obedient": 1,
    "deaf": 1,
    "stopped": 1,
    "setsid": 1,
    "double-fork": 1,
    "double-fork-setsid": 1,
    "pipe": 1,
    "dying": 1,
    "once": 1,
    "shell": 1,
    "bare": 1,
    "bare-setsid": 1,
    "pool": 3,
    "fails": 1,
    "lost": 1,
    "once-setsid": 1,
    "counts": 1,
    "once-pipe": 1,
    "floods": 1,
    "talks": 1,
}
_OF_SINGLE_TESTS = ("lost", "once-setsid", "counts", "once-pipe", "floods", "talks")
"""Records that each kind makes before it is ready."""

EVERY_KIND = tuple(kind for kind in KINDS if kind not in _OF_SINGLE_TESTS)
LIGHT_KINDS = tuple(kind for kind in EVERY_KIND if kind != "pool")
"""Without the one that starts six interpreters."""


def in_time(seconds: float) -> float:
    """Return how long a promised time may take here and now.

    Promises are for a machine that has time for the job: where more processes want to run than it has
    cores, they take longer by that ratio, at most four times as long.
    """
    wanting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * min(4.0, max(1.0, wanting))


class Recorded:
    """A folder that a job's processes record themselves in.

    Args:
        folder: An empty folder of the test's own.
        kinds: One per worker.
    """

    def __init__(self, folder: Path, kinds: tuple[str, ...] = EVERY_KIND) -> None:
        self.folder = folder / "records"
        self.folder.mkdir(exist_ok=True)
        self.kinds = kinds
        self.end_began = 0.0

    @property
    def command(self) -> list[str]:
        """The worker command of the job."""
        # No site: a dozen interpreters start per job.
        return [PY, "-S", "-E", str(WORKERS / "kinds.py"), str(self.folder), ",".join(self.kinds)]

    @property
    def count(self) -> int:
        """Workers of the job."""
        return len(self.kinds)

    def ready(self) -> bool:
        """Tell whether every process that the kinds start has recorded itself."""
        seen = Counter(kind for kind, _, _ in self._all())
        wanted = Counter(kind for kind in self.kinds for _ in range(KINDS[kind]))
        return seen >= wanted and self._is_stopped()

    async def until_ready(self) -> None:
        """Wait for `ready` in an event loop."""
        deadline = time.monotonic() + 20
        while not self.ready():
            assert time.monotonic() < deadline, f"not ready: {sorted(self._all())}"
            await asyncio.sleep(0.02)

    def ends_now(self) -> None:
        """Note the moment at which the end of the job begins."""
        self.end_began = time.monotonic()

    def signals(self) -> list[int]:
        """List the signals that workers of kind `counts` have got."""
        return [int(line) for path in self.folder.glob(".signals.*") for line in path.read_text().split()]

    def let_fail(self) -> None:
        """Have the worker of kind `fails` end with exit code 3."""
        (self.folder.parent / "fail").touch()

    def go(self) -> None:
        """Have `workers/host.py` do what it is there for."""
        (self.folder.parent / "go").touch()

    def pids(self, kind: str) -> list[int]:
        """List the processes that recorded themselves as `kind`."""
        return [pid for found, pid, _ in self._all() if found == kind]

    def alive(self) -> list[str]:
        """List kind and pid of every recorded process that lives; a zombie does not."""
        return [f"{kind} {pid}" for kind, pid, started in self._all() if _lives(pid, started)]

    def kill_all(self) -> None:
        """End what a failed test has left."""
        for _, pid, started in self._all():
            if _lives(pid, started):
                os.kill(pid, signal.SIGKILL)

    def assert_gone_by(self, deadline: float) -> None:
        """Wait for the death of all until the monotonic second `deadline`."""
        while alive := self.alive():
            assert time.monotonic() < deadline, f"still alive (kind, pid): {alive}"
            time.sleep(0.02)

    def _is_stopped(self) -> bool:
        return all(
            _state(pid, started) in ("T", "") for kind, pid, started in self._all() if kind == "stopped"
        )

    def _all(self) -> list[tuple[str, int, str]]:
        found = []
        for path in self.folder.glob("[!.]*.*"):
            kind, _, pid = path.name.rpartition(".")
            found.append((kind, int(pid), path.read_text()))
        return found


def _lives(pid: int, started: str) -> bool:
    return _state(pid, started) not in ("", "Z", "X")


def _state(pid: int, started: str) -> str:
    """State letter of the process that had this pid when it recorded itself, "" when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[0] if fields[19] == started else ""
