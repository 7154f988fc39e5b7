"""Every way out of a job against every kind of worker: nothing of it lives on.

One job holds one worker of each kind of `workers/kinds.py`, so that a way is one test; what an
assertion shows is kind and pid of what is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import anyio
import psutil
import pytest
from processes import wait_until
from recorded import LIGHT_KINDS, PY, WORKERS, Recorded, in_time

from davincirunsdk import (
    DistributedRuntimeError,
    FMKManager,
    JobState,
    aio,
    start_distributed_train,
    wait_distributed_train,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

pytestmark = pytest.mark.usefixtures("job_folder")

GRACE = 0.3
LIMIT = GRACE + 2.0
"""Seconds after which nothing may be alive."""
LIMIT_AFTER_DEATH = GRACE + 3.0
"""The same when the supervisor itself was killed."""
NOISE = ("Event loop is closed", "never retrieved", "was never awaited", "Exception ignored", "was destroyed")

needs_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio has it since Python 3.11")


def job(recorded: Recorded, grace_period: float = GRACE) -> FMKManager:
    """Make a job of one worker per kind."""
    return FMKManager(recorded.command, nproc_per_node=recorded.count, grace_period=grace_period)


# Ways out of a program's own event loop. Each notes when the end begins: `recorded.ends_now()`.


async def run(recorded: Recorded, then: Callable[[], object] = object) -> None:
    """Run the job, call `then` when it is complete, and wait for its end."""
    async with job(recorded) as manager:
        await recorded.until_ready()
        recorded.ends_now()
        then()
        await manager.wait()


async def sibling_failure(recorded: Recorded) -> None:
    with pytest.raises(DistributedRuntimeError) as caught:
        await run(recorded, recorded.let_fail)
    assert (caught.value.root_cause.rank, caught.value.exit_code) == (recorded.kinds.index("fails"), 3)
    assert len(caught.value.failures) == 1


async def stop(recorded: Recorded) -> None:
    async with job(recorded) as manager:
        await recorded.until_ready()
        recorded.ends_now()
        await manager.stop()
        assert not recorded.alive()
        assert manager.state is JobState.STOPPED


async def stop_now(recorded: Recorded) -> None:
    async with job(recorded, grace_period=600) as manager:
        await recorded.until_ready()
        recorded.ends_now()
        await manager.stop(now=True)


async def leaving_the_block(recorded: Recorded) -> None:
    async with job(recorded):
        await recorded.until_ready()
        recorded.ends_now()


async def error_in_the_body(recorded: Recorded) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run(recorded, fail)


async def task_cancelled(recorded: Recorded) -> None:
    task = asyncio.create_task(run(recorded))
    await recorded.until_ready()
    recorded.ends_now()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_again_and_again(recorded: Recorded) -> None:
    task = asyncio.create_task(run(recorded))
    await recorded.until_ready()
    recorded.ends_now()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await task


async def asyncio_timeout(recorded: Recorded) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:  # type: ignore[attr-defined] # since Python 3.11
            await run(recorded, lambda: limit.reschedule(loop.time() + 0.05))


async def task_group_sibling(recorded: Recorded) -> None:
    async def fail() -> None:
        await recorded.until_ready()
        recorded.ends_now()
        raise KeyError("sibling")

    async def group_of_both() -> None:
        async with asyncio.TaskGroup() as group:  # type: ignore[attr-defined] # since Python 3.11
            group.create_task(run(recorded))
            group.create_task(fail())

    with pytest.raises(Exception, match="errors in a TaskGroup") as caught:
        await group_of_both()
    assert [type(error) for error in getattr(caught.value, "exceptions", ())] == [KeyError]


async def wait_for(recorded: Recorded) -> None:
    task = asyncio.create_task(run(recorded))
    await recorded.until_ready()
    recorded.ends_now()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(task, 0.05)


async def move_on_after(recorded: Recorded) -> None:
    with anyio.move_on_after(60) as scope:
        await run(recorded, lambda: setattr(scope, "deadline", anyio.current_time() + 0.05))
    assert scope.cancelled_caught


async def anyio_task_group(recorded: Recorded) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(run, recorded)
        await recorded.until_ready()
        recorded.ends_now()
        group.cancel_scope.cancel()


async def destroy_when_finished(recorded: Recorded) -> None:
    async with job(recorded) as manager:
        await recorded.until_ready()
        recorded.ends_now()
        recorded.let_fail()
        assert await aio.wait_distributed_train(manager, raise_exception=False) == 1
        assert not recorded.alive()


async def blocking_destroy_when_finished(recorded: Recorded) -> None:
    def block() -> None:
        command, workers = recorded.command, recorded.count
        manager = start_distributed_train(command, nproc_per_node=workers, grace_period=GRACE)
        wait_until(recorded.ready)
        recorded.ends_now()
        recorded.let_fail()
        assert wait_distributed_train(manager, raise_exception=False) == 1

    await asyncio.to_thread(block)


async def survivors_destroyed(recorded: Recorded) -> None:
    async with job(recorded) as manager:
        await recorded.until_ready()
        recorded.let_fail()
        assert await aio.wait_distributed_train(manager, False, raise_exception=False) == 1
        assert len(recorded.alive()) >= recorded.count - 1
        recorded.ends_now()
        await manager.destroy()


@pytest.mark.parametrize(
    "way",
    [
        sibling_failure,
        stop,
        stop_now,
        leaving_the_block,
        error_in_the_body,
        task_cancelled,
        cancelled_again_and_again,
        pytest.param(asyncio_timeout, marks=needs_3_11),
        pytest.param(task_group_sibling, marks=needs_3_11),
        wait_for,
        move_on_after,
        anyio_task_group,
        destroy_when_finished,
        blocking_destroy_when_finished,
        survivors_destroyed,
    ],
)
async def test_in_a_loop(way: Callable[[Recorded], Awaitable[None]], recorded: Recorded) -> None:
    """When the call has returned nothing is alive, and it returns in time."""
    await way(recorded)
    took = time.monotonic() - recorded.end_began
    assert not recorded.alive()
    assert took < in_time(LIMIT)


class Program:
    """A supervisor in a process of its own."""

    started: ClassVar[list[Program]] = []

    def __init__(self, words: list[str], folder: Path) -> None:
        self.started.append(self)
        self._errors = folder / "errors.txt"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
            )

    @property
    def errors(self) -> str:
        """What it has said so far."""
        return self._errors.read_text(errors="replace")

    def until_ready(self, recorded: Recorded) -> None:
        """Wait until the job is complete."""
        wait_until(lambda: recorded.ready() or self.process.poll() is not None, what="the job is complete")
        assert self.process.poll() is None, self.errors


@pytest.fixture(autouse=True)
def programs_ended() -> Iterator[None]:
    """A failed test leaves no supervisor behind."""
    yield
    while Program.started:
        process = Program.started.pop().process
        process.kill()
        process.wait()


def guardian_of(pid: int) -> int | None:
    """Find the living guardian of a supervisor."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "job-guardian":
                return child.pid
    return None


