"""The time limit of a job, and the signal before it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import FMKManager, JobTimeoutError

if TYPE_CHECKING:
    from pathlib import Path

SAVES = """
import os, signal, sys, time
def save(number, frame):
    open(f"saved-{os.environ['RANK']}", "w").close()
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR1, save)
print("running", flush=True)
while True:
    time.sleep(600)
"""


async def test_a_job_that_takes_too_long(job_folder: Path) -> None:
    """It is stopped in order; the report lists who ran, and what each said last."""
    words = "import os, time; print('epoch', os.environ['RANK'], flush=True); time.sleep(600)"
    began = time.monotonic()
    async with FMKManager(
        [sys.executable, "-c", words], nproc_per_node=2, timeout=1.5, grace_period=2
    ) as manager:
        with pytest.raises(JobTimeoutError) as caught:
            await manager.wait()
    assert 1.5 <= time.monotonic() - began < 20
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.exit_code == 124
    assert error.report.verdict == "time_limit"
    assert error.root_cause.rank == -1
    assert "the time limit of 1.5 s was reached" in str(error)
    assert "epoch 0" in str(error)
    assert "epoch 1" in str(error)
    assert manager.state == "FAILED"


async def test_a_job_that_is_in_time(job_folder: Path) -> None:
    """The limit leaves nothing behind."""
    async with FMKManager([sys.executable, "-c", "pass"], nproc_per_node=2, timeout=60) as manager:
        result = await manager.wait()
    assert result.exit_code == 0


async def test_workers_are_warned_that_handle_it(job_folder: Path) -> None:
    """A rank with a handler saves; one without would be ended by the signal, and does not get it."""
    async with FMKManager(
        [sys.executable, "-c", SAVES],
        nproc_per_node=2,
        timeout=4.0,
        warn_signal="USR1",
        warn_before=2.5,
        grace_period=1,
    ) as manager:
        with pytest.raises(JobTimeoutError):
            await manager.wait()
    assert sorted(path.name for path in job_folder.glob("saved-*")) == ["saved-0"]
    events = [event async for event in manager.events()]
    warned = next(event for event in events if "SIGUSR1 to the workers" in event.detail)
    ends = [event for event in events if event.kind == "exited"]
    assert all(event.time > warned.time for event in ends)


def test_the_command_says_124(job_folder: Path) -> None:
    """Exit code of the command."""
    run = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", "--nproc-per-node", "1", "--timeout", "1", "sleep", "600"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 124
    assert "the time limit of 1 s was reached" in run.stderr
