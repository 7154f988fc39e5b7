"""One rank of a job over three hosts dies: how soon the others are told, and how soon all launchers are back.

    python benchmarks/apart.py [--torchrun PATH] [--mpirun PATH] [--repetitions N] [--json FILE]

Hosts are network namespaces with processes, names and an sshd of their own, on this machine, so that all
have one clock; this needs root, iproute2 and OpenSSH's server. Two workers on each say nothing and wait, as
ranks do inside HCCL; one of node 2 dies. All launchers take turns within one run. A peer that is not to be
found is named. Exit code 1 if the target is missed or a launcher fails.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from measure import (
    HERE,
    PYTHON,
    Program,
    RunError,
    argument_parser,
    clean_up_on_sigterm,
    machine,
    python_of,
    repetitions,
)

from davincirunsdk import __version__

# The hosts are those that the tests run on.
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "multinode")]
from ssh_hosts import ssh_hosts  # noqa: E402  # found by the line above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ssh_hosts import SshHosts

NODES = 3
PER_NODE = 2
WORKERS = NODES * PER_NODE
VICTIM = WORKERS - 1
TARGET = 50.0
"""Milliseconds from the death to SIGTERM on node 0, of launchers that meet."""
PATIENCE = 20.0
"""Seconds after the death, by which a launcher that tells nobody is given up: by itself it would wait on."""
CLIENT = """\
Host *
 IdentityFile {folder}/user_key
 IdentitiesOnly yes
 UserKnownHostsFile {folder}/known
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A way to start a command on all hosts.

    Args:
        name: What the table calls it.
        version: Its version.
        start: Starts a worker's command on all hosts, with a folder for logs; one program for each launcher.
    """

    name: str
    version: str
    start: Callable[[SshHosts, list[str], Path], list[Program]]


@dataclass(slots=True, kw_only=True)
class Run:
    """What became of one job; seconds since the death, None for what did not happen in time.

    Args:
        told: The last SIGTERM on node 0.
        returned: The last launcher's return.
        codes: Exit codes of the launchers.
        named: How many of the launchers named the rank that died.
    """

    told: float | None
    returned: float | None
    codes: list[int | None]
    named: int


def ours_ssh(path: str) -> Launcher:
    def start(hosts: SshHosts, command: list[str], folder: Path) -> list[Program]:
        words = hosts.on(
            path, "--engine", "ssh", "--ssh", hosts.ssh, "--hosts", hosts.names, "--nproc-per-node",
            str(PER_NODE), "--log-dir", str(folder / "log"), *command,
        )  # fmt: skip
        return [Program(words, folder / "notes")]

    return Launcher(name="davincirun --engine ssh", version=_version([path, "--version"]), start=start)


def ours_meeting(path: str) -> Launcher:
    def start(hosts: SshHosts, command: list[str], folder: Path) -> list[Program]:
        return [
            Program(
                host.command(
                    path, "--nnodes", str(NODES), "--node-rank", str(rank), "--master-addr",
                    hosts.hosts[0].address, "--master-port", "29500", "--nproc-per-node", str(PER_NODE),
                    "--log-dir", str(folder / "log"), *command,
                ),
                folder / "notes",
            )
            for rank, host in enumerate(hosts.hosts)
        ]  # fmt: skip

    return Launcher(name="davincirun, one on each", version=_version([path, "--version"]), start=start)


def torchrun(path: str) -> Launcher:
    def start(hosts: SshHosts, command: list[str], folder: Path) -> list[Program]:
        endpoint = f"{hosts.hosts[0].address}:29400"
        return [
            Program(
                host.command(
                    path, "--nnodes", str(NODES), "--nproc-per-node", str(PER_NODE), "--rdzv-backend", "c10d",
                    "--rdzv-endpoint", endpoint, "--rdzv-id", folder.name, "--no-python", *command,
                ),
                folder / "notes",
            )
            for host in hosts.hosts
        ]  # fmt: skip

    show = "import torch; print(torch.__version__)"
    version = _version([str(python_of(path)), "-c", show])
    return Launcher(name="torchrun (c10d), one on each", version=f"torch {version}", start=start)


def mpirun(path: str) -> Launcher:
    def start(hosts: SshHosts, command: list[str], folder: Path) -> list[Program]:
        client = folder / "client"
        client.write_text(CLIENT.format(folder=hosts.folder))
        words = hosts.on(
            path, "--allow-run-as-root", "--bind-to", "none", "-n", str(WORKERS),
            "--host", ",".join(f"{host.address}:{PER_NODE}" for host in hosts.hosts),
            "--mca", "plm_rsh_agent", f"ssh -F {client}", "--mca", "plm_rsh_no_tree_spawn", "1",
            "--mca", "oob_tcp_if_include", "eth", *command,
        )  # fmt: skip
        return [Program(words, folder / "notes")]

    return Launcher(name="mpirun over ssh", version=f"Open MPI {_version([path, '--version'])}", start=start)


def _version(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split("\n")[0].split()[-1]


def measure(launcher: Launcher, hosts: SshHosts, repetition: int, folder: Path) -> Run:
    """Run one job under one launcher until all its launchers are back, or are given up.

    Raises:
        RunError: It does not get as far as the death.
    """
    notes = folder / "notes"
    notes.mkdir()
    # Launchers that look now and then must not meet the death at the same point of their turn.
    delay = random.Random(repetition).uniform(0.3, 1.3)
    worker = [*map(str, PYTHON), str(HERE / "worker_mortal.py"), str(notes), str(VICTIM), "exit", str(delay)]
    with ended(hosts, launcher.start(hosts, worker, folder), notes) as programs:
        for program in programs:
            program.until_noted("ready", WORKERS)
        (notes / "go").touch()
        moment = notes / f"{VICTIM}.moment"
        programs[0].until(lambda: moment.stat().st_size > 0, f"rank {VICTIM} died")
        died = float(moment.read_text())
        returns = [returned(program, died + PATIENCE) for program in programs]
        back = _last([None if one is None else one - died for one in returns])
        codes = [program.process.poll() for program in programs]
    # A worker without a note was killed before it could run once more: gone when the launchers are.
    told = [_told(notes / f"{rank}.moment", died, back) for rank in range(PER_NODE)]
    return Run(
        told=_last(told),
        returned=back,
        codes=codes,
        named=sum(_names_the_rank(program.output) for program in programs),
    )


def _told(moment: Path, died: float, otherwise: float | None) -> float | None:
    text = moment.read_text()
    return float(text) - died if text else otherwise


def _last(moments: list[float | None]) -> float | None:
    found = [one for one in moments if one is not None]
    return max(found) if len(found) == len(moments) else None


def _names_the_rank(output: bytes) -> bool:
    said = output.decode(errors="replace")
    ours, theirs = rf"rank {VICTIM} is the root cause", rf"rank\s*:\s*{VICTIM}\b|\[\[\d+,1\],{VICTIM}\]"
    return re.search(f"{ours}|{theirs}", said) is not None


def returned(program: Program, limit: float) -> float | None:
    """Wait for a launcher's end; None if it does not come by `limit`."""
    handle = os.pidfd_open(program.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(max(0.0, limit - time.monotonic()) * 1000):
            return None
        return time.monotonic()
    finally:
        os.close(handle)


@contextmanager
def ended(hosts: SshHosts, programs: list[Program], notes: Path) -> Iterator[list[Program]]:
    """At the end, leave nothing of these programs on any host."""
    try:
        yield programs
    finally:
        for program in programs:
            if program.process.poll() is None:
                program.process.kill()
            program.process.wait()
        for pid in (pid for host in hosts.hosts for pid in host.running(str(notes))):
            subprocess.run(["kill", "-KILL", str(pid)], check=False, stderr=subprocess.DEVNULL)
        for program in programs:
            with program.cleaned():
                pass


def rows(found: dict[Launcher, list[Run]], broken: dict[str, str]) -> list[dict[str, object]]:
    """Make the figures of each launcher; ratios are to the first of them."""
    made: list[dict[str, object]] = []
    first: dict[str, float] = {}
    for launcher, runs in found.items():
        row: dict[str, object] = {"launcher": launcher.name, "version": launcher.version, "runs": len(runs)}
        for name in ("told", "returned"):
            values = [getattr(run, name) for run in runs]
            seconds = [value for value in values if value is not None]
            late = len(seconds) < len(values)
            middle = None if late or not values else 1000 * median(seconds)
            if middle is not None:
                first.setdefault(name, middle)
            row[name] = {
                "median_ms": middle,
                "least_ms": 1000 * min(seconds) if seconds else None,
                "most_ms": None if late or not values else 1000 * max(seconds),
                "ratio": middle / first[name] if middle is not None else None,
                "not_within_s": PATIENCE if late else None,
            }
        row["codes"] = [list(codes) for codes in sorted({tuple(map(str, run.codes)) for run in runs})]
        row["named"] = sorted({f"{run.named} of {len(run.codes)}" for run in runs})
        if launcher.name in broken:
            row["failed"] = broken[launcher.name]
        made.append(row)
    return made


def table(figures: list[dict[str, object]]) -> str:
    """Show them in Markdown."""
    lines = [
        "| | SIGTERM on node 0 | all launchers returned | exit codes | named the rank |",
        "|---|---|---|---|---|",
    ]
    for row in figures:
        cells = [f"{row['launcher']} ({row['version']})"]
        cells += [_cell(row[name]) for name in ("told", "returned")]
        codes = row["codes"]
        assert isinstance(codes, list)
        cells.append("; ".join(" ".join(code.replace("None", "-") for code in one) for one in codes))
        named = row["named"]
        assert isinstance(named, list)
        cells.append("; ".join(named))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: object) -> str:
    assert isinstance(figure, dict)
    if figure["median_ms"] is None:
        return f"not within {PATIENCE:g} s" if figure["not_within_s"] else "failed"
    spread = f"{figure['median_ms']:.0f} ms ({figure['least_ms']:.0f} to {figure['most_ms']:.0f})"
    return spread if figure["ratio"] == 1 else f"{spread}, {figure['ratio']:.1f} x"


