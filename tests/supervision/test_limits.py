"""Limits of the system, a stop in the middle of a start, errors of our own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import is_alive, wait_until

from davincirunsdk import (
    DistributedRuntimeError,
    FMKManager,
    JobState,
    WorkerState,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PY = sys.executable
COMMAND = [PY, "-m", "davincirunsdk", "--log-dir", "log"]
PIDS = Path("/sys/fs/cgroup/pids")

pytestmark = pytest.mark.usefixtures("job_folder")


@pytest.fixture
def pids() -> Iterator[Path]:
    """A control group that counts processes and threads, as that of a container does."""
    assert (PIDS / "cgroup.procs").exists(), "this test needs root and the pids control group, version 1"
    group = PIDS / f"davincirun-test-{os.getpid()}"
    group.mkdir()
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the control group is empty")
    group.rmdir()


def test_workers_that_use_up_all_processes_are_ended_in_order(pids: Path) -> None:
    """No thread to be had any more: the siblings still get their grace period, and the cause is told."""
    program = (
        "import os, signal, sys, time\n"
        "def save(*_): print('saved', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(f'ready-{os.environ[\"RANK\"]}', 'w').close()\n"
        "while len([name for name in os.listdir() if name.startswith('ready')]) < 2: time.sleep(0.01)\n"
        "time.sleep(600 if os.environ['RANK'] == '0' else 0.5)\n"
        "open(sys.argv[1], 'w').write('1')\n"
        "sys.exit(7)\n"
    )
    script = f'echo $$ > {pids}/cgroup.procs; exec "$@"'
    found = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "--nproc-per-node", "2", PY, "-c", program, pids / "pids.max"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert found.returncode == 7, found.stderr
    assert "[rank 0] saved" in found.stdout
    assert "rank 1 is the root cause" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("limit", range(10, 48, 4))
def test_too_few_descriptors_are_said_to_be_too_few(limit: int) -> None:
    """At whatever moment of the start they run out: one sentence with what to do, or success."""
    script = f'ulimit -n {limit}; exec "$@"'
    found = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "--nproc-per-node", "6", "--echo", "none", "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if found.returncode:
        assert found.returncode in (3, 126)
        assert "ulimit -n" in found.stderr
        assert len(found.stderr.splitlines()) == 1, found.stderr


def test_a_low_soft_limit_of_descriptors_is_raised() -> None:
    """The command takes what it may have: many workers start whatever the shell begins with."""
    script = 'ulimit -Sn 64; exec "$@"'
    words = [*COMMAND, "--nproc-per-node", "24", "--echo", "none", "true"]
    found = subprocess.run(
        ["bash", "-c", script, "bash", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr


async def test_who_is_just_being_started_when_another_fails_is_not_blamed() -> None:
    """A failure in the middle of a start: later workers are not started, or stopped by us, never failed."""
    for first in (0, 5, 10):
        command = ["sh", "-c", f"[ $RANK = {first} ] && exit 3; exec sleep 600"]
        with pytest.raises(DistributedRuntimeError) as caught:
            async with FMKManager(command, nproc_per_node=40) as job:
                await job.wait()
        assert [failure.rank for failure in caught.value.failures] == [first]
        assert caught.value.exit_code == 3


async def test_a_cancelled_start_is_no_failure() -> None:
    """Cancelled at any moment of the start: every worker was stopped by us, or never started."""
    for step in range(12):
        job = FMKManager(["sleep", "600"], nproc_per_node=24)
        start = asyncio.ensure_future(job.__aenter__())
        await asyncio.wait({start}, timeout=0.01 * step)
        start.cancel()
        await asyncio.wait({start})
        await job.__aexit__(None, None, None)
        assert job.error is None
        assert {worker.state for worker in job.workers} <= {WorkerState.STOPPED, WorkerState.PENDING}
        assert job.state in (JobState.STOPPED, JobState.PENDING)


@pytest.mark.parametrize("begun", [0, 1, 10, 20, 30])
def test_control_c_during_a_start_gives_130(begun: int) -> None:
    """Ctrl-C when some of the workers have been started: 130, and nothing that looks like a failure."""
    process = subprocess.Popen(
        [*COMMAND, "--nproc-per-node", "32", "sleep", "600"], stderr=subprocess.PIPE, text=True
    )

    def has_begun() -> bool:
        texts = [path.read_text() for path in Path("log").glob("*-events.jsonl")]
        return bool(texts) and texts[0].count('"started"') >= begun

    wait_until(has_begun)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "root cause" not in said


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("ours")


@pytest.mark.parametrize(
    "place",
    [
        "davincirunsdk.supervision.rounds.judge",
        "davincirunsdk.supervision.attempt.Attempt._judge_exit",
        "davincirunsdk.supervision.attempt.Attempt._sweep",
        "davincirunsdk.supervision.attempt.Attempt._see_stop_through",
        "davincirunsdk.supervision.attempt._look_at",
        "davincirunsdk.supervision.worker.Worker._peek",
        "davincirunsdk.leftovers.process_tree.ProcessTree.find",
        "davincirunsdk.leftovers.ending.Ending.stop",
        "davincirunsdk.leftovers.ending.Ending.end",
    ],
)
async def test_an_error_of_our_own_is_raised(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks the supervision, wherever, ends the workers and is raised bare; nobody waits for ever."""
    async with FMKManager(["sleep", "600"], nproc_per_node=2, grace_period=1) as job:
        workers = job.workers
        monkeypatch.setattr(place, _broken)
        job.stop()
        with pytest.raises(ZeroDivisionError, match="ours"):
            await asyncio.wait_for(job.wait(), 20)
    wait_until(lambda: not any(is_alive(worker.pid or 0) for worker in workers))
    assert job.state == JobState.FAILED
    events = [event async for event in job.events()]
    told = [event for event in events if event.kind == "internal_error"]
    assert "ZeroDivisionError: ours" in told[0].detail
    assert "Traceback" in told[0].detail
    assert (events[-1].kind, events[-1].exit_code) == ("finished", 70)


