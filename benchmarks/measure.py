"""What both benchmarks need: programs that are started and looked at, figures that are printed."""

from __future__ import annotations

import argparse
import os
import platform
import re
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LIMIT = 60.0
"""Seconds after which a run has failed."""
PYTHON: tuple[str | Path, ...] = (sys.executable, "-I", "-S")
"""How workers are started: as little as possible of what is measured is Python's own start."""
OURS = Path(sys.executable).with_name("davincirun")
HERE = Path(__file__).parent

_FIRST_LINE = re.compile(rb"first line of (\d+)\.")
_LAUNCHERS = re.compile(
    r"^(RANK|WORLD|LOCAL_|GROUP_|MASTER_|MS_|MA_|OMPI_|TORCHELASTIC|DAVINCIRUN|DEVICE_ID|JOB_ID)"
)


class RunError(Exception):
    """A program did not do what it was started for."""


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of what is measured: a plain user's, whatever surrounds the benchmark."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
    # Where no byte code may be written, every start compiles the program anew.
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPATH"):
        kept.pop(name, None)
    return {**kept, **extra}


class Program:
    """A program that was started, what it has said so far, and when.

    Args:
        command: Its words.
        notes: Folder in which its workers leave notes.
        extra: Variables it gets besides the user's.
        stdout: Descriptor its output goes to; None to read it here, as its standard error always is.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        notes: Path,
        extra: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self.notes = notes
        self.output = b""
        self.first_lines: dict[bytes, float] = {}
        """When the first line of each rank came out of the program."""
        self._command = [str(word) for word in command]
        self.launched = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.STDOUT if stdout is None else subprocess.PIPE,
            cwd=notes,
            env=environment(extra or {}),
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        pipe = self.process.stdout or self.process.stderr
        assert pipe is not None
        while data := os.read(pipe.fileno(), 1 << 16):
            now = time.monotonic()
            self.output += data
            for rank in _FIRST_LINE.findall(self.output[-len(data) - 100 :]):
                self.first_lines.setdefault(rank, now)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds.

        Raises:
            RunError: The program ended or the limit passed before.
        """
        while not condition():
            if self.process.poll() is not None:
                raise self.failed(f"ended with {self.process.returncode} before {what}")
            if time.monotonic() > self.launched + LIMIT:
                raise self.failed(f"took more than {LIMIT:g} s until {what}")
            time.sleep(0.005)

    def until_noted(self, kind: str, number: int) -> None:
        """Wait until so many workers have left a note of one kind."""
        self.until(lambda: len(list(self.notes.glob(f"*.{kind}"))) == number, f"{number} workers were {kind}")

    def ended(self) -> float:
        """Wait for the end and return its moment on the monotonic clock.

        Raises:
            RunError: The limit passed before.
        """
        handle = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, self.launched + LIMIT - time.monotonic()) * 1000):
                raise self.failed(f"took more than {LIMIT:g} s")
            moment = time.monotonic()
        finally:
            os.close(handle)
        self.process.wait()
        self._reader.join(5.0)
        return moment

    def failed(self, why: str) -> RunError:
        """Make the error that says what went wrong and what the program said last."""
        said = self.output[-2000:].decode(errors="replace").strip()
        return RunError(f"{' '.join(self._command)}: {why}; it said:\n{said}")

    def workers(self) -> list[int]:
        """Return the pids that its workers have left as notes."""
        return [int(note.read_text()) for note in self.notes.glob("*.ready")]

    def helpers(self) -> list[int]:
        """Return the pids of its processes besides itself and the workers."""
        descendants = psutil.Process(self.pid).children(recursive=True)
        return [process.pid for process in descendants if process.pid not in self.workers()]

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """At the end, kill what is left of it and of its workers."""
        try:
            yield
        finally:
            if self.process.poll() is None:
                helpers = [psutil.Process(pid) for pid in self.helpers()]
                self.process.kill()
                self.process.wait()
                for helper in helpers:
                    with suppress(psutil.NoSuchProcess):
                        helper.kill()
            for pid in self.workers():
                # The pid may be anybody's by now; ours has the folder among its words.
                if str(self.notes) in command_line(pid):
                    os.kill(pid, signal.SIGKILL)
            self._reader.join(5.0)
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()


