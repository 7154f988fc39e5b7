"""How workers are asked to end, and when: real jobs, stopped on every way."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from processes import wait_until

from davincirunsdk import DistributedRuntimeError, FMKManager

if TYPE_CHECKING:
    from pathlib import Path

PY = sys.executable
pytestmark = pytest.mark.usefixtures("job_folder")

SAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: open("termed", "a").write(rank))
open(f"ready.{rank}", "w").close()
try:
    while not (rank == "0" and os.path.exists("fail")):
        time.sleep(0.01)
    raise SystemExit(5)
except KeyboardInterrupt:
    open(f"saving.{rank}", "w").write("checkpoint")
    os.rename(f"saving.{rank}", f"saved.{rank}")
    raise
"""


def ready(folder: Path) -> bool:
    """Tell whether all three ranks can be stopped."""
    return len(list(folder.glob("ready.*"))) == 3


def saved(folder: Path) -> list[str]:
    """List what was saved, and whether anybody got SIGTERM."""
    return sorted(path.name for path in (*folder.glob("saved.*"), *folder.glob("termed")))


def command(*options: str, worker: str = SAVES, count: int = 3) -> list[str]:
    """Words of the command for a worker's source."""
    return [
        *(PY, "-m", "davincirunsdk", "--nproc-per-node", str(count), "--echo", "none"),
        *options,
        *(PY, "-S", "-c", worker),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_stop_signal_of_the_command(number: int, job_folder: Path) -> None:
    """Whoever saves on KeyboardInterrupt does so, also when the guardian has to ask for it."""
    process = subprocess.Popen(
        command("--stop-signal", "INT"), stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_until(lambda: ready(job_folder))
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number), said
    wait_until(lambda: len(saved(job_folder)) >= 3)
    assert saved(job_folder) == ["saved.0", "saved.1", "saved.2"]
    if number != signal.SIGKILL:
        assert b"ranks 0-2 ended in time" in said


async def test_a_failure_asks_the_others_by_it(job_folder: Path) -> None:
    """The KeyboardInterrupt that we caused is not taken for anybody's error."""
    manager = FMKManager([PY, "-S", "-c", SAVES], nproc_per_node=3, stop_signal="SIGINT")
    async with manager:
        await asyncio.to_thread(wait_until, lambda: ready(job_folder))
        (job_folder / "fail").touch()
        with pytest.raises(DistributedRuntimeError) as caught:
            await manager.wait()
    error = caught.value
    assert (error.exit_code, error.root_cause.rank, len(error.failures)) == (5, 0, 1)
    assert "2 stopped by us in time" in error.report.text
    assert saved(job_folder) == ["saved.1", "saved.2"]


async def test_a_shell_above_the_worker(job_folder: Path) -> None:
    """The order of a stop is the same by any signal: a waiting shell is told together with its child."""
    script = job_folder / "train.py"
    script.write_text(SAVES)
    words = ["bash", "-c", f"{PY} -S {script}; true"]
    async with FMKManager(words, nproc_per_node=3, stop_signal="int") as manager:
        await asyncio.to_thread(wait_until, lambda: ready(job_folder))
        await manager.stop()
    assert saved(job_folder) == ["saved.0", "saved.1", "saved.2"]


@pytest.mark.parametrize("name", ["KILL", "STOP", "TREM", "", "15"])
def test_no_such_stop_signal(name: str) -> None:
    """What no worker can handle is refused before anything is started."""
    with pytest.raises(ValueError, match="stop_signal is"):
        FMKManager([PY], stop_signal=name)
    done = subprocess.run(command("--stop-signal", name), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "stop" in done.stderr
