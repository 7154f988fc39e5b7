"""How a job ends when its workers end in every way: at once, named right, each one's own story kept."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from recorded import PY

from davincirunsdk import DistributedRuntimeError, FMKManager, JobState, WorkerState

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk import RunResult

pytestmark = pytest.mark.usefixtures("job_folder")

START = "import os, signal, sys, threading, time\nrank = int(os.environ['RANK'])\n"


def job(code: str, workers: int, grace_period: float = 5.0) -> FMKManager:
    """Make a job whose workers run this code."""
    words = [PY, "-S", "-E", "-c", START + code]
    return FMKManager(words, nproc_per_node=workers, grace_period=grace_period)


async def failure_of(manager: FMKManager) -> DistributedRuntimeError:
    """Run a job to its failure."""
    with pytest.raises(DistributedRuntimeError) as caught:
        async with manager:
            await manager.wait()
    return caught.value


async def success_of(manager: FMKManager) -> RunResult:
    """Run a job to its good end."""
    async with manager:
        return await manager.wait()


async def test_any_rank_that_fails_ends_the_job() -> None:
    """A failure of rank 5 of 8 ends the job although the others would wait for ever; they are stopped."""
    manager = job("time.sleep(0.3)\nif rank == 5: sys.exit(1)\ntime.sleep(600)", 8)
    began = time.monotonic()
    error = await failure_of(manager)
    assert time.monotonic() - began < 3.0
    assert [failure.rank for failure in error.failures] == [5]
    assert [worker.state for worker in manager.workers].count(WorkerState.STOPPED) == 7


async def test_siblings_are_told_at_once_and_waiting_costs_nothing() -> None:
    """A sibling hears of a failure within half a second at worst, without a loop that looks now and then."""
    code = """
def told(number, frame):
    print(time.monotonic())
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
if rank == 1:
    time.sleep(1)
    print(time.monotonic(), flush=True)
    sys.exit(1)
time.sleep(600)
"""
    delays = []
    for _ in range(3):
        manager = job(code, 2)
        before = psutil.Process().cpu_times()
        await failure_of(manager)
        after = psutil.Process().cpu_times()
        told, failed = (float(worker.log_path.read_text()) for worker in manager.workers)
        delays.append(told - failed)
        # Start, report and clean-up are in this, too.
        assert after.user + after.system - before.user - before.system < 0.7
    assert max(delays) < 0.5
    # The exit of a Python process itself takes most of this.
    assert sorted(delays)[1] < 0.2


async def test_the_grace_period_is_kept_and_no_longer() -> None:
    """A worker deaf to SIGTERM gets SIGKILL after the grace period; its record says so."""
    code = "signal.signal(15, signal.SIG_IGN)\ntime.sleep(0.3)\nif rank == 1: sys.exit(3)\ntime.sleep(600)"
    manager = job(code, 2, grace_period=1)
    began = time.monotonic()
    error = await failure_of(manager)
    assert 1.0 < time.monotonic() - began < 3.3
    assert error.exit_code == 3
    worker = manager.workers[0]
    assert (worker.state, worker.exit_code) == (WorkerState.KILLED, -signal.SIGKILL)


async def test_a_checkpoint_on_sigterm_is_waited_for() -> None:
    """Workers that need a part of the grace period to save get it, and the job ends when they have saved."""
    code = """
def save(number, frame):
    time.sleep(1.5)
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
    async with job(code, 3, grace_period=15) as manager:
        seen = 0
        async for _ in manager.logs():
            seen += 1
            if seen == 3:
                break
        began = time.monotonic()
        await manager.stop()
        assert 1.4 < time.monotonic() - began < 4.0
    assert [worker.log_path.read_text() for worker in manager.workers] == ["ready\nsaved\n"] * 3
    assert [worker.state for worker in manager.workers] == [WorkerState.STOPPED] * 3


async def test_an_early_good_end_is_no_failure() -> None:
    """Workers may end at different times: success comes with the last, and nobody gets a signal."""
    code = """
for number in (1, 2, 3, 10, 12, 15, 18):
    signal.signal(number, lambda number, frame: print("signal", number))
time.sleep((0.1, 0.8, 1.2)[rank])
"""
    began = time.monotonic()
    result = await success_of(job(code, 3))
    assert 1.2 < time.monotonic() - began < 3.5
    assert result.state is JobState.SUCCEEDED
    assert [worker.log_path.read_bytes() for worker in result.workers] == [b""] * 3


async def test_later_failures_do_not_hide_the_first() -> None:
    """What fails because it is being stopped is not blamed and does not begin the grace period anew."""
    code = """
def fail(number, frame):
    time.sleep(0.4)
    sys.exit(9)
if rank == 1:
    signal.signal(signal.SIGTERM, fail)
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(0.4)
if rank == 3:
    sys.exit(7)
time.sleep(600)
"""
    manager = job(code, 4, grace_period=1)
    began = time.monotonic()
    error = await failure_of(manager)
    assert time.monotonic() - began < 3.4
    assert [(failure.rank, failure.exit_code) for failure in error.failures] == [(3, 7)]
    assert error.exit_code == 7
    assert manager.workers[1].exit_code == 9


WAYS_TO_FAIL = [
    ("sys.exit(1)", 1),
    ("sys.exit(255)", 255),
    ("sys.exit(75)", 75),
    ("os.kill(os.getpid(), 9)", -9),
    ("os.kill(os.getpid(), 11)", -11),
    ("os.abort()", -6),
    ("threading.Thread(target=os._exit, args=[3]).start(); time.sleep(600)", 3),
    ("raise ValueError", 1),
    ("sys.exit('text')", 1),
]


@pytest.mark.parametrize(("way", "code"), WAYS_TO_FAIL)
async def test_every_failure_is_one_with_its_own_code(way: str, code: int) -> None:
    """Whatever a worker dies of is a failure, with the code or signal as it is, and 128+n for a shell."""
    error = await failure_of(job(f"if rank == 1: {way}\ntime.sleep(600)", 3))
    assert (error.root_cause.rank, error.root_cause.exit_code) == (1, code)
    assert error.exit_code == (code if code > 0 else 128 - code)


@pytest.mark.parametrize(("way", "code"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), 9)", 137)])
def test_the_command_ends_with_the_first_failures_code(way: str, code: int, tmp_path: Path) -> None:
    """Batch systems retry by the exit code: it is the root cause's own."""
    script = tmp_path / "train.py"
    script.write_text(f"{START}if rank == 1: {way}\ntime.sleep(600)")
    words = [PY, "-m", "davincirunsdk", "--nproc-per-node", "3", script.name]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=30).returncode == code


async def test_every_worker_has_its_own_record() -> None:
    """Failed, ended by SIGTERM, ended well after SIGTERM, killed: each with pid and times."""
    code = """
if rank == 2: signal.signal(15, lambda number, frame: sys.exit(0))
if rank == 3: signal.signal(15, signal.SIG_IGN)
time.sleep(0.4)
if rank == 0: sys.exit(1)
time.sleep(600)
"""
    manager = job(code, 4, grace_period=0.7)
    await failure_of(manager)
    assert [(worker.exit_code, worker.state) for worker in manager.workers] == [
        (1, WorkerState.FAILED),
        (-15, WorkerState.STOPPED),
        (0, WorkerState.STOPPED),
        (-9, WorkerState.KILLED),
    ]
    for worker in manager.workers:
        assert worker.pid is not None
        assert worker.started is not None
        assert worker.ended is not None
        assert worker.started < worker.ended