def command_line(recorded: Recorded, grace_period: float = GRACE) -> Program:
    """Start the command with one worker per kind."""
    options = ["--nproc-per-node", str(recorded.count), "--grace-period", str(grace_period)]
    return Program([PY, "-m", "davincirunsdk", *options, *recorded.command], recorded.folder.parent)


def host(way: str, recorded: Recorded) -> Program:
    """Start a program with a job in it."""
    folder = recorded.folder.parent
    words = [way, str(folder), str(GRACE), str(recorded.count)]
    return Program([PY, str(WORKERS / "host.py"), *words, *recorded.command], folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signal_to_the_command(number: signal.Signals, recorded: Recorded) -> None:
    """The command ends in time with 128+n, and nothing is alive in the moment it has ended."""
    program = command_line(recorded)
    program.until_ready(recorded)
    program.process.send_signal(number)
    assert program.process.wait(in_time(LIMIT)) == 128 + number
    assert not recorded.alive()
    assert "Traceback" not in program.errors


def test_second_interrupt_to_the_command(recorded: Recorded) -> None:
    """A second Ctrl-C kills at once whatever the grace period is."""
    program = command_line(recorded, grace_period=600)
    program.until_ready(recorded)
    program.process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in program.errors)
    said = time.monotonic()
    # Before that it could be a wrapper's copy of the first.
    wait_until(lambda: time.monotonic() - said > 1.1)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(in_time(2.0)) == 130
    assert not recorded.alive()
    assert "Traceback" not in program.errors


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("return from main", 0),
        ("return from main with the block in a task", 0),
        ("sys.exit in a task", 5),
        ("forget and raise", 1),
        ("forget in a thread and raise", 1),
    ],
)
def test_program_ends_by_itself(way: str, code: int, recorded: Recorded) -> None:
    """A program that forgets its job ends in time, without noise, and the job has ended before it."""
    program = host(way, recorded)
    program.until_ready(recorded)
    recorded.go()
    assert program.process.wait(in_time(LIMIT)) == code, program.errors
    assert not recorded.alive()
    assert not [noise for noise in NOISE if noise in program.errors], program.errors


