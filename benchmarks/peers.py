"""The launchers that are measured: each starts the same workers in its own way."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import HERE, Program, python_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

OURS = "davincirun"
FLOOR = "asyncio + click"
"""What Python costs any launcher that is written in it."""

_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher of workers.

    Args:
        name: What the tables call it.
        version: Its version, as it says itself.
        start: Starts so many workers of a command, in a folder of its own.
    """

    name: str
    version: str
    start: Callable[[int, Sequence[str | Path], Path], Program]


def find(options: argparse.Namespace) -> tuple[list[Launcher], list[str]]:
    """Find the launchers that are here, ours first, and say of each other one that it is missing."""
    found, missing = [], []
    for name, path, package, start in (
        (OURS, options.ours, "davincirunsdk", _davincirun),
        ("0.1.5", options.old, "davincirunsdk", _davincirun_0_1),
        ("torchrun", options.torchrun, "torch", _torchrun),
        ("msrun", options.msrun, "mindspore", _msrun),
        ("mpirun", options.mpirun, "", _mpirun),
    ):
        if path and (command := shutil.which(path)):
            found.append(
                Launcher(
                    name=name,
                    version=_version_of(command, package),
                    start=start(str(Path(command).absolute())),
                )
            )
        else:
            missing.append(f"{name} (looked for {path or 'nothing: no path given'})")
    python = sys.version.partition(" ")[0]
    for name, way in ((FLOOR, "asyncio"), ("spawn loop", "plain")):
        found.append(Launcher(name=name, version=f"Python {python}", start=_spawn_loop(way)))
    return found, missing


def _version_of(command: str, package: str) -> str:
    asked = [str(python_of(command)), "-c", _VERSION, package] if package else [command, "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    return str(done.stdout.splitlines()[0].split()[-1])


def _davincirun(path: str) -> Callable[[int, Sequence[str | Path], Path], Program]:
    def start(workers: int, command: Sequence[str | Path], folder: Path) -> Program:
        options = ["--nproc-per-node", str(workers), "--log-dir", str(folder / "log")]
        return Program([path, *options, *command], _notes(folder))

    return start


def _davincirun_0_1(path: str) -> Callable[[int, Sequence[str | Path], Path], Program]:
    """0.1.5 takes no options: rank table, work and log folders come from the platform's variables."""

    def start(workers: int, command: Sequence[str | Path], folder: Path) -> Program:
        table = {
            "status": "completed",
            "group_count": "1",
            "group_list": [
                {
                    "group_name": "benchmark",
                    "device_count": str(workers),
                    "instance_count": "1",
                    "instance_list": [
                        {
                            "pod_name": "benchmark-0",
                            "server_id": "127.0.0.1",
                            "devices": [
                                {
                                    "device_id": str(device),
                                    "device_ip": f"127.0.{device // 250 + 1}.{device % 250 + 1}",
                                }
                                for device in range(workers)
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

    return start


def _torchrun(path: str) -> Callable[[int, Sequence[str | Path], Path], Program]:
    def start(workers: int, command: Sequence[str | Path], folder: Path) -> Program:
        options = ["--nproc-per-node", str(workers), "--master-port", str(_free_port()), "--no-python"]
        return Program([path, *options, *command], _notes(folder))

    return start


def _msrun(path: str) -> Callable[[int, Sequence[str | Path], Path], Program]:
    """It starts what it finds as `python`, and the same script once more as MindSpore's scheduler."""

    def start(workers: int, command: Sequence[str | Path], folder: Path) -> Program:
        options = [
            f"--worker_num={workers}",
            f"--local_worker_num={workers}",
            f"--master_port={_free_port()}",
            f"--log_dir={folder / 'log'}",
            "--join=True",
        ]
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(command[0])
        variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        return Program([path, *options, "python", *command[1:]], _notes(folder), variables)

    return start


def _mpirun(path: str) -> Callable[[int, Sequence[str | Path], Path], Program]:
    def start(workers: int, command: Sequence[str | Path], folder: Path) -> Program:
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(workers)]
        return Program([path, *options, *command], _notes(folder))

    return start


def _spawn_loop(way: str) -> Callable[[int, Sequence[str | Path], Path], Program]:
    def start(workers: int, command: Sequence[str | Path], folder: Path) -> Program:
        return Program([sys.executable, HERE / "spawn_loop.py", way, str(workers), *command], _notes(folder))

    return start


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _notes(folder: Path) -> Path:
    notes = folder / "notes"
    notes.mkdir()
    return notes
