"""How fast failures stop a job, how fast jobs start, and what supervising costs: beside other launchers.

All launchers start the same workers in turn, within one run. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from measure import (
    HERE,
    PYTHON,
    Figure,
    Program,
    RunError,
    argument_parser,
    clean_up_on_sigterm,
    command_line,
    conclude,
    cpu_seconds,
    environment,
    print_machine,
    python_of,
    repetitions,
    status,
    switches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORKERS = 8
VICTIM = 3
SETTLING = 2.0
"""Seconds after the start from which on a launcher should be quiet."""
SILENCE = 5.0
SILENCE_RUNS = 3
KILLED_RUNS = 2
AFTERWARDS = 4.0
"""Seconds after SIGKILL of the launcher at which workers that still run count as left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher of 8 workers.

    Args:
        name: What the tables call it.
        start: Starts a worker's command under it, in a folder of its own.
    """

    name: str
    start: Callable[[Sequence[str | Path], Path], Program]


def davincirun(path: str) -> Launcher:
    def start(command: Sequence[str | Path], folder: Path) -> Program:
        return Program(
            [path, "--nproc-per-node", str(WORKERS), "--log-dir", folder / "log", *command], _notes(folder)
        )

    return Launcher(name="davincirun", start=start)


def davincirun_0_1(path: str) -> Launcher:
    """0.1.5 takes no options: rank table, work and log folders come from the platform's variables."""

    def start(command: Sequence[str | Path], folder: Path) -> Program:
        table = {
            "status": "completed",
            "group_count": "1",
            "group_list": [
                {
                    "group_name": "benchmark",
                    "device_count": str(WORKERS),
                    "instance_count": "1",
                    "instance_list": [
                        {
                            "pod_name": "benchmark-0",
                            "server_id": "127.0.0.1",
                            "devices": [
                                {"device_id": str(device), "device_ip": f"127.0.1.{device + 1}"}
                                for device in range(WORKERS)
                            ],
                        }
                    ],
                }
            ],
        }
        (folder / "log").mkdir()
        (folder / "jobstart_hccl.json").write_text(json.dumps(table))
        variables = {
            "RANK_TABLE_FILE": str(folder),
            "MA_MOUNT_PATH": str(folder),
            "MA_HOME": str(folder),
            "BATCH_JOB_ID": "benchmark",
        }
        return Program([path, *command], _notes(folder), variables)

    return Launcher(name="davincirun 0.1.5", start=start)


def torchrun(path: str) -> Launcher:
    def start(command: Sequence[str | Path], folder: Path) -> Program:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        options = ["--nproc-per-node", str(WORKERS), "--master-port", str(port), "--no-python"]
        return Program([path, *options, *command], _notes(folder))

    return Launcher(name="torchrun", start=start)


def msrun(path: str) -> Launcher:
    """It puts its own Python in front of a script, and starts that as MindSpore's scheduler, too."""

    def start(command: Sequence[str | Path], folder: Path) -> Program:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        options = [
            *(f"--worker_num={WORKERS}", f"--local_worker_num={WORKERS}", "--node_rank=0", "--join=True"),
            *(f"--master_port={port}", f"--log_dir={folder / 'log'}"),
        ]
        script = [HERE / "worker_msrun.py", *command[len(PYTHON) :]]
        path_of_python = {"PATH": f"{Path(path).parent}:{os.environ['PATH']}"}
        return Program([path, *options, *script], _notes(folder), path_of_python)

    return Launcher(name="msrun", start=start)


def mpirun(path: str) -> Launcher:
    def start(command: Sequence[str | Path], folder: Path) -> Program:
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(WORKERS)]
        return Program([path, *options, *command], _notes(folder))

    return Launcher(name="mpirun", start=start)


def _notes(folder: Path) -> Path:
    notes = folder / "notes"
    notes.mkdir()
    return notes