@pytest.mark.parametrize("recorded", [LIGHT_KINDS], indirect=True, ids=[""])
@pytest.mark.parametrize("way", ["wait", "blocking wait"])
def test_interrupt_of_a_program(way: str, recorded: Recorded) -> None:
    """Ctrl-C in asyncio.run or in the blocking call ends the job, then the program by KeyboardInterrupt."""
    program = host(way, recorded)
    program.until_ready(recorded)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(in_time(LIMIT)) == -signal.SIGINT
    assert not recorded.alive()
    assert "KeyboardInterrupt" in program.errors
    assert not [noise for noise in NOISE if noise in program.errors], program.errors


@pytest.mark.parametrize("recorded", [LIGHT_KINDS], indirect=True, ids=[""])
@pytest.mark.parametrize(("way", "code"), [("os._exit", 6), ("segmentation fault", -signal.SIGSEGV)])
def test_program_dies_by_itself(way: str, code: int, recorded: Recorded) -> None:
    """The guardian ends what a supervisor leaves that had no time to do so."""
    program = host(way, recorded)
    program.until_ready(recorded)
    recorded.go()
    assert program.process.wait(in_time(LIMIT)) == code
    recorded.assert_gone_by(time.monotonic() + in_time(LIMIT_AFTER_DEATH))


@pytest.mark.parametrize("recorded", [LIGHT_KINDS], indirect=True, ids=[""])
@pytest.mark.parametrize("way", ["wait", "forget and raise", "forget in a thread and raise"])
def test_program_is_killed(way: str, recorded: Recorded) -> None:
    """SIGKILL of a supervisor ends its job within three seconds, wherever it was started from."""
    program = host(way, recorded)
    program.until_ready(recorded)
    program.process.kill()
    program.process.wait()
    recorded.assert_gone_by(time.monotonic() + in_time(LIMIT_AFTER_DEATH))


_WITH_CACHE = """
import sys
import davincirunsdk

worker = "import os, pathlib, time; cache = pathlib.Path(os.environ['MS_COMPILER_CACHE_PATH']);" \\
    "(cache / os.environ['RANK']).mkdir(); print('in', cache, flush=True); time.sleep(600)"
command = [sys.executable, "-c", worker]
if sys.argv[1] == "inside":
    with davincirunsdk.set_random_ms_cache_dir():
        davincirunsdk.start_and_wait_distributed_train(command, random_cache_dir=False, nproc_per_node=2)
else:
    davincirunsdk.start_and_wait_distributed_train(command, nproc_per_node=2)
"""


@pytest.mark.parametrize("way", ["inside", "by default"])
def test_compiler_cache_of_a_killed_program(
    way: str, job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL leaves no compiler cache behind either: it may hold gigabytes."""
    monkeypatch.setenv("TMPDIR", str(job_folder))
    program = Program([PY, "-c", _WITH_CACHE, way], job_folder)
    logs = job_folder / "log"
    wait_until(lambda: [file for file in logs.glob("*.txt") if file.read_text().endswith("\n")][1:])
    # On ModelArts, or wherever there is such a disk, it is not in the temporary folder.
    caches = list({Path(file.read_text().split()[1]) for file in logs.glob("*-proc-*.txt")})
    assert [len(list(cache.iterdir())) for cache in caches] == [2]
    program.process.kill()
    program.process.wait()
    wait_until(lambda: not caches[0].exists(), in_time(LIMIT_AFTER_DEATH))


def test_command_is_killed(recorded: Recorded) -> None:
    """SIGKILL of the command ends its job within three seconds."""
    program = command_line(recorded)
    program.until_ready(recorded)
    program.process.kill()
    program.process.wait()
    recorded.assert_gone_by(time.monotonic() + in_time(LIMIT_AFTER_DEATH))


@pytest.mark.parametrize("recorded", [("lost", "lost")], indirect=True, ids=[""])
@pytest.mark.parametrize("code", [0, 3, 130])
def test_command_finds_what_nothing_tells_from_strangers(code: int, recorded: Recorded) -> None:
    """Found by its way to us: another environment, another session, and a parent that was dead at once."""
    program = command_line(recorded)
    program.until_ready(recorded)
    if code == 130:
        program.process.send_signal(signal.SIGINT)
    else:
        (recorded.folder.parent / "fail").write_text(str(code))
    assert program.process.wait(in_time(LIMIT)) == code
    assert not recorded.alive()


@pytest.mark.parametrize("recorded", [("lost",)], indirect=True, ids=[""])
def test_command_leaves_children_alone_that_it_did_not_start(recorded: Recorded) -> None:
    """A shell that becomes the command may have started something before, which is not the job's."""
    words = shlex.join([PY, "-m", "davincirunsdk", "--nproc-per-node", "1", *recorded.command])
    folder = recorded.folder.parent
    program = Program(["sh", "-c", f"sleep 600 & echo $! > older; exec {words}"], folder)
    program.until_ready(recorded)
    (folder / "fail").write_text("0")
    assert program.process.wait(in_time(LIMIT)) == 0
    # Ends only what still runs; raises for what does not.
    os.kill(int((folder / "older").read_text()), signal.SIGKILL)
    recorded.kill_all()


def test_guardian_is_killed_then_the_program(recorded: Recorded) -> None:
    """The guardian that is started again in place of a killed one knows the job."""
    program = host("wait", recorded)
    program.until_ready(recorded)
    first = guardian_of(program.process.pid)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: guardian_of(program.process.pid) not in (None, first), what="a new guardian")
    program.process.kill()
    program.process.wait()
    recorded.assert_gone_by(time.monotonic() + in_time(LIMIT_AFTER_DEATH))


