"""What npu-smi says of the NPUs while a job runs, for the run report; it may hang, flood, or print rubbish.

Unlike the tools that are asked once before a job, it is asked in the job's middle: nothing waits for it,
and what it is doing when the job ends is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.host.devices import npus
from davincirunsdk.host.tools import chips_of, find_tool
from davincirunsdk.types import NpuUsage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PATIENCE = 10
"""Seconds for one answer."""

_LAST_PATIENCE = 1.0
"""Seconds for a killed one to be gone: one that the driver holds in the kernel stays until that lets go."""

_MOST = 64 << 10
"""Bytes of an answer; a real one has less than a thousand."""

_FIGURES = {
    "Aicore Usage Rate(%)": "use",
    "HBM Usage Rate(%)": "memory",
    "Memory Usage Rate(%)": "ddr",
    "Temperature(C)": "temperature",
}
"""Lines of `npu-smi info -t common`, as in Huawei's reference. DDR counts for boards that have no HBM."""

_CREDIBLE = {"use": (0.0, 100.0), "memory": (0.0, 100.0), "ddr": (0.0, 100.0), "temperature": (-60.0, 200.0)}


class NpuTool:
    """The npu-smi of this host.

    Args:
        path: Its program.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._began = 0.0
        self._closed = False
        self._chips: Mapping[int, tuple[str, str]] | None = None

    @classmethod
    def find(cls) -> NpuTool | None:
        """Look for it where its package puts it, and on PATH; None where it is not."""
        path = find_tool("npu-smi", Path("/"), os.environ.get("PATH"))
        return None if path is None else cls(path)

    def look(self, numbers: Sequence[int]) -> tuple[Mapping[int, NpuUsage], float]:
        """Ask for NPUs; blocking, for a thread.

        Args:
            numbers: Their numbers on this host, as in a rank table.

        Returns:
            What is known of each, and the processor seconds that it took. The first that does not
            answer ends the look: the others would not either.
        """
        began = time.thread_time()
        spent = 0.0
        if self._chips is None:
            said, spent = self._ask("-m")
            self._chips = chips_of(said, npus(Path("/")))
        found: dict[int, NpuUsage] = {}
        answers: dict[str, Mapping[str, Mapping[str, float]]] = {}
        for number in numbers:
            board, chip = self._chips.get(number, (str(number), ""))
            # Two chips of a board are in one answer.
            if board not in answers:
                said, more = self._ask("-t", "common", "-i", board)
                spent += more
                answers[board] = figures_of(said)
                if not answers[board]:
                    break
            figures = answers[board].get(chip or next(iter(answers[board])))
            if figures is not None:
                found[number] = NpuUsage(
                    npu=number,
                    use=figures.get("use"),
                    memory=figures.get("memory", figures.get("ddr")),
                    temperature=figures.get("temperature"),
                )
        return found, spent + time.thread_time() - began

    def close(self) -> None:
        """Kill what it is doing and ask it nothing more; from any thread, never blocks."""
        with self._lock:
            self._closed = True
            self._kill()

    def _ask(self, *words: str) -> tuple[str, float]:
        """Run it to its end; what it says, "" without an answer, and the processor seconds it took."""
        source, output = os.pipe()
        try:
            pid = self._start([self._path, "info", *words], output)
        finally:
            os.close(output)
        deadline = time.monotonic() + _PATIENCE
        try:
            data = b"" if pid is None else _read(source, deadline)
        finally:
            os.close(source)
        spent = 0.0 if pid is None else self._reap(deadline if data else time.monotonic())
        return data.decode(errors="replace"), spent

    def _start(self, words: list[str], output: int) -> int | None:
        # With a limit that holds without us, too: a launcher that is killed leaves no hanging one behind.
        limit = shutil.which("timeout")
        words = [limit, "-s", "KILL", str(_PATIENCE), *words] if limit is not None else words
        with self._lock:
            self._try_to_reap()
            # One that the driver holds in the kernel is still there: another would be held as well.
            if self._closed or self._pid is not None:
                return None
            self._began = time.monotonic()
            with contextlib.suppress(OSError):
                self._pid = os.posix_spawn(
                    words[0],
                    words,
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                        (os.POSIX_SPAWN_DUP2, output, 1),
                        (os.POSIX_SPAWN_DUP2, 0, 2),
                    ],
                    setpgroup=0,
                    setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGTERM],
                    setsigmask=[],
                )
            return self._pid

    def _reap(self, deadline: float) -> float:
        """Wait for its end, which a kill brings when its time is over; the processor seconds it took."""
        while True:
            with self._lock:
                spent = self._try_to_reap()
                if self._pid is None:
                    return spent
                now = time.monotonic()
                if now >= deadline:
                    self._kill()
            if now > deadline + _LAST_PATIENCE:
                return 0.0
            time.sleep(0.01)

    def _try_to_reap(self) -> float:
        if self._pid is None:
            return 0.0
        try:
            gone, _, used = os.wait4(self._pid, os.WNOHANG)
        except ChildProcessError:
            # Somebody else reaps every child: it cannot have taken more than this.
            self._pid = None
            return time.monotonic() - self._began
        if not gone:
            return 0.0
        self._pid = None
        return used.ru_utime + used.ru_stime

    def _kill(self) -> None:
        self._try_to_reap()
        if self._pid is not None:
            # It has not been reaped yet, so the number is its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


def _read(pipe: int, deadline: float) -> bytes:
    """Read an answer that comes to its end in time and in bounds, b"" otherwise."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    data = b""
    while len(data) <= _MOST and (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            piece = os.read(pipe, _MOST)
            if not piece:
                return data
            data += piece
    return b""


def figures_of(text: str) -> dict[str, dict[str, float]]:
    """Read `npu-smi info -t common`: chip id to figures, "" for the only chip where it has no id.

    Args:
        text: What was printed, whatever it is.
    """
    found: dict[str, dict[str, float]] = {}
    chip: str | None = ""
    for line in text.splitlines():
        name, _, value = (piece.strip() for piece in line.partition(":"))
        if name == "Chip ID":
            chip = value
        elif name == "Chip Name":
            # The board's controller, which has a temperature of its own.
            chip = None
        elif chip is not None and name in _FIGURES:
            figure = _number(value)
            low, high = _CREDIBLE[_FIGURES[name]]
            if figure is not None and low <= figure <= high:
                found.setdefault(chip, {}).setdefault(_FIGURES[name], figure)
    return found


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
