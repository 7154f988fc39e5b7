"""What the start does not need is not loaded by it: every worker of every job would wait for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Runs the command, and notes what it has loaded in the moment in which it starts the worker.
LAUNCHER = """
import sys

def note(event, args):
    if event == "subprocess.Popen" and args[0] == {worker!r}:
        with open({noted!r}, "w") as file:
            file.write("\\n".join(sys.modules))

sys.addaudithook(note)
sys.argv[1:] = ["--nproc-per-node", "1", "--log-dir", {logs!r}, {worker!r}]
from davincirunsdk.cli import main
main()
"""

NOT_NEEDED = (
    "anyio",
    "difflib",
    "hashlib",
    "msgspec",
    "psutil",
    "rich",
    "statistics",
    "tempfile",
    "yaml",
    "davincirunsdk.ctl",
    "davincirunsdk.diagnosis.judge",
    "davincirunsdk.diagnosis.knowledge",
    "davincirunsdk.diagnosis.report",
    "davincirunsdk.engines",
    "davincirunsdk.host.activity",
    "davincirunsdk.host.binding",
    "davincirunsdk.manifests.request",
    "davincirunsdk.output.live",
    "davincirunsdk.output.notebook",
    "davincirunsdk.rank_table",
    "davincirunsdk.supervision.watch",
)


def _among(loaded: list[str], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(f"{module}.".startswith(f"{name}.") for module in loaded)]


def test_the_first_worker_waits_for_little(tmp_path: Path) -> None:
    """The plain start of the command has loaded nothing but what it needs when a worker is started."""
    worker, noted = tmp_path / "worker", tmp_path / "noted"
    worker.write_text("#!/bin/sh\nexit 0\n")
    worker.chmod(0o755)
    program = LAUNCHER.format(worker=str(worker), noted=str(noted), logs=str(tmp_path / "log"))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=tmp_path)
    loaded = noted.read_text().split("\n")
    assert "davincirunsdk.supervision.worker" in loaded
    assert not _among(loaded, NOT_NEEDED)


@pytest.mark.parametrize(
    ("module", "not_needed"),
    [
        ("davincirunsdk", ("asyncio", "enum", "importlib.abc", "re", "typing")),
        (
            "davincirunsdk.leftovers.guardian_main",
            ("enum", "re", "signal", "subprocess", "threading", "typing"),
        ),
    ],
)
def test_what_every_process_loads_is_little(module: str, not_needed: tuple[str, ...]) -> None:
    """The package by itself, which a script imports, and the guardians, two of which start with each job."""
    program = f"import sys; sys.path.append({str(ROOT)!r}); import {module}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert module in found.stdout.split()
    assert not _among(found.stdout.split(), not_needed)