def python_of(command: str) -> Path:
    """Return the Python beside a command: the one that has the package."""
    return Path(command).absolute().with_name("python")


def command_line(pid: int) -> str:
    """Return the words of a process, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def status(pid: int, name: str) -> int:
    """Read one number from a process's status, such as `VmHWM` in KiB."""
    return _number(Path(f"/proc/{pid}/status"), name)


def switches(pid: int) -> int:
    """Count how often the threads of a process have left the processor."""
    return sum(
        _number(task / "status", name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for name in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    )


def _number(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process with its ended threads, without its children."""
    # The clock of another process, numbered as clock_getcpuclockid(3) does it.
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(kw_only=True, slots=True)
class Figure:
    """What was measured of one thing, per program; the first program is the one with a target.

    Args:
        title: What it is.
        unit: Its unit.
        target: What the median of the first program must reach; None for a figure that is only told.
        at_least: The target is a lower bound.
        beside: Targets in multiples of other programs' medians; one that is reached is enough.
    """

    title: str
    unit: str
    target: float | None = None
    at_least: bool = False
    beside: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, program: str, *values: float) -> None:
        """Take the values of one run."""
        self.values.setdefault(program, []).extend(values)

    def reached(self) -> bool:
        """Tell whether the target is reached; nothing measured does not reach it."""
        bounds = [factor * self.median(name) for name, factor in self.beside.items() if name in self.values]
        if self.target is not None:
            bounds.append(self.target)
        if not bounds:
            return True
        ours = next(iter(self.values.values()), None)
        if not ours:
            return False
        return median(ours) >= min(bounds) if self.at_least else median(ours) <= max(bounds)

    def median(self, program: str) -> float:
        """Return the median of one program's values."""
        return median(self.values[program])

    def bound(self) -> str:
        """Say the target in words, "" if there is none."""
        words = [f"{factor:g} x {name}" for name, factor in self.beside.items() if name in self.values]
        if self.target is not None:
            words.append(f"{self.target:g} {self.unit}")
        return f"{'>=' if self.at_least else '<='} {' or '.join(words)}" if words else ""

    def show(self) -> None:
        """Print it."""
        bound = self.bound()
        print(f"\n{self.title}{bound and f'; target {bound}'}")
        own = 0.0
        for number, (program, values) in enumerate(self.values.items()):
            middle = median(values)
            own = own if number else middle
            remark = f"{middle / own:.2f} x" if number and own else ""
            if number == 0 and bound:
                remark = "reached" if self.reached() else "MISSED"
            spread = f"({min(values):.4g} to {max(values):.4g} of {len(values)})"
            print(f"  {program:<24}{middle:>9.4g} {self.unit:<10} {spread:<32}{remark}")


def repetitions(number: int) -> Iterator[int]:
    """Count repetitions and print the load each of them meets: on a busy machine believe ratios only."""
    for repetition in range(number):
        one, five, _ = os.getloadavg()
        print(
            f"run {repetition + 1} of {number}, load average {one:.1f} (1 min), {five:.1f} (5 min)",
            flush=True,
        )
        yield repetition


def clean_up_on_sigterm() -> None:
    """Let what is measured, and its files, not outlive a benchmark that is ended from outside."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def machine() -> str:
    """Say where and when the figures are measured."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"
    )


def conclude(figures: Sequence[Figure]) -> int:
    """Print figures, median (smallest to largest of how many), and return the exit code."""
    for figure in figures:
        figure.show()
    missed = [figure.title for figure in figures if not figure.reached()]
    print("\n" + ("all targets reached" if not missed else "missed: " + "; ".join(missed)))
    return 1 if missed else 0


def argument_parser(description: str, runs: int) -> argparse.ArgumentParser:
    """Make a parser with the options of both benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ours", metavar="PATH", default=str(OURS), help="the command davincirun to measure")
    parser.add_argument("--repetitions", type=int, default=runs, metavar="N", help=f"default {runs}")
    return parser
