"""Restarts of the whole group: what is restarted and what never, numbers, logs, stops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import is_alive, wait_until

from davincirunsdk import DistributedRuntimeError, FMKManager, JobTimeoutError, RunResult

START = """
import os, signal, sys, time
from pathlib import Path
count, rank = int(os.environ["DAVINCIRUN_RESTART_COUNT"]), int(os.environ["RANK"])
with open("starts", "a") as file:
    file.write(f"{count} {rank} {os.getpid()} {os.environ['MASTER_PORT']} "
               f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['TORCHELASTIC_MAX_RESTARTS']}\\n")
def step(n): print(f"step {n} loss 0.5", flush=True)
"""


def starts() -> list[list[str]]:
    """Every start of a worker: attempt, rank, pid, port, and torch's names for count and limit."""
    return [line.split() for line in Path("starts").read_text().splitlines()]


def attempts() -> list[int]:
    """The attempts that were started."""
    return sorted({int(start[0]) for start in starts()})


async def run(words: str, *, ranks: int = 2, **keywords: object) -> tuple[FMKManager, RunResult | None]:
    """Run a job to its end."""
    given = {"max_restarts": 3, "restart_delay": 0.1, "grace_period": 1.0, **keywords}
    command = [sys.executable, "-c", START + words]
    async with FMKManager(command, nproc_per_node=ranks, **given) as manager:  # type: ignore[arg-type] # as given
        try:
            return manager, await manager.wait()
        except DistributedRuntimeError as error:
            return manager, error.result


async def test_a_failure_that_a_restart_cures(job_folder: Path) -> None:
    """The whole group starts anew, with one number, a new port, logs of its own, and ends well."""
    words = (
        "step(count + 1)\n"
        "if rank == 1 and count < 2:\n"
        "    while [str(count), '0'] not in [line.split()[:2] for line in open('starts')]: time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "if count < 2: time.sleep(600)\n"
    )
    manager, result = await run(words)
    assert result is not None
    assert result.exit_code == 0
    assert [(attempt.number, attempt.exit_code) for attempt in result.attempts] == [(0, 3), (1, 3), (2, 0)]
    assert [attempt.step for attempt in result.attempts] == [1, 2, 3]
    assert "rank 1" in result.attempts[0].reason
    seen = starts()
    assert sorted((start[0], start[1]) for start in seen) == [
        (str(n), str(r)) for n in range(3) for r in range(2)
    ]
    assert all(start[0] == start[4] and start[5] == "3" for start in seen)
    assert len({start[3] for start in seen}) == 3
    logs = sorted(path.name for path in (job_folder / "log").glob("*-rank-1-*.txt"))
    name = f"{manager.job_id}-proc-rank-1-device-1"
    assert logs == [f"{name}-attempt-0.txt", f"{name}-attempt-1.txt", f"{name}.txt"]
    assert (job_folder / "log" / logs[1]).read_text() == "step 2 loss 0.5\n"
    kinds = [event.kind async for event in manager.events()]
    assert kinds.count("restarting") == 2
    assert kinds.count("finished") == 1
    assert kinds.count("started") == 6
    file = job_folder / "log" / f"{manager.job_id}-events.jsonl"
    assert [json.loads(line)["kind"] for line in file.read_text().splitlines()].count("restarting") == 2


async def test_no_restart_unless_asked_for(job_folder: Path) -> None:
    """The default is none."""
    _, result = await run("sys.exit(3)", max_restarts=None)
    assert attempts() == [0]
    assert result is not None
    assert len(result.attempts) == 1


NEVER = {
    "usage error": ("sys.exit(2)", "exit code 2"),
    "not executable": ("sys.exit(126)", "exit code 126"),
    "not found": ("sys.exit(127)", "exit code 127"),
    "import error": ("import no_such_module", "ModuleNotFoundError"),
    "syntax error": ("eval('1 +')", "SyntaxError"),
}


