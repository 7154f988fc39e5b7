"""What a manager's calls are: one kind of thing in a loop, another without one, an error before the start."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import anyio
import pytest
from processes import is_alive

from davincirunsdk import DistributedRuntimeError, Event, FMKManager, JobState, RunResult, WorkerState
from davincirunsdk import start_distributed_train as start

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("job_folder")

SLEEP = ["sleep", "600"]


def job(*command: str, workers: int = 2) -> FMKManager:
    """Describe a job."""
    return FMKManager(command or SLEEP, nproc_per_node=workers, grace_period=5)


async def test_stop_can_be_a_task() -> None:
    """`create_task`, a task group, `gather`, `wait_for`, and plain `await` all take it."""
    async with job() as manager:
        task = asyncio.create_task(manager.stop())
        await asyncio.gather(manager.stop(), manager.destroy())
        await asyncio.wait_for(manager.stop(now=True), 20)
        await task
        await manager.stop()
        assert manager.state is JobState.STOPPED


async def test_a_task_group_takes_the_calls() -> None:
    """Structured code starts them as it starts its own."""
    async with job() as manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.wait)
        tasks.start_soon(manager.stop)
    assert manager.state is JobState.STOPPED


async def test_a_stop_begins_with_the_call_and_need_not_be_awaited() -> None:
    """No warning for what is dropped, and the workers end."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with job() as manager:
            manager.stop()
            manager.wait()
            gc.collect()
            result = await manager.wait()
    assert result.state is JobState.STOPPED


@pytest.mark.parametrize("call", ["wait", "stop", "destroy", "stacks"])
async def test_calls_before_the_start_name_what_to_write(call: str) -> None:
    """Never a silent nothing: the error comes with the call, not when it is awaited."""
    with pytest.raises(RuntimeError, match=rf"^{call}\(\) on .* never started"):
        getattr(job(), call)()


async def test_a_manager_is_not_awaited() -> None:
    """`await aio.start_distributed_train(...)` says what to write."""
    with pytest.raises(TypeError, match="async with"):
        await job()


@pytest.mark.parametrize("code", [0, 3])
def test_without_a_loop_the_calls_block(code: int) -> None:
    """`wait` returns the result or raises, `stop` returns when nothing is left; again and again."""
    manager = start(["sh", "-c", f"exit {code}"], nproc_per_node=2, echo="none")
    for _ in range(2):
        if code:
            with pytest.raises(DistributedRuntimeError):
                manager.wait()
        else:
            result: object = manager.wait()
            assert isinstance(result, RunResult)
    assert manager.stop() is None
    manager = start(SLEEP, nproc_per_node=2, echo="none")
    workers = manager.workers
    assert manager.destroy() is None
    assert not [worker for worker in workers if is_alive(worker.pid or 0)]
    stopped: object = manager.wait()
    assert isinstance(stopped, RunResult)
    assert stopped.state is JobState.STOPPED


async def test_another_thread_and_another_loop() -> None:
    """From a thread without a loop the calls block; in another loop they are awaited."""
    async with job() as manager:
        seen: list[object] = []

        def other() -> None:
            async def wait() -> None:
                seen.append(await manager.wait())

            manager.stop()
            asyncio.run(wait())

        thread = threading.Thread(target=other)
        thread.start()
        await manager.wait()
        while thread.is_alive():
            await asyncio.sleep(0.01)
    assert isinstance(seen[0], RunResult)


def test_a_loop_that_does_not_run_is_said_not_to_run() -> None:
    """Nothing can happen in it, and a wait would never end."""
    loop = asyncio.new_event_loop()
    manager = job("true")
    loop.run_until_complete(manager.__aenter__())
    try:
        with pytest.raises(RuntimeError, match="does not run"):
            manager.wait()
    finally:
        loop.run_until_complete(manager.__aexit__(None, None, None))
        loop.close()


async def test_a_cancellation_says_who_still_ran() -> None:
    """In a note on it, which a `TimeoutError` of `asyncio.timeout` shows as its cause, and in the events."""
    notes: list[str] = []
    started = asyncio.Event()
    manager = FMKManager(["sh", "-c", "[ $RANK = 0 ] || exec sleep 600"], nproc_per_node=3, grace_period=5)

    async def hold() -> None:
        try:
            async with manager:
                started.set()
                await asyncio.sleep(600)
        except asyncio.CancelledError as error:
            notes.extend(getattr(error, "__notes__", []))
            raise

    task = asyncio.create_task(hold())
    events = manager.events()
    async for event in events:
        if event.kind == "exited":
            break
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stopping = next(event for event in [event async for event in events] if event.kind == "stopping")
    assert "2 of 3 workers still ran: rank 1, rank 2" in stopping.detail
    if sys.version_info >= (3, 11):
        assert "2 of 3 workers still ran: rank 1, rank 2" in notes[0]
    states = [worker.state for worker in manager.workers]
    assert states == [WorkerState.SUCCEEDED, WorkerState.STOPPED, WorkerState.STOPPED]


async def test_events_can_be_called_back() -> None:
    """`on_event` gets each event once, in the loop's thread; what it raises harms nobody."""
    seen: list[tuple[str, int]] = []

    def on_event(event: Event) -> None:
        seen.append((event.kind, threading.get_ident()))
        raise ValueError("mine")

    async with FMKManager(["true"], nproc_per_node=2, on_event=on_event) as manager:
        await manager.wait()
    kinds = [kind for kind, _ in seen]
    assert kinds == [event.kind async for event in manager.events()]
    assert kinds[-1] == "finished"
    assert {thread for _, thread in seen} == {threading.get_ident()}


def test_a_coroutine_function_is_no_callback() -> None:
    """It would never run."""

    async def on_event(event: Event) -> None: ...

    with pytest.raises(TypeError, match="on_event"):
        FMKManager(["true"], on_event=on_event)


async def test_reprs_say_what_a_person_needs(job_folder: Path) -> None:
    """State, name and command; no variable's value."""
    manager = FMKManager(["sh", "-c", "exit 0"], nproc_per_node=2, env={"TOKEN": "secret"}, name="mine")
    assert repr(manager) == "<FMKManager (not started): 'sh -c exit 0', PENDING>"
    async with manager:
        result = await manager.wait()
    assert repr(manager) == "<FMKManager mine: 'sh -c exit 0', SUCCEEDED, 2 workers>"
    assert repr(result).startswith("<RunResult mine: SUCCEEDED, exit code 0, 2 workers, ")
    assert str(job_folder) in repr(result)
    assert "secret" not in repr(manager) + repr(result)


@pytest.mark.parametrize(("workers", "said"), [(1, "1 worker,"), (2, "2 workers,")])
async def test_one_worker_is_not_several(workers: int, said: str) -> None:
    """What a person sees of a result is English."""
    async with job("true", workers=workers) as manager:
        assert said[:-1] + ">" in repr(manager)
        assert said in repr(await manager.wait())
