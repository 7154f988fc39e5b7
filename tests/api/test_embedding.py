"""Jobs inside other programs, odd ones too: both stay right, the program's own affairs are not touched."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
import uvloop
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from processes import wait_until
from recorded import PY, WORKERS, Recorded

from davincirunsdk import (
    DavinciRunError,
    DistributedRuntimeError,
    FMKManager,
    JobState,
    WorkerSpawnError,
    start_and_wait_distributed_train,
    start_distributed_train,
    wait_distributed_train,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import FrameType

pytestmark = pytest.mark.usefixtures("job_folder")

PYTHON = [PY, "-S", "-E", "-c"]
GOOD = [*PYTHON, ""]
BAD = [*PYTHON, "raise SystemExit(7)"]
SLEEPER = [*PYTHON, "print('ready', flush=True); import time; time.sleep(600)"]

HABITS = [
    "ignores SIGCHLD",
    "reaps in a handler",
    "reaps in a thread",
    "runs processes of its own",
    "blocks signals",
    "ignores signals",
    "ignores signals in C",
    "has descriptors",
    "forks with locks held",
]
LIBRARY_SIGNALS = 1 << 31 | 1 << 32
"""Signals 32 and 33 are the C library's own; its posix_spawn(), which started the program, ignores them."""
TAKES_EXIT_STATUS = {"ignores SIGCHLD", "reaps in a handler", "reaps in a thread"}


