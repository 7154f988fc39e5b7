"""How fast, how dearly and how completely output reaches the log files: beside the same workers through tee.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import (
    HERE,
    PYTHON,
    Figure,
    Program,
    argument_parser,
    clean_up_on_sigterm,
    conclude,
    cpu_seconds,
    machine,
    python_of,
    repetitions,
    status,
)
from worker_writer import BLOCK, LINE, first_block, number_block

if TYPE_CHECKING:
    from collections.abc import Callable

SETTLING = 2.0
"""Seconds after the start until the helpers have loaded what they need."""

_NOTICE = re.compile(rb"\[rank \d+\] \.\.\. (\d+) lines \(.*left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run of writers gave.

    Attributes:
        rate: MB/s, from the first worker's first write to the last byte in the last file.
        cost: Processor seconds per GB of what carries the output, the workers' own left out.
        growth: MiB that the supervisor's memory grew by, at its peak.
    """

    rate: float
    cost: float
    growth: float


class Writers:
    """Workers that write as fast as they can.

    Args:
        number: How many.
        size: MiB that each writes.
        step: Bytes per write.
        folder: Where the files go.
    """

    def __init__(self, number: int, size: int, step: int, folder: Path) -> None:
        self.number = number
        self.size = size
        self.total = number * size * BLOCK
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.logs = folder / "log"
        self.logs.mkdir()
        self.command: list[str | Path] = [
            *PYTHON,
            HERE / "worker_writer.py",
            self.notes,
            str(size),
            str(step),
        ]

    def measure(self, program: Program, display: Path | None = None) -> Measured:
        """Let them write, and wait until all has arrived.

        Args:
            program: What started them.
            display: A file that is a display: what is shown late counts, too.
        """
        with program.cleaned():
            program.until_noted("ready", self.number)
            carriers = [program.pid, *program.helpers()]
            time.sleep(SETTLING)
            used = sum(map(cpu_seconds, carriers))
            memory = status(program.pid, "VmRSS")
            (self.notes / "go").touch()
            program.until_noted("written", self.number)
            program.until(lambda: self._arrived() == self.total, "all output had arrived")
            used = sum(map(cpu_seconds, carriers)) - used
            growth = status(program.pid, "VmHWM") - memory
            (self.notes / "end").touch()
            program.ended()
        begin = min(float(note.read_text().split()[0]) for note in self.notes.glob("*.written"))
        end = max(file.stat().st_mtime for file in (*self.files(), *([display] if display else [])))
        return Measured(
            rate=self.total / 1e6 / (end - begin), cost=used / (self.total / 1e9), growth=growth / 1024
        )

    def files(self) -> list[Path]:
        """Return the log files in rank order."""
        return sorted(self.logs.glob("*.txt"))

    def _arrived(self) -> int:
        return sum(file.stat().st_size for file in self.files())

    def wrong_bytes(self) -> int:
        """Count the bytes that are missing, too many, or in blocks that differ from what was written."""
        files = self.files()
        wrong = self.total - len(files) * self.size * BLOCK
        for rank, path in enumerate(files):
            block = first_block(rank)
            with path.open("rb") as file:
                for number in range(self.size):
                    number_block(block, number)
                    found = file.read(BLOCK)
                    wrong += 0 if found == block else BLOCK
                wrong += len(file.read())
        return wrong