@pytest.mark.parametrize(("words", "why"), NEVER.values(), ids=list(NEVER))
async def test_what_is_never_restarted(job_folder: Path, words: str, why: str) -> None:
    """A wrong program stays wrong; the reason is one line."""
    manager, _ = await run(f"step(1)\n{words}")
    assert attempts() == [0]
    said = [event.detail async for event in manager.events() if event.detail.startswith("no restart: ")]
    assert len(said) == 1
    assert why in said[0]


GIVEN_UP = {
    "the same error before any step": ("raise ValueError(f'port {os.getpid()}')", [0, 1], "before any step"),
    "the same error at the same step": ("step(5)\nraise ValueError('x')", [0, 1], "at step 5"),
    "quick deaths without a word": ("os._exit(7)", [0, 1, 2], "made no step"),
    "no progress": ("step(9 - count)\nraise ValueError('abc'[count])", [0, 1, 2], "got beyond step 9"),
    "the same code": (
        "raise RuntimeError('ACL error 507015, pid %d' % os.getpid())",
        [0, 1],
        "before any step",
    ),
    "other codes": ("raise RuntimeError('ACL error %d' % (507015 + count))", [0, 1, 2], "made no step"),
    "other letters": ("raise RuntimeError('EI000%d: see plog' % count)", [0, 1, 2], "made no step"),
    "used up": ("step(count + 1)\nos._exit(7)", [0, 1, 2, 3], "the job has had its 3 restarts"),
}


@pytest.mark.parametrize(("words", "made", "why"), GIVEN_UP.values(), ids=list(GIVEN_UP))
async def test_what_is_given_up(job_folder: Path, words: str, made: list[int], why: str) -> None:
    """Where one attempt is like the one before, the next will be, too."""
    manager, result = await run(words, ranks=1)
    assert attempts() == made
    assert result is not None
    assert len(result.attempts) == len(made)
    said = [event.detail async for event in manager.events() if event.detail.startswith("no restart: ")]
    assert len(said) == 1
    assert why in said[0]
    if len(made) > 1:
        # Attempts of a few tenths of a second are not said to have taken none.
        assert re.search(r"attempt 0 ended after \d+\.\d s", str(manager.error))


async def test_survivors_that_are_kept_are_not_restarted(job_folder: Path) -> None:
    """Without fail_fast the outcome is told while others go on: it cannot be taken back."""
    manager, _ = await run("step(1)\nif rank == 1: sys.exit(3)", fail_fast=False)
    assert attempts() == [0]
    said = [event.detail async for event in manager.events() if event.detail.startswith("no restart: ")]
    assert said == ["no restart: fail_fast=False keeps the workers that survive a failure"]


def test_the_blocking_calls_restart_too(job_folder: Path) -> None:
    """The documented call takes the options, too."""
    from davincirunsdk import start_and_wait_distributed_train

    command = [sys.executable, "-c", START + "step(count + 1)\nif count == 0: sys.exit(3)"]
    options = {"nproc_per_node": 2, "max_restarts": 1, "restart_delay": 0.1}
    assert start_and_wait_distributed_train(command, **options) == 0  # type: ignore[arg-type] # as given
    assert attempts() == [0, 1]