@pytest.mark.parametrize(
    "place",
    [
        "davincirunsdk.supervision.attempt._load_what_the_end_needs",
        "davincirunsdk.supervision.attempt.children_are_reaped_by_kernel",
        "davincirunsdk.supervision.attempt.guardian.watch",
        "davincirunsdk.supervision.worker.Worker._wait_for_exit",
        "davincirunsdk.supervision.spawn._spawn",
        "davincirunsdk.supervision.guardian_watch.GuardianWatch.watch",
    ],
)
async def test_an_error_of_our_own_during_the_start(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same before all workers run."""
    monkeypatch.setattr(place, _broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        async with FMKManager(["sleep", "600"], nproc_per_node=2, grace_period=1) as job:
            await asyncio.wait_for(job.wait(), 20)


def test_a_signal_while_a_table_is_awaited_speaks_of_no_workers(job_folder: Path) -> None:
    """Stopped before the start: what is said holds, and the exit code is the signal's."""
    (job_folder / "table.json").write_text('{"status": "initializing"}')
    process = subprocess.Popen(
        [*COMMAND, "--rank-table", "table.json", "true"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "waiting for rank table" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "before a worker was started" in said
    assert "workers have" not in said


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_nothing(closed: str, job_folder: Path) -> None:
    """Whichever of them the caller has closed: the job succeeds and its log file is complete."""
    words = [*COMMAND, "--nproc-per-node", "2", "sh", "-c", "echo one; sleep 0.2; echo two"]
    script = f'exec "$@" {closed}'
    found = subprocess.run(["sh", "-c", script, "sh", *words], timeout=30, check=False)
    assert found.returncode == 0
    logs = sorted((job_folder / "log").glob("*.txt"))
    assert [path.read_text() for path in logs] == ["one\ntwo\n"] * 2


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.4, 1.0])
def test_sigterm_leaves_no_folder_behind(delay: float, job_folder: Path) -> None:
    """A script that has SIGTERM's default action ends by it, after the cache folder is gone."""
    program = (
        "import pathlib\n"
        "from davincirunsdk import start_and_wait_distributed_train\n"
        "from davincirunsdk.environment import compiler_cache\n"
        # Wherever this machine has such a folder, the test looks into the temporary one.
        "compiler_cache._PLATFORM_CACHE = pathlib.Path('/no/such/folder')\n"
        "print('ready', flush=True)\n"
        "start_and_wait_distributed_train(['sleep', '600'], nproc_per_node=8)\n"
    )
    cache = job_folder / "temporary"
    cache.mkdir()
    process = subprocess.Popen(
        [PY, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(cache)}
    )
    assert process.stdout is not None
    process.stdout.readline()
    with process.stdout, pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay)
    if delay:
        wait_until(lambda: list(cache.iterdir()), what="the cache folder is made")
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    # Not any file: Python itself tries a new temporary folder out with one.
    assert not list(cache.glob("davincirun-*"))


@pytest.mark.parametrize("limit", range(2, 10))
def test_too_few_processes_are_said_to_be_too_few(limit: int, pids: Path) -> None:
    """At whatever moment of the start they run out: one sentence with what to do, or success."""
    (pids / "pids.max").write_text(str(limit))
    script = f'echo $$ > {pids}/cgroup.procs; exec "$@"'
    words = [*COMMAND, "--nproc-per-node", "2", "--echo", "none", "true"]
    found = subprocess.run(
        ["sh", "-c", script, "sh", *words], capture_output=True, text=True, timeout=30, check=False
    )
    if found.returncode:
        assert found.returncode == 126
        assert "limit on processes is reached" in found.stderr
        assert len(found.stderr.splitlines()) == 1, found.stderr