@pytest.mark.parametrize("habit", HABITS)
def test_odd_programs(habit: str, tmp_path: Path) -> None:
    """Ends are told right, or as unknown where the program took the exit status; workers
    start with default signals and three descriptors; nothing of the program's own is changed."""
    done = subprocess.run(
        [PY, str(WORKERS / "odd_host.py"), habit, str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    may_be_unknown = [None] if habit in TAKES_EXIT_STATUS else []
    for name in ("good", "open"):
        assert told[name]["state"] == "SUCCEEDED" or (may_be_unknown and None in told[name]["codes"])
    for log in told["good"]["logs"]:
        masks = {line[:6]: int(line[7:], 16) & ~LIBRARY_SIGNALS for line in log.splitlines()}
        assert masks == {"SigBlk": 0, "SigIgn": 0} or told["good"]["state"] == "FAILED"
    for log in told["open"]["logs"]:
        assert log == "0\n1\n2\n" or told["open"]["state"] == "FAILED"
    for name, code in (("bad", 7), ("late", 9), ("signal", -signal.SIGSEGV)):
        # An end that nobody could learn is not a failure by itself.
        unknown = bool(may_be_unknown) and None in told[name]["codes"]
        assert told[name]["state"] == "FAILED" or unknown
        assert told[name]["failure"] == code or unknown
    assert told["stopped"]["state"] == "STOPPED"
    for code in told["stopped"]["codes"]:
        assert code in [-signal.SIGTERM, *may_be_unknown]
    assert told["changed"] == []
    assert told["wrong"] == []


class Handlers:
    """A program's own signal handlers, of several makes."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def note(self, number: int, frame: object) -> None:
        self.got.append(number)

    def interrupt(self, number: int, frame: object) -> None:
        self.got.append(number)
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def installed(self) -> Iterator[dict[int, object]]:
        mine: dict[int, Callable[[int, FrameType | None], object] | signal.Handlers] = {
            signal.SIGINT: self.interrupt,
            signal.SIGTERM: self.note,
            signal.SIGHUP: signal.SIG_IGN,
            signal.SIGCHLD: self.note,
        }
        before = {number: signal.signal(number, handler) for number, handler in mine.items()}
        try:
            yield {number: signal.getsignal(number) for number in mine}
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def wakeup_descriptor() -> int:
    """Read it by setting it."""
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def test_handlers_of_the_program_are_the_same_objects_after_a_blocking_call() -> None:
    """After success, failure and Ctrl-C the handlers are the program's own objects and work."""
    handlers = Handlers()
    with handlers.installed() as mine:
        wakeup = wakeup_descriptor()
        assert start_and_wait_distributed_train(GOOD, nproc_per_node=2) == 0
        assert start_and_wait_distributed_train(BAD, nproc_per_node=1, raise_exception=False) == 1
        manager = start_distributed_train(SLEEPER, nproc_per_node=1, grace_period=5)
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            wait_distributed_train(manager)
        assert manager._is_over
        for number, handler in mine.items():
            assert signal.getsignal(number) is handler
        assert wakeup_descriptor() == wakeup
        handlers.got.clear()
        signal.raise_signal(signal.SIGTERM)
        assert handlers.got == [signal.SIGTERM]


async def test_handlers_of_the_loop_work_on() -> None:
    """A loop's own signal handler and wake-up descriptor are as before, while a job runs and after it."""
    loop = asyncio.get_running_loop()
    got = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, got.set)
    try:
        handler, wakeup = signal.getsignal(signal.SIGTERM), wakeup_descriptor()
        async with FMKManager(SLEEPER, nproc_per_node=2):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(got.wait(), 5)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert wakeup_descriptor() == wakeup
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def one_of_each(command: Callable[[list[str]], FMKManager]) -> None:
    """Success, failure, stop, streams and cancellation in the running loop."""
    async with command(GOOD) as manager:
        assert (await manager.wait()).state is JobState.SUCCEEDED
    with pytest.raises(DistributedRuntimeError) as caught:
        async with command(BAD) as manager:
            await manager.wait()
    assert caught.value.exit_code == 7
    async with command(SLEEPER) as manager:
        ranks = set()
        async for line in manager.logs():
            assert line.text == "ready"
            ranks.add(line.rank)
            if len(ranks) == 2:
                break
        await manager.stop()
    assert [worker.exit_code for worker in manager.workers] == [-signal.SIGTERM] * 2

    async def hold() -> None:
        async with command(SLEEPER) as manager:
            await manager.wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(WorkerSpawnError):
        async with command(["no-such-command-anywhere"]):
            pass


def pair(command: list[str]) -> FMKManager:
    """Make a job of two workers."""
    return FMKManager(command, nproc_per_node=2, grace_period=5)


def run_in(loop: asyncio.AbstractEventLoop, main: Awaitable[None]) -> None:
    """Run in a loop and close it."""
    try:
        loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# libuv keeps a pipe for signals from its first loop on.
uvloop.new_event_loop().close()


def test_under_uvloop() -> None:
    """All main paths work in uvloop's event loop."""
    run_in(uvloop.new_event_loop(), one_of_each(pair))


def test_loops_in_threads() -> None:
    """Five loops in five threads and one in the main thread run jobs at the same time."""
    with ThreadPoolExecutor(5) as pool:
        runs = [pool.submit(run_in, asyncio.new_event_loop(), one_of_each(pair)) for _ in range(5)]
        run_in(asyncio.new_event_loop(), one_of_each(pair))
        for done in runs:
            done.result()


async def test_the_blocking_api_in_threads(recwarn: pytest.WarningsRecorder) -> None:
    """From a thread, a pool and asyncio.to_thread, at the same time, with the right results."""
    ends: list[int] = []
    thread = threading.Thread(
        target=lambda: ends.append(start_and_wait_distributed_train(GOOD, nproc_per_node=2))
    )
    thread.start()
    with ThreadPoolExecutor(1) as pool:
        bad = pool.submit(start_and_wait_distributed_train, BAD, nproc_per_node=2)
        ends.append(await asyncio.to_thread(start_and_wait_distributed_train, GOOD, nproc_per_node=2))
        failure = await asyncio.to_thread(bad.exception)
    await asyncio.to_thread(thread.join)
    assert ends == [0, 0]
    assert isinstance(failure, DistributedRuntimeError)
    assert not recwarn.list


def test_the_thread_that_started_a_job_may_end() -> None:
    """Workers belong to the process: the end of the thread or pool that started them is nothing to them."""
    late = [*PYTHON, "import time; time.sleep(1)"]
    managers: list[FMKManager] = []
    thread = threading.Thread(target=lambda: managers.append(start_distributed_train(late, nproc_per_node=2)))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        managers.append(pool.submit(start_distributed_train, late, nproc_per_node=2).result())
    assert [wait_distributed_train(manager) for manager in managers] == [0, 0]


@pytest.mark.parametrize("recorded", [("deaf", "floods", *["obedient"] * 13, "fails")], indirect=True)
async def test_the_loop_is_never_held_up(recorded: Recorded) -> None:
    """Sixteen workers start, flood their output, fail and are stopped; a heartbeat goes on all the time."""
    gaps = []

    async def train() -> FMKManager:
        async with FMKManager(recorded.command, nproc_per_node=recorded.count, grace_period=1) as manager:
            await recorded.until_ready()
            recorded.let_fail()
            with pytest.raises(DistributedRuntimeError):
                await manager.wait()
        return manager

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    heart = asyncio.create_task(beat())
    manager = await train()
    heart.cancel()
    assert max(gaps) < 0.5
    assert manager.workers[1].log_bytes > 1_000_000


@pytest.mark.parametrize("recorded", [("once-pipe", "once-pipe")], indirect=True)
async def test_a_helper_that_holds_the_pipe_holds_nothing_up(recorded: Recorded) -> None:
    """Workers that ended well are a success at once, their output is complete, their helpers are ended."""
    async with FMKManager(recorded.command, nproc_per_node=2, grace_period=0.5) as manager:
        await recorded.until_ready()
        began = time.monotonic()
        result = await manager.wait()
    assert time.monotonic() - began < 3.0
    assert result.state is JobState.SUCCEEDED
    assert {leftover.pid for leftover in result.leftovers} == set(recorded.pids("once-pipe"))
    assert not recorded.alive()
    assert [worker.log_path.read_text() for worker in result.workers] == ["last words\n"] * 2


def job_threads() -> list[str]:
    """Name the threads that jobs use; the background loop's stay as long as the process."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("davincirun-")]
    return [name for name in names if name not in ("davincirun-loop", "davincirun-exit")]


async def stock() -> dict[str, int]:
    """Count what jobs could leave in this process."""
    gc.collect()
    me = psutil.Process()
    deadline = time.monotonic() + 5
    # Threads that have delivered their result need a moment to end.
    while (threads := job_threads()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return {
        "descriptors": me.num_fds(),
        "threads": len(threads),
        "tasks": len(asyncio.all_tasks()),
        "children": len(me.children()),
    }


async def many_jobs() -> None:
    """Run jobs that end well, fail, or cannot be started, and compare before and after."""

    async def end_of(command: list[str]) -> str:
        try:
            async with FMKManager(command, nproc_per_node=1) as manager:
                return str((await manager.wait()).state)
        except DavinciRunError as error:
            return type(error).__name__

    await end_of(GOOD)
    await end_of(BAD)
    before = await stock()
    memory = psutil.Process().memory_info().rss
    ends = [await end_of(["no-such-command-anywhere"]) for _ in range(100)]
    ends += [await end_of(command) for _ in range(10) for command in (GOOD, GOOD, BAD)]
    after = await stock()
    assert {end: ends.count(end) for end in ends} == {
        "CommandNotFoundError": 100,
        "SUCCEEDED": 20,
        "DistributedRuntimeError": 10,
    }
    assert after == before
    assert psutil.Process().memory_info().rss - memory < 20_000_000


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_many_jobs_leave_nothing_in_the_program(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Descriptors, threads, tasks, children and memory are as at the start."""
    run_in(new_loop(), many_jobs())


def test_no_warning_in_development_mode(tmp_path: Path) -> None:
    """With every warning an error and asyncio in debug mode, all ways to end a job say nothing."""
    code = """
import asyncio, sys
sys.path[:0] = sys.argv[1:]
from test_embedding import one_of_each, pair
asyncio.run(one_of_each(pair))
"""
    done = subprocess.run(
        [PY, "-X", "dev", "-W", "error", "-c", code, str(WORKERS.parent), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("recorded", [("deaf", "setsid", "talks")], indirect=True)
def test_a_web_service(loop: str, recorded: Recorded, tmp_path: Path) -> None:
    """Under uvicorn jobs are started, watched, streamed and stopped by HTTP; the service's end ends them."""
    said = tmp_path / "said.txt"
    with said.open("wb") as output:
        service = subprocess.Popen([PY, str(WORKERS / "service.py"), "0", loop], stdout=output, stderr=output)
    try:
        wait_until(lambda: "running on" in said.read_text() or service.poll() is not None)
        found = re.search(r"http://127\.0\.0\.1:\d+", said.read_text())
        assert found is not None, said.read_text()
        order = {"command": recorded.command, "workers": recorded.count, "grace": 0.5}
        with httpx.Client(base_url=found[0], timeout=20, trust_env=False) as client:
            assert client.post("/jobs", json={**order, "command": ["nowhere-to-be-found"]}).status_code == 422
            assert client.post("/jobs", json=order).json() == {"job": 0}
            wait_until(recorded.ready)
            assert client.get("/jobs/0").json()["state"] == "RUNNING"
            with client.stream("GET", "/jobs/0/log") as response:
                lines = response.iter_lines()
                assert [next(lines) for _ in range(3)] == [f"[rank 2] line {n}" for n in range(3)]
            assert client.delete("/jobs/0").status_code == 204
            assert not recorded.alive()
            assert client.get("/jobs/0").json()["state"] == "STOPPED"
            for _ in range(2):
                assert client.post("/jobs", json=order).status_code == 201
            wait_until(lambda: len(recorded.alive()) == 6)
            with client.stream("GET", "/jobs/1/log") as response:
                assert next(response.iter_lines()) == "[rank 2] line 0"
                service.send_signal(signal.SIGTERM)
                assert service.wait(10) in (0, -signal.SIGTERM)
        assert not recorded.alive()
        assert "Traceback" not in said.read_text()
    finally:
        service.kill()
        service.wait()


async def test_a_scheduler_starts_jobs(tmp_path: Path) -> None:
    """APScheduler's asyncio scheduler runs jobs again and again; its shutdown ends the one that runs."""
    ends: list[object] = []
    sleeping = asyncio.Event()

    async def train(command: list[str]) -> None:
        try:
            async with FMKManager(command, nproc_per_node=1, grace_period=5) as manager:
                if command is SLEEPER:
                    sleeping.set()
                ends.append((await manager.wait()).state)
        except DistributedRuntimeError as error:
            ends.append(error.exit_code)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    scheduler = AsyncIOScheduler(timezone="UTC")
    scheduler.add_job(train, "interval", [GOOD], seconds=0.3)
    scheduler.add_job(train, args=[BAD])
    scheduler.add_job(train, args=[SLEEPER])
    scheduler.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: scheduler.running and scheduler.shutdown(wait=False))
        while ends.count(JobState.SUCCEEDED) < 2 or 7 not in ends or not sleeping.is_set():
            await asyncio.sleep(0.05)
    while "cancelled" not in ends:
        await asyncio.sleep(0.05)