@pytest.mark.parametrize("recorded", [("once", "once-setsid")], indirect=True)
async def test_a_clean_end_lists_what_outlived_the_workers(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """Helpers that outlive workers which ended well are ended, listed in the result, and warned of."""
    async with job(recorded) as manager:
        result = await manager.wait()
    assert not recorded.alive()
    assert result.state is JobState.SUCCEEDED
    helpers = {*recorded.pids("once"), *recorded.pids("once-setsid")}
    assert {leftover.pid for leftover in result.leftovers} == helpers
    assert "2 processes outlived their workers" in caplog.text
    told = [event.pid async for event in manager.events() if event.kind == "leftover"]
    assert told == [leftover.pid for leftover in result.leftovers]


@pytest.mark.parametrize("recorded", [("once", "once-setsid", "fails")], indirect=True)
async def test_a_worker_that_ended_well_keeps_its_helpers_while_others_run(recorded: Recorded) -> None:
    """A helper may be writing a checkpoint: it is left alone until the last worker has ended."""
    async with job(recorded) as manager:
        await recorded.until_ready()
        helpers = {f"{kind} {pid}" for kind in ("once", "once-setsid") for pid in recorded.pids(kind)}
        async for event in manager.events():
            if event.kind == "exited" and sum(w.exit_code == 0 for w in manager.workers) == 2:
                break
        await asyncio.sleep(GRACE + 0.3)
        assert helpers <= set(recorded.alive())
        recorded.let_fail()
        with pytest.raises(DistributedRuntimeError):
            await manager.wait()
        assert not recorded.alive()


STRANGER = """
import signal, sys, time
got = []
for number in (1, 2, 3, 10, 12, 15, 18):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got: time.sleep(0.05)
print("got", got, flush=True)
"""


@pytest.mark.parametrize("recorded", [("obedient", "deaf", "setsid", "fails")], indirect=True)
async def test_only_processes_of_the_job_are_signalled(recorded: Recorded) -> None:
    """A stranger with the very same words and an unrelated child in the program's own group get no signal."""
    words = [PY, "-S", "-c", STRANGER, *recorded.command[3:]]
    decoys = [
        subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=own_session)
        for own_session in (True, False)
    ]
    try:
        for decoy in decoys:
            assert decoy.stdout is not None
            assert await asyncio.to_thread(decoy.stdout.readline) == b"ready\n"
        await sibling_failure(recorded)
        for _ in range(5):
            # Workers that die within milliseconds: their groups' numbers are free at once.
            async with FMKManager([PY, "-S", "-c", ""], nproc_per_node=2, grace_period=0) as manager:
                await manager.stop()
        assert not recorded.alive()
        assert [decoy.poll() for decoy in decoys] == [None, None]
    finally:
        for decoy in decoys:
            decoy.kill()
        said = [decoy.communicate()[0] for decoy in decoys]
    assert said == [b"", b""]


async def test_stopping_one_job_signals_no_other(tmp_path: Path) -> None:
    """Of three equal jobs in one program and folder one fails, one is cancelled, and the third goes on."""
    jobs = []
    for name in "abc":
        (tmp_path / name).mkdir()
        jobs.append(Recorded(tmp_path / name, ("fails", "counts", "setsid")))
    stays, fails, cancelled = jobs
    tasks = [asyncio.create_task(run(recorded)) for recorded in jobs]
    for recorded in jobs:
        await recorded.until_ready()
    fails.let_fail()
    tasks[2].cancel()
    results = await asyncio.gather(tasks[1], tasks[2], return_exceptions=True)
    assert [type(result) for result in results] == [DistributedRuntimeError, asyncio.CancelledError]
    assert not fails.alive()
    assert not cancelled.alive()
    assert len(stays.alive()) == 3
    assert stays.signals() == []
    stays.let_fail()
    with pytest.raises(DistributedRuntimeError):
        await tasks[0]
    assert not stays.alive()
    assert stays.signals() == [signal.SIGTERM]
