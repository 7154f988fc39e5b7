"""Runs the demo training under the launcher, for real, and reads what it printed."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What came out of one run.

    Attributes:
        exit_code: The process's own.
        stdout: All of it.
        stderr: All of it.
    """

    exit_code: int
    stdout: str
    stderr: str

    @property
    def losses(self) -> list[float]:
        """The losses that rank 0 printed, in order."""
        return [
            float(loss) for loss in re.findall(r"step +\d+ of \d+  loss ([\d.]+)$", self.stdout, re.MULTILINE)
        ]

    @property
    def checksums(self) -> dict[int, str]:
        """Checksum of the weights by rank."""
        found = re.findall(r"rank (\d+) of \d+: weights checksum ([0-9a-f]{8})$", self.stdout, re.MULTILINE)
        return {int(rank): checksum for rank, checksum in found}

    @property
    def accuracy(self) -> float | None:
        """The test accuracy that rank 0 printed, None if it did not come so far."""
        found = re.search(r"test accuracy ([\d.]+)$", self.stdout, re.MULTILINE)
        return float(found[1]) if found else None

    def __str__(self) -> str:
        return f"exit code {self.exit_code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_python(*arguments: str, timeout: float = 50) -> DemoOutcome:
    """Runs this interpreter with the arguments; `timeout` in seconds."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return DemoOutcome(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def run_demo(launcher_options: Sequence[str], *demo_options: str, timeout: float = 50) -> DemoOutcome:
    """Runs the demo under the launcher; `timeout` in seconds."""
    module = ["-m", "davincirunsdk.demo", *demo_options]
    return run_python("-m", "davincirunsdk", *launcher_options, *module, timeout=timeout)
