"""How fast failures stop a job, how fast jobs start, and what supervising costs: beside other launchers.

All launchers start the same workers in turn, within one run. Exit code 1 if a target is missed; with
`--quick`, if a figure has become worse than the record allows.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import record
from measure import (
    HERE,
    PYTHON,
    Figure,
    RunError,
    argument_parser,
    clean_up_on_sigterm,
    command_line,
    conclude,
    cpu_seconds,
    environment,
    machine,
    python_of,
    repetitions,
    status,
    switches,
)
from peers import FLOOR, OURS, Launcher, find

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

RECORD = HERE / "launchers.json"
CHART = HERE.parent / "docs" / "launchers.svg"
SIZES = {8: 5, 64: 3, 256: 2}
"""Repetitions by number of workers."""
VICTIM = 3
SETTLING = 2.0
"""Seconds after the start from which on a launcher should be quiet."""
SILENCE = 5.0
SILENCE_RUNS = 3
KILLED_RUNS = 2
AFTERWARDS = 4.0
"""Seconds after SIGKILL of the launcher at which workers that still run count as left behind."""
QUICK = 9
"""Repetitions that a comparison with the record takes, at the smallest size, beside the floor alone."""


class Launchers:
    """What was measured of launchers with one number of workers."""

    def __init__(self, launchers: Sequence[Launcher], workers: int) -> None:
        self._launchers = list(launchers)
        self._workers = workers
        self.broken: dict[str, str] = {}
        few, many = workers < 64, workers > 64
        self.first_line = Figure(
            title=f"{workers} workers: launch until the last one's first line is shown",
            unit="ms",
            beside={"mpirun": 1.25 if few else 1.0, FLOOR: 1.25},
        )
        self.trivial = Figure(
            title=f"{workers} trivial workers, start to end", unit="ms", beside={"mpirun": 1.5, FLOOR: 1.25}
        )
        self.told = Figure(
            title=f"{workers} workers: one dies until a sibling gets SIGTERM",
            unit="ms",
            target=15 if many else 3,
        )
        self.returned = Figure(
            title=f"{workers} workers: one dies until the command has ended",
            unit="ms",
            target=150 if many else 50,
        )
        self.left = Figure(
            title=f"{workers} workers: left after SIGKILL of the launcher", unit="workers", target=0
        )
        self.memory = Figure(title="peak memory of the launcher", unit="MB", target=30)
        self.all_memory = Figure(title="the same with its helper processes", unit="MB")
        self.wakes = Figure(
            title=f"times it left the processor in {SILENCE:g} s of silence", unit="times", target=0
        )
        self.all_wakes = Figure(title="the same with its helper processes", unit="times")
        self.cpu = Figure(title=f"processor time in {SILENCE:g} s of silence, with helpers", unit="ms")

    def figures(self) -> list[Figure]:
        """All figures that were measured, in the order to show them."""
        figures = [
            self.first_line,
            self.trivial,
            self.told,
            self.returned,
            self.left,
            self.memory,
            self.all_memory,
            self.wakes,
            self.all_wakes,
            self.cpu,
        ]
        return [figure for figure in figures if figure.values]

    def each(self, scenario: Callable[[Launcher, int, Path], None], repetition: int) -> None:
        """Run one scenario under every launcher; one that fails at it does not take part any more."""
        for launcher in self._launchers:
            if launcher.name in self.broken:
                continue
            with tempfile.TemporaryDirectory(prefix="davincirun-benchmark-") as folder:
                try:
                    scenario(launcher, repetition, Path(folder))
                except RunError as error:
                    self.broken[launcher.name] = str(error)

    def death(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """One worker dies: in turn by itself and by SIGKILL, at a moment nobody's clock knows."""
        way = ("exit", "kill")[repetition % 2]
        # Launchers that look once a second must not meet the death at the same point of their second.
        delay = random.Random(repetition).uniform(0.3, 1.3)
        notes = folder / "notes"
        command = [*PYTHON, HERE / "worker_mortal.py", notes, str(VICTIM), way, str(delay)]
        program = launcher.start(self._workers, command, folder)
        with program.cleaned():
            program.until_noted("ready", self._workers)
            program.until(lambda: len(program.first_lines) == self._workers, "all first lines were shown")
            self.first_line.add(launcher.name, 1000 * (max(program.first_lines.values()) - program.launched))
            (notes / "go").touch()
            ended = program.ended()
        # A worker without note was killed before it could run once more.
        moments = [float((notes / f"{rank}.moment").read_text() or "inf") for rank in range(self._workers)]
        died = moments.pop(VICTIM)
        self.told.add(launcher.name, *(1000 * (moment - died) for moment in moments))
        self.returned.add(launcher.name, 1000 * (ended - died))

    def killed(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """The launcher is killed and can do nothing any more."""
        command = [*PYTHON, HERE / "worker_mortal.py", folder / "notes", "none", "exit", "0"]
        program = launcher.start(self._workers, command, folder)
        with program.cleaned():
            program.until_noted("ready", self._workers)
            program.process.kill()
            program.process.wait()
            left = program.workers()
            deadline = time.monotonic() + AFTERWARDS
            while left and time.monotonic() < deadline:
                time.sleep(0.05)
                left = [pid for pid in left if str(folder) in command_line(pid)]
        self.left.add(launcher.name, len(left))

    def success(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """Workers say a line and end."""
        program = launcher.start(self._workers, [*PYTHON, HERE / "worker_trivial.py"], folder)
        with program.cleaned():
            self.trivial.add(launcher.name, 1000 * (program.ended() - program.launched))
        if program.process.returncode or len(program.first_lines) != self._workers:
            raise program.failed(
                f"ended with {program.process.returncode} and {len(program.first_lines)} lines"
            )

    def silence(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """Workers that say nothing."""
        command = [*PYTHON, HERE / "worker_mortal.py", folder / "notes", "none", "exit", "0"]
        program = launcher.start(self._workers, command, folder)
        with program.cleaned():
            program.until_noted("ready", self._workers)
            time.sleep(SETTLING)
            helpers = program.helpers()
            woken, helpers_woken = switches(program.pid), sum(map(switches, helpers))
            used = sum(map(cpu_seconds, [program.pid, *helpers]))
            time.sleep(SILENCE)
            used = sum(map(cpu_seconds, [program.pid, *helpers])) - used
            woken, helpers_woken = switches(program.pid) - woken, sum(map(switches, helpers)) - helpers_woken
            peaks = [status(pid, "VmHWM") / 1024 for pid in (program.pid, *helpers)]
        self.memory.add(launcher.name, peaks[0])
        self.all_memory.add(launcher.name, sum(peaks))
        self.wakes.add(launcher.name, woken)
        self.all_wakes.add(launcher.name, woken + helpers_woken)
        self.cpu.add(launcher.name, 1000 * used)


def import_time(ours: str, number: int) -> Figure:
    """Measure `import davincirunsdk`."""
    figure = Figure(title="import davincirunsdk", unit="ms", target=20)
    for _ in range(number):
        report = subprocess.run(
            [python_of(ours), "-X", "importtime", "-c", "import davincirunsdk"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            cwd="/",
            env=environment({}),
        ).stderr
        found = re.search(r"\|\s*(\d+) \| davincirunsdk$", report, re.MULTILINE)
        assert found is not None
        figure.add(OURS, int(found[1]) / 1e3)
    return figure


def measure(launchers: Sequence[Launcher], workers: int, number: int, *, closely: bool) -> Launchers:
    """Run all scenarios under all launchers in turn."""
    measured = Launchers(launchers, workers)
    # Byte code, disk caches.
    measured.each(measured.success, 0)
    measured.trivial.values.clear()
    for repetition in repetitions(number):
        measured.each(measured.death, repetition)
        measured.each(measured.success, repetition)
        if closely and repetition < SILENCE_RUNS:
            measured.each(measured.silence, repetition)
        if closely and repetition < KILLED_RUNS:
            measured.each(measured.killed, repetition)
    for name, why in measured.broken.items():
        print(f"failed with {workers} workers: {name}: {why}")
    return measured


def compare(launchers: Sequence[Launcher], kept: record.Record, number: int) -> int:
    """Measure ours and the floor only, and compare with the record."""
    beside = [launcher for launcher in launchers if launcher.name in (OURS, FLOOR)]
    measured = measure(beside, min(SIZES), number, closely=False)
    # Not the moment of a SIGTERM: a few milliseconds are what a busy machine makes of one.
    compared = [measured.first_line, measured.trivial, measured.returned]
    worse = record.worse(kept, compared)
    for line in worse:
        print(f"WORSE: {line}")
    return 1 if worse or measured.broken else 0


def main() -> int:
    parser = argument_parser(__doc__.partition("\n")[0], 0)
    parser.add_argument("--old", metavar="PATH", default="", help="davincirun of version 0.1.5")
    parser.add_argument("--torchrun", metavar="PATH", default="torchrun")
    parser.add_argument("--msrun", metavar="PATH", default="msrun")
    parser.add_argument("--mpirun", metavar="PATH", default="mpirun")
    parser.add_argument(
        "--sizes", metavar="N,...", default=",".join(map(str, SIZES)), help="numbers of workers"
    )
    parser.add_argument("--record", metavar="FILE", type=Path, default=RECORD, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="only compare with the record, some 30 s")
    parser.add_argument("--keep", action="store_true", help="write the record, its table and its picture")
    parser.add_argument("--readme", action="store_true", help="write the first table of both READMEs")
    options = parser.parse_args()
    clean_up_on_sigterm()
    print(machine())
    launchers, missing = find(options)
    for line in missing:
        print(f"missing: {line}")
    if options.quick:
        return compare(launchers, json.loads(options.record.read_text()), options.repetitions or QUICK)
    return run(options, launchers, missing)


def run(options: argparse.Namespace, launchers: Sequence[Launcher], missing: Sequence[str]) -> int:
    """Measure everything, print it, keep it if asked to."""
    when = machine()
    figures, failed = [], False
    for workers in map(int, options.sizes.split(",")):
        number = options.repetitions or SIZES.get(workers, 3)
        measured = measure(launchers, workers, number, closely=workers == min(SIZES))
        figures += measured.figures()
        missing = [*missing, *(f"{name} with {workers} workers" for name in measured.broken)]
        failed |= bool(measured.broken)
    figures.append(import_time(options.ours, 5))
    code = conclude(figures)
    kept = record.record(when, {each.name: each.version for each in launchers}, missing, figures)
    table = record.markdown(kept)
    print(f"\n{table}")
    if options.keep:
        options.record.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        options.record.with_suffix(".md").write_text(table)
        shown = [figure.title for figure in figures if re.match(r"(8|256) ", figure.title)]
        chart = CHART if options.record == RECORD else options.record.with_suffix(".svg")
        chart.write_text(record.chart(kept, shown))
    if options.readme:
        for path in (HERE.parent / "README.md", HERE.parent / "README.zh-CN.md"):
            path.write_text(record.into_table(kept, path.read_text(), min(SIZES)))
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