class Benchmark:
    """All runs and figures.

    Args:
        ours: The command davincirun.
        folder: Where the files go.
        step: Bytes that a worker writes at a time.
    """

    def __init__(self, ours: str, folder: str | None, step: int = BLOCK) -> None:
        self._ours = ours
        self._step = step
        self._folder = folder
        self.file_rate = Figure(title="log files only, 4 workers x 128 MiB", unit="MB/s")
        self.file_ratio = Figure(
            title="log files only, beside tee in the same run", unit="x tee", target=1.5, at_least=True
        )
        self.silent_ratio = Figure(
            title="log files only, beside tee >/dev/null in the same run", unit="x tee"
        )
        self.file_cost = Figure(
            title="log files only, processor time without the workers'", unit="CPU-s/GB", target=0.6
        )
        self.echo_rate = Figure(title="log files and display, 4 workers x 128 MiB", unit="MB/s")
        self.echo_ratio = Figure(
            title="log files and display, beside tee in the same run", unit="x tee", target=0.7, at_least=True
        )
        self.echo_cost = Figure(
            title="log files and display, processor time without the workers'", unit="CPU-s/GB"
        )
        self.left_out = Figure(title="log files and display, left out of the display", unit="MB")
        self.untold = Figure(title="log files and display, left out and not told", unit="lines", target=0)
        self.stuck = Figure(
            title="2 workers x 400 MiB, nobody reads the display: memory growth", unit="MiB", target=64
        )
        self.unread = Figure(
            title="2 workers x 400 MiB, nobody reads logs() and log_blocks(): memory growth",
            unit="MiB",
            target=64,
        )
        self.wrong = Figure(title="wrong or missing in the log files of all runs", unit="bytes", target=0)

    def figures(self) -> list[Figure]:
        """All figures, in the order to show them."""
        return [
            self.file_rate,
            self.file_ratio,
            self.silent_ratio,
            self.file_cost,
            self.echo_rate,
            self.echo_ratio,
            self.echo_cost,
            self.left_out,
            self.untold,
            self.stuck,
            self.unread,
            self.wrong,
        ]

    def run(self) -> None:
        """Measure everything once."""
        ours = self._measure(4, 128, self._quiet)
        tee = self._measure(4, 128, self._tee, "tee")
        shown = self._measure(4, 128, self._shown)
        silent_tee = self._measure(4, 128, self._silent_tee, "tee >/dev/null")
        for name, measured in (("davincirun", ours), ("tee", tee), ("tee >/dev/null", silent_tee)):
            self.file_rate.add(name, measured.rate)
            self.file_cost.add(name, measured.cost)
        self.file_ratio.add("davincirun", ours.rate / tee.rate)
        self.silent_ratio.add("davincirun", ours.rate / silent_tee.rate)
        for name, measured in (("davincirun", shown), ("tee", tee)):
            self.echo_rate.add(name, measured.rate)
            self.echo_cost.add(name, measured.cost)
        self.echo_ratio.add("davincirun", shown.rate / tee.rate)
        self.stuck.add("davincirun", self._measure(2, 400, self._stuck).growth)
        self.unread.add("davincirun", self._measure(2, 400, self._unread).growth)

    def _measure(
        self, number: int, size: int, way: Callable[[Writers], Measured], name: str = "davincirun"
    ) -> Measured:
        with tempfile.TemporaryDirectory(prefix="davincirun-benchmark-", dir=self._folder) as folder:
            writers = Writers(number, size, self._step, Path(folder))
            measured = way(writers)
            self.wrong.add(name, writers.wrong_bytes())
            return measured

    def _tee(self, writers: Writers) -> Measured:
        """What version 0.1.5 does, without its supervision: it has no way not to show."""
        return self._through_tee(writers, writers.notes / "display")

    def _silent_tee(self, writers: Writers) -> Measured:
        return self._through_tee(writers, Path(os.devnull))

    def _through_tee(self, writers: Writers, display: Path) -> Measured:
        lines = [
            f'RANK={rank} "$@" | tee "{writers.logs}/rank-{rank}.txt" >>"{display}" &'
            for rank in range(writers.number)
        ]
        command: list[str | Path] = ["sh", "-c", " ".join([*lines, "wait"]), "sh", *writers.command]
        return writers.measure(Program(command, writers.notes))

    def _quiet(self, writers: Writers) -> Measured:
        return writers.measure(Program(self._command(writers, "none"), writers.notes))

    def _shown(self, writers: Writers) -> Measured:
        display = writers.notes / "display"
        with display.open("wb") as file:
            program = Program(self._command(writers, "all"), writers.notes, stdout=file.fileno())
        measured = writers.measure(program, display)
        lines, told = _count_lines(display)
        left_out = writers.total // LINE - lines
        self.left_out.add("davincirun", left_out * LINE / 1e6)
        self.untold.add("davincirun", abs(left_out - told))
        return measured

    def _stuck(self, writers: Writers) -> Measured:
        reading, writing = os.pipe()
        try:
            program = Program(self._command(writers, "all"), writers.notes, stdout=writing)
            os.close(writing)
            return writers.measure(program)
        finally:
            os.close(reading)

    def _unread(self, writers: Writers) -> Measured:
        command: list[str | Path] = [
            python_of(self._ours),
            HERE / "program_unread.py",
            writers.logs,
            *writers.command,
        ]
        return writers.measure(Program(command, writers.notes))

    def _command(self, writers: Writers, echo: str) -> list[str | Path]:
        options: list[str | Path] = [
            "--nproc-per-node",
            str(writers.number),
            "--echo",
            echo,
            "--log-dir",
            writers.logs,
        ]
        return [self._ours, *options, *writers.command]


def _count_lines(display: Path) -> tuple[int, int]:
    """Count the workers' lines in a display, and the lines that its notices say it left out."""
    lines = told = 0
    with display.open("rb") as file:
        while chunk := file.readlines(64 * BLOCK):
            lines += len(chunk)
            for notice in filter(None, map(_NOTICE.match, chunk)):
                lines -= 1
                told += int(notice[1])
    return lines, told


def main() -> int:
    """Measure and print."""
    parser = argument_parser(__doc__.partition("\n")[0], 5)
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default="/dev/shm" if os.path.isdir("/dev/shm") else None,
        help="where up to 1.2 GB of files go, and are removed; default /dev/shm, so that no disk is measured",
    )
    parser.add_argument(
        "--step", type=int, default=BLOCK, metavar="BYTES", help=f"per write of a worker; default {BLOCK}"
    )
    options = parser.parse_args()
    clean_up_on_sigterm()
    print(machine())
    benchmark = Benchmark(options.ours, options.folder, options.step)
    for _ in repetitions(options.repetitions):
        benchmark.run()
    return conclude(benchmark.figures())


if __name__ == "__main__":
    sys.exit(main())