class Launchers:
    """The launchers that take part and what was measured of them."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._launchers = list(launchers)
        self.broken: dict[str, str] = {}
        self.told = Figure(title="a worker dies until a sibling gets SIGTERM", unit="ms", target=10)
        self.returned = Figure(title="a worker dies until the command has ended", unit="ms", target=100)
        self.first_line = Figure(
            title="launch until the last worker's first line is shown", unit="s", target=0.25
        )
        self.left = Figure(title="workers left after SIGKILL of the launcher", unit="workers", target=0)
        self.trivial = Figure(title="8 trivial workers, start to end", unit="s", target=0.35)
        self.memory = Figure(title="peak memory of the launcher", unit="MB", target=40)
        self.all_memory = Figure(title="the same with its helper processes", unit="MB")
        self.wakes = Figure(
            title=f"times it left the processor in {SILENCE:g} s of silence", unit="times", target=0
        )
        self.all_wakes = Figure(title="the same with its helper processes", unit="times")
        self.cpu = Figure(title=f"processor time in {SILENCE:g} s of silence, with helpers", unit="ms")

    def figures(self) -> list[Figure]:
        """All figures, in the order to show them."""
        return [
            self.told,
            self.returned,
            self.first_line,
            self.left,
            self.trivial,
            self.memory,
            self.all_memory,
            self.wakes,
            self.all_wakes,
            self.cpu,
        ]

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
        program = launcher.start(command, folder)
        with program.cleaned():
            program.until_noted("ready", WORKERS)
            program.until(lambda: len(program.first_lines) == WORKERS, "all first lines were shown")
            self.first_line.add(launcher.name, max(program.first_lines.values()) - program.launched)
            (notes / "go").touch()
            ended = program.ended()
        # A worker without note was killed before it could run once more.
        moments = [float((notes / f"{rank}.moment").read_text() or "inf") for rank in range(WORKERS)]
        died = moments.pop(VICTIM)
        self.told.add(launcher.name, *(1000 * (moment - died) for moment in moments))
        self.returned.add(launcher.name, 1000 * (ended - died))

    def killed(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """The launcher is killed and can do nothing any more."""
        command = [*PYTHON, HERE / "worker_mortal.py", folder / "notes", "none", "exit", "0"]
        program = launcher.start(command, folder)
        with program.cleaned():
            program.until_noted("ready", WORKERS)
            program.process.kill()
            program.process.wait()
            left = program.workers()
            deadline = time.monotonic() + AFTERWARDS
            while left and time.monotonic() < deadline:
                time.sleep(0.05)
                left = [pid for pid in left if str(folder) in command_line(pid)]
        self.left.add(launcher.name, len(left))

    def success(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """Eight workers say a line and end."""
        program = launcher.start([*PYTHON, HERE / "worker_trivial.py"], folder)
        with program.cleaned():
            self.trivial.add(launcher.name, program.ended() - program.launched)
        if program.process.returncode or len(program.first_lines) != WORKERS:
            raise program.failed(
                f"ended with {program.process.returncode} and {len(program.first_lines)} lines"
            )

    def silence(self, launcher: Launcher, repetition: int, folder: Path) -> None:
        """Eight workers that say nothing."""
        command = [*PYTHON, HERE / "worker_mortal.py", folder / "notes", "none", "exit", "0"]
        program = launcher.start(command, folder)
        with program.cleaned():
            program.until_noted("ready", WORKERS)
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
    figure = Figure(title="import davincirunsdk", unit="s", target=0.1)
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
        figure.add("davincirunsdk", int(found[1]) / 1e6)
    return figure


def version_of(ours: str) -> str:
    """Ask the command for its version."""
    said = subprocess.run([ours, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return said.split()[-1]


def write_tables(measured: Launchers, folder: Path, version: str, date: str) -> None:
    """Put the medians into the first table of both READMEs; who was not measured keeps its cell."""
    rows = (measured.told, measured.returned, measured.first_line, measured.left)
    for name, all_of_them, none_of_them in (
        ("README.md", "all", "never"),
        ("README.zh-CN.md", "全部", "从不"),
    ):
        lines = (folder / name).read_text().split("\n")
        head = next(number for number, line in enumerate(lines) if "| davincirun | 0.1.5 |" in line)
        columns = [cell.strip() for cell in lines[head].split("|")]
        for number, figure in enumerate(rows, head + 2):
            cells = lines[number].split("|")
            for place, column in enumerate(columns):
                values = figure.values.get("davincirun 0.1.5" if column == "0.1.5" else column)
                if values:
                    cells[place] = f" {_cell(median(values), figure.unit, all_of_them, none_of_them)} "
            lines[number] = "|".join(cells)
        told = next(number for number in range(head, len(lines)) if "benchmarks/README.md" in lines[number])
        lines[told] = re.sub(r"\d{4}-\d\d-\d\d", date, re.sub(r"\d+\.\d+\.\d+", version, lines[told]))
        (folder / name).write_text("\n".join(lines))


def _cell(value: float, unit: str, all_of_them: str, none_of_them: str) -> str:
    if unit == "workers":
        return all_of_them if value == WORKERS else f"{value:g}"
    if value == float("inf"):
        return none_of_them
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"


def main() -> int:
    parser = argument_parser(__doc__.partition("\n")[0], 7)
    parser.add_argument("--old", metavar="PATH", default="", help="davincirun of version 0.1.5")
    parser.add_argument("--torchrun", metavar="PATH", default="torchrun")
    parser.add_argument("--msrun", metavar="PATH", default="msrun")
    parser.add_argument("--mpirun", metavar="PATH", default="mpirun")
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write the figures into the tables of README.md and README.zh-CN.md",
    )
    options = parser.parse_args()
    clean_up_on_sigterm()
    print_machine()
    launchers = []
    for make, path in (
        (davincirun, options.ours),
        (davincirun_0_1, options.old),
        (torchrun, options.torchrun),
        (msrun, options.msrun),
        (mpirun, options.mpirun),
    ):
        found = shutil.which(path)
        launcher = make(found or path)
        if found:
            launchers.append(launcher)
        else:
            print(f"missing: {launcher.name} (looked for {path or 'nothing: no path given'})")
    measured = Launchers(launchers)
    # Byte code, disk caches.
    measured.each(measured.success, 0)
    measured.trivial.values.clear()
    for repetition in repetitions(options.repetitions):
        measured.each(measured.death, repetition)
        measured.each(measured.success, repetition)
        if repetition < SILENCE_RUNS:
            measured.each(measured.silence, repetition)
        if repetition < KILLED_RUNS:
            measured.each(measured.killed, repetition)
    code = conclude([*measured.figures(), import_time(options.ours, options.repetitions)])
    for name, why in measured.broken.items():
        print(f"failed: {name}: {why}")
        code = 1
    if options.readme:
        write_tables(measured, HERE.parent, version_of(options.ours), time.strftime("%Y-%m-%d"))
    return code


if __name__ == "__main__":
    sys.exit(main())