def main() -> int:
    parser = argument_parser(__doc__.partition("\n")[0], 7)
    parser.add_argument("--torchrun", metavar="PATH", default="torchrun")
    parser.add_argument("--mpirun", metavar="PATH", default="mpirun")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    clean_up_on_sigterm()
    print(machine())
    launchers = []
    missing = []
    for make, path in (
        (ours_meeting, options.ours),
        (ours_ssh, options.ours),
        (torchrun, options.torchrun),
        (mpirun, options.mpirun),
    ):
        program = shutil.which(path)
        if program is None:
            missing.append(f"{make.__name__} (looked for {path})")
        else:
            launchers.append(make(program))
    for name in missing:
        print(f"missing: {name}")
    found: dict[Launcher, list[Run]] = {launcher: [] for launcher in launchers}
    broken: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="davincirun-benchmark-") as top:
        with ssh_hosts(Path(top), NODES, more=_hosts_file()) as hosts:
            for repetition in repetitions(options.repetitions):
                for launcher in launchers:
                    if launcher.name in broken:
                        continue
                    folder = Path(tempfile.mkdtemp(dir=top))
                    try:
                        found[launcher].append(measure(launcher, hosts, repetition, folder))
                    except RunError as error:
                        broken[launcher.name] = str(error)
    figures = rows(found, broken)
    print(f"\n{table(figures)}\n")
    for name, why in broken.items():
        print(f"failed: {name}: {why}")
    if options.json is not None:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "davincirunsdk": __version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        }
        text = json.dumps({**about, "missing": missing, "launchers": figures}, indent=1)
        options.json.write_text(f"{text}\n")
    told = figures[0]["told"] if figures else None
    reached = isinstance(told, dict) and told["median_ms"] is not None and told["median_ms"] <= TARGET
    verdict = "reached" if reached else "MISSED"
    print(f"SIGTERM on node 0 of launchers that meet, target {TARGET:g} ms: {verdict}")
    return 0 if reached and not broken else 1


def _hosts_file() -> str:
    """Give the shell command that makes every host's name known on every host."""
    return " && ".join(f"echo 10.78.0.{number} h{number} >>/etc/hosts" for number in range(1, NODES + 1))


if __name__ == "__main__":
    sys.exit(main())