async def test_the_batch_systems_own_runs_count(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Slurm has requeued twice already is restarted twice less."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    await run("step(count + 1)\nos._exit(7)", ranks=1)
    assert attempts() == [0, 1]


async def test_the_delay_grows(job_folder: Path) -> None:
    """Devices may still be held: each wait is twice the one before."""
    _, result = await run("step(count + 1)\nos._exit(7)", ranks=1, restart_delay=0.6)
    assert result is not None
    ends = [attempt.ended for attempt in result.attempts]
    begins = [attempt.started for attempt in result.attempts]
    waits = [begin - end for begin, end in zip(begins[1:], ends, strict=False)]
    assert [wait >= least for wait, least in zip(waits, (0.6, 1.2, 2.4), strict=True)] == [True] * 3


async def test_a_port_that_was_given_stays(job_folder: Path) -> None:
    """The user knows why."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    await run("step(count + 1)\nos._exit(7)", ranks=1, max_restarts=1, master_port=port)
    assert {start[3] for start in starts()} == {str(port)}


async def test_a_stall_is_restarted_if_asked_for(job_folder: Path) -> None:
    """on_stall=restart: the second attempt goes through."""
    words = "step(1 + count)\nif count == 0: time.sleep(600)"
    _, result = await run(words, stall_timeout=0.5, on_stall="restart")
    assert result is not None
    assert [attempt.exit_code for attempt in result.attempts] == [124, 0]


async def test_the_time_limit_counts_over_all_attempts(job_folder: Path) -> None:
    """The second attempt has what the first one has left."""
    words = "step(count + 1)\nif count == 0: os._exit(7)\ntime.sleep(600)"
    manager, result = await run(words, ranks=1, timeout=2.5)
    assert isinstance(manager.error, JobTimeoutError)
    assert result is not None
    assert [attempt.exit_code for attempt in result.attempts] == [7, 124]
    assert result.ended - result.started < 2.5 + 1.0 + 5.0


async def test_no_restart_that_the_time_limit_would_end(job_folder: Path) -> None:
    """A wait longer than the time that is left is not begun."""
    _, result = await run("step(1)\nos._exit(7)", ranks=1, timeout=30, restart_delay=60)
    assert result is not None
    assert result.exit_code == 7
    assert attempts() == [0]


@pytest.mark.parametrize("how", ["stop", "cancel", "leave"])
async def test_a_stop_during_the_wait_ends_at_once(job_folder: Path, how: str) -> None:
    """No attempt begins after a stop, and the wait does not go on."""
    command = [sys.executable, "-c", START + "step(1)\nos._exit(7)"]
    began = time.monotonic()

    async def job() -> None:
        async with FMKManager(command, nproc_per_node=1, max_restarts=3, restart_delay=300) as manager:
            async for event in manager.events():
                if event.kind == "restarting":
                    break
            if how == "stop":
                await manager.stop()
            elif how == "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(600)

    if how == "cancel":
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(job())
    else:
        await job()
    assert time.monotonic() - began < 30
    assert attempts() == [0]


async def test_no_start_after_a_stop(job_folder: Path) -> None:
    """Workers that take their time to end, and end badly, are not started anew."""
    words = "def slow(*_): time.sleep(1); os._exit(9)\nsignal.signal(signal.SIGTERM, slow)\ntime.sleep(600)"
    command = [sys.executable, "-c", START + words]
    async with FMKManager(command, nproc_per_node=2, max_restarts=3, restart_delay=0.05) as manager:
        await asyncio.to_thread(wait_until, lambda: Path("starts").exists() and len(starts()) == 2)
        await manager.stop()
    assert attempts() == [0]


@pytest.fixture
def launcher(job_folder: Path) -> subprocess.Popen[str]:
    """The command, with a job whose first attempt fails and whose second one goes on for ever."""
    words = "step(count + 1)\nif count == 0: os._exit(7)\ntime.sleep(600)"
    options = ["--nproc-per-node", "2", "--max-restarts", "3", "--grace-period", "1"]
    delay = os.environ.get("DELAY", "0.1")
    command = [sys.executable, "-m", "davincirunsdk", *options, "--restart-delay", delay]
    return subprocess.Popen(
        [*command, sys.executable, "-c", START + words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigkill_of_the_launcher_in_the_second_attempt(launcher: subprocess.Popen[str]) -> None:
    """The guardian of the job ends the second attempt's workers as it would the first one's."""
    wait_until(lambda: Path("starts").exists() and [start[0] for start in starts()].count("1") == 2)
    pids = [int(start[2]) for start in starts() if start[0] == "1"]
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not any(map(is_alive, pids)), timeout=10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_launcher_ends_during_the_wait(
    number: signal.Signals, job_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nothing is left, nothing starts any more, and the exit code is the signal's."""
    monkeypatch.setenv("DELAY", "200")
    launcher = request.getfixturevalue("launcher")
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if "restart 1 of at most 3 in 200 s" in line:
            break
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(number)
    launcher.communicate(timeout=20)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not any(is_alive(child.pid) for child in children), timeout=10)
    assert attempts() == [0]
