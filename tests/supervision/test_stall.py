"""Real jobs that hang: the stall is seen, the odd rank is named; jobs that work in silence are left alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from davincirunsdk import DistributedRuntimeError, FMKManager, JobTimeoutError

COLLECTIVE = Path(__file__).parents[1] / "workers" / "collective.py"


async def fails(*words: str, ranks: int = 4, **keywords: object) -> tuple[JobTimeoutError, FMKManager]:
    """Run a job that stalls."""
    command = [sys.executable, str(COLLECTIVE), *words]
    given = {"stall_timeout": 1.0, "grace_period": 1.0, **keywords}
    async with FMKManager(command, nproc_per_node=ranks, **given) as manager:  # type: ignore[arg-type] # as given
        with pytest.raises(JobTimeoutError) as caught:
            await manager.wait()
    return caught.value, manager


@pytest.mark.parametrize("kind", ["sleeps", "helper"])
async def test_a_rank_does_not_come(job_folder: Path, kind: str) -> None:
    """One of four goes astray after some steps: it is named, with where it is and where the others wait."""
    error, manager = await fails(kind, "3")
    assert isinstance(error, TimeoutError)
    assert error.exit_code == 124
    assert error.report.verdict == "stalled"
    assert error.root_cause.rank == 3
    text = str(error)
    assert "rank 3 is in " in text
    assert "ranks 0-2 are in " in text
    assert (job_folder / "log" / f"{manager.job_id}-stacks-1.txt").exists()
    events = [event async for event in manager.events()]
    assert [event.kind for event in events if event.kind in ("stalled", "stopping")] == [
        "stalled",
        "stopping",
    ]


async def test_a_rank_that_spins_delays_but_does_not_hide_it(job_folder: Path) -> None:
    """A busy loop is no progress: the stall comes after three times the limit."""
    began = time.monotonic()
    error, _ = await fails("spins", "3")
    assert time.monotonic() - began > 3.0
    assert error.root_cause.rank == 3


async def test_a_stopped_rank_is_named(job_folder: Path) -> None:
    """A rank that a signal has stopped is the cause whatever the stacks say."""
    error, _ = await fails("stops", "3")
    assert error.root_cause.rank == 3
    assert " ".join(error.report.why.split()).count("rank 3 is stopped by a signal") == 1


async def test_a_rank_that_has_ended_well_is_missed(job_folder: Path) -> None:
    """Ranks left alone are told of at once, and stall by the same clock."""
    error, manager = await fails("leaves", "3", stall_timeout=8.0)
    assert error.exit_code == 124
    events = [event async for event in manager.events()]
    told = [event for event in events if "no sign of work since rank 3 ended well" in event.detail]
    stalled = [event for event in events if event.kind == "stalled"]
    assert len(told) == 1
    assert len(stalled) == 1
    assert told[0].time < stalled[0].time


async def test_only_a_warning(job_folder: Path) -> None:
    """With on_stall=warn the job goes on, and is warned of once a stall."""
    command = [sys.executable, str(COLLECTIVE), "sleeps", "2"]
    async with FMKManager(
        command, nproc_per_node=2, stall_timeout=0.5, on_stall="warn", grace_period=1
    ) as manager:
        async for event in manager.events():
            if event.kind == "stalled":
                break
        # Several times the limit: a second warning of the same stall would come by then.
        await asyncio.sleep(2.0)
        assert manager.state == "RUNNING"
    stalls = [event async for event in manager.events() if event.kind == "stalled"]
    assert len(stalls) == 1
    assert "rank 1 is in " in stalls[0].detail


SILENT = {
    "prints rarely": "for n in range(4):\n    print(f'step {n + 1} loss 1', flush=True)\n    time.sleep(0.8)",
    "compiles first": "time.sleep(2.2)\nprint('step 1 loss 0.5', flush=True)",
    "computes": (
        "print('step 1 loss 1', flush=True)\nend = time.monotonic() + 2.2\nwhile time.monotonic() < end: pass"
    ),
    "saves a checkpoint": (
        "print('step 1 loss 0.5', flush=True)\n"
        "with open('checkpoint', 'wb', buffering=0) as file:\n"
        "    for _ in range(10):\n        file.write(b'x' * 1000)\n        time.sleep(0.25)"
    ),
    "waits for a helper that reads": (
        "import subprocess, sys\n"
        "print('step 1 loss 0.5', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time\\n"
        'for _ in range(10): open("/proc/self/stat").read(); time.sleep(0.25)\'], check=True)'
    ),
}


@pytest.mark.parametrize("kind", SILENT)
async def test_no_false_alarm(job_folder: Path, kind: str) -> None:
    """A job that works in silence for longer than the limit is left alone."""
    # The other rank only waits, as in a collective.
    waits = "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(2.6)\n    raise SystemExit\n"
    command = [sys.executable, "-c", waits + SILENT[kind]]
    async with FMKManager(command, nproc_per_node=2, stall_timeout=1.0) as manager:
        result = await manager.wait()
    assert result.exit_code == 0
    assert [event.kind async for event in manager.events() if event.kind == "stalled"] == []


def test_the_command_says_124(job_folder: Path) -> None:
    """Exit code, report and stacks of the command."""
    words = ["--nproc-per-node", "3", "--stall-timeout", "1", "--grace-period", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", *words, "python", str(COLLECTIVE), "sleeps", "2"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 124
    assert "no rank showed progress for" in run.stderr
    assert "stacks are in" in run.stderr


@pytest.mark.parametrize(
    "keywords",
    [
        {"stall_timeout": 5, "on_stall": "restart"},
        {"on_stall": "warn"},
        {"stall_timeout": 0},
        {"stall_timeout": -1},
        {"stall_timeout": 5, "on_stall": "explode"},
        {"max_restarts": -1},
        {"timeout": 0},
        {"timeout": 10, "warn_signal": "KILL"},
        {"timeout": 10, "warn_signal": "SIGNONSENSE"},
        {"timeout": 10, "warn_before": 5},
        {"timeout": 10, "warn_signal": "USR1", "warn_before": 10},
        {"warn_signal": "USR1"},
    ],
)
def test_contradictions_are_refused(keywords: dict[str, object]) -> None:
    """What has no sense together is an error before anything runs."""
    with pytest.raises(ValueError, match=list(keywords)[-1]):
        FMKManager(["true"], **keywords)  # type: ignore[arg-type] # wrong on purpose


async def test_a_stop_is_no_stall(job_folder: Path) -> None:
    """A stop that comes while a job hangs is a stop."""
    command = [sys.executable, str(COLLECTIVE), "sleeps", "2"]
    async with FMKManager(command, nproc_per_node=2, stall_timeout=0.5, grace_period=1) as manager:
        await manager.stop()
    assert manager.state == "STOPPED"
    assert not isinstance(manager.error, JobTimeoutError)


async def test_a_slow_rank_is_named(job_folder: Path) -> None:
    """Ranks that lag far behind the median stand in the report, and in the tables while the job runs."""
    words = (
        "import os, time, davincirunsdk\n"
        "rank = int(os.environ['RANK'])\n"
        "for step in range(1, 4 if rank == 2 else 101): davincirunsdk.progress(step, 100)\n"
        "open(f'ready-{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'ready-{other}') for other in range(4)): time.sleep(0.01)\n"
        "time.sleep(1.5)\n"
        "davincirunsdk.progress(4 if rank == 2 else 100)\n"
        "open(f'late-{rank}', 'w').close()\n"
        "while not os.path.exists('late-2'): time.sleep(0.01)\n"
        "if rank == 0: os._exit(3)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", words]
    async with FMKManager(command, nproc_per_node=4, grace_period=1) as manager:
        with pytest.raises(DistributedRuntimeError) as caught:
            await manager.wait()
    assert "rank 2 was 96 steps behind the others" in " ".join(str(caught.value).split())
