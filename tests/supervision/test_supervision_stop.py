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


EVALUATION = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    sys.exit(7)
while not os.path.exists("failed.1"):
    time.sleep(0.01)
if rank == 2:
    raise ValueError("no such benchmark")
while not os.path.exists("failed.2"):
    time.sleep(0.01)
open(f"done.{rank}", "w").close()
"""


def test_keep_going(job_folder: Path) -> None:
    """Two bad evaluations of four end nobody; the first one's code counts, and the report has both."""
    words = command("--keep-going", worker=EVALUATION, count=4)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        for rank in (1, 2):
            if f"rank {rank} failed" in line:
                (job_folder / f"failed.{rank}").touch()
    process.stderr.close()
    assert process.wait(30) == 7, said
    assert sorted(path.name for path in job_folder.glob("done.*")) == ["done.0", "done.3"]
    assert "rank 1 failed (exit code 7); 3 others go on" in said
    assert "rank 2 failed (exit code 1); 2 others go on" in said
    report = said.partition(" failed: ")[2]
    assert "ValueError: no such benchmark" in report
    assert "exit code 7" in report
    assert "2 had ended well" in report


async def test_keep_going_is_awaited_to_the_end(job_folder: Path) -> None:
    """In the API `wait` raises when all have ended, not before."""
    (job_folder / "failed.1").touch()
    (job_folder / "failed.2").touch()
    async with FMKManager([PY, "-c", EVALUATION], nproc_per_node=4, keep_going=True) as manager:
        with pytest.raises(DistributedRuntimeError) as caught:
            await manager.wait()
    error = caught.value
    assert sorted(failure.rank for failure in error.failures) == [1, 2]
    assert sorted(path.name for path in job_folder.glob("done.*")) == ["done.0", "done.3"]
    assert error.result is not None
    assert error.result.exit_code == error.exit_code
    assert error.exit_code in (1, 7)


async def test_keep_going_leaves_nothing_of_a_bad_worker() -> None:
    """What a failed worker left behind is ended when all others have ended."""
    source = "import os, subprocess as s, sys; s.Popen(['sleep', '600']); sys.exit(int(os.environ['RANK']))"
    async with FMKManager([PY, "-c", source], nproc_per_node=2, keep_going=True) as manager:
        with pytest.raises(DistributedRuntimeError) as caught:
            await manager.wait()
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert caught.value.result is not None
    assert len(caught.value.result.leftovers) == 2


def test_keep_going_and_restarts_contradict_each_other() -> None:
    """One lets the others go on, the other starts all anew."""
    with pytest.raises(ValueError, match="keep_going"):
        FMKManager([PY], keep_going=True, max_restarts=1)


STRAGGLER = """
import os, time
if os.environ["RANK"] == "2":
    time.sleep(600)
"""


def test_a_straggler_is_named_and_stopped() -> None:
    """After the first good end the others have their time, and no more; the code is that of a time limit."""
    words = command("--straggler-timeout", "1", worker=STRAGGLER)
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 124, done.stderr
    assert "rank 2 still ran 1 s after rank" in done.stderr
    assert "may hold" not in done.stderr


async def test_nobody_straggles_before_a_good_end() -> None:
    """A bad end does not count, nor does one within the time; with nobody left nothing is stopped."""
    source = "import os, sys, time; time.sleep(0.4); sys.exit(0)"
    async with FMKManager([PY, "-c", source], nproc_per_node=3, straggler_timeout=20) as manager:
        assert (await manager.wait()).exit_code == 0
    source = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(rank); sys.exit(1 - rank)"
    manager = FMKManager([PY, "-c", source], nproc_per_node=2, straggler_timeout=0, keep_going=True)
    async with manager:
        with pytest.raises(DistributedRuntimeError) as caught:
            await manager.wait()
    assert (caught.value.exit_code, len(caught.value.failures)) == (1, 1)
