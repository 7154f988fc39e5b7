"""One protocol, two managers: the same scenarios on one node and on several give the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from processes import is_alive

from davincirunsdk import DistributedRuntimeError, Event, FMKManager, JobState, WorkerSpawnError
from davincirunsdk.engines.agent import NodeAgent
from davincirunsdk.engines.driver import NodesManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.node import NodeHandle
    from davincirunsdk.job import JobBody

pytestmark = pytest.mark.usefixtures("job_folder")

SLEEP = ["sh", "-c", "echo up; exec sleep 600"]


class Here:
    """A placement whose nodes are agents in this process."""

    renewal_timeout = 0.0

    broken = False

    def __init__(self) -> None:
        self.agents = (NodeAgent(), NodeAgent())

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        raise AssertionError("there are no other nodes")

    async def open(self, table: GivenTable | None) -> Sequence[NodeHandle]:
        return self.agents

    async def until_lost(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        if self.broken:
            raise AssertionError("it does not close")


def one_node(command: list[str], on_event: Callable[[Event], object] | None = None) -> JobBody:
    """Two workers on this node."""
    return FMKManager(command, nproc_per_node=2, grace_period=3, on_event=on_event)


def two_nodes(command: list[str], on_event: Callable[[Event], object] | None = None) -> JobBody:
    """A worker on each of two nodes."""
    return NodesManager(Here(), command, nproc_per_node=1, grace_period=3, on_event=on_event)


@pytest.fixture(params=[one_node, two_nodes])
def make(request: pytest.FixtureRequest) -> Callable[..., JobBody]:
    """Make a job of one of both kinds."""
    maker: Callable[..., JobBody] = request.param
    return maker


def assert_gone(job: JobBody) -> None:
    """No worker lives, and each has its last state."""
    assert len(job.workers) == 2
    assert not [worker for worker in job.workers if is_alive(worker.pid or 0)]


async def test_success(make: Callable[..., JobBody]) -> None:
    """Lines, events, result; the events end with the job, and come again to who asks later."""
    seen: list[str] = []
    job = make(["sh", "-c", "echo hello $RANK"], lambda event: seen.append(event.kind))
    assert job.state is JobState.PENDING
    async with job:
        lines = sorted([line.text async for line in job.logs()])
        result = await job.wait()
        assert (await job.wait()) == result
    assert lines == ["hello 0", "hello 1"]
    assert (result.state, result.exit_code, job.state) == (JobState.SUCCEEDED, 0, JobState.SUCCEEDED)
    kinds = [event.kind async for event in job.events()]
    assert kinds == seen
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert kinds.count("finished") == 1
    assert job.error is None
    assert_gone(job)


async def test_failure(make: Callable[..., JobBody]) -> None:
    """The sibling is stopped, the error names the rank, and comes out bare; the last event has its code."""
    job = make(["sh", "-c", "[ $RANK = 1 ] && { sleep 0.3; exit 7; }; exec sleep 600"])
    with pytest.raises(DistributedRuntimeError) as caught:
        async with job:
            await job.wait()
    assert (caught.value.root_cause.rank, caught.value.exit_code) == (1, 7)
    assert job.error is caught.value
    assert job.state is JobState.FAILED
    last = [event async for event in job.events()][-1]
    assert (last.kind, last.exit_code) == ("finished", 7)
    assert_gone(job)


@pytest.mark.parametrize("now", [False, True])
async def test_stop(now: bool, make: Callable[..., JobBody]) -> None:
    """From inside, awaited or not; who waits gets the result."""
    async with make(SLEEP) as job:
        waiting = asyncio.create_task(job.wait())
        await job.stop(now=now)
        assert (await waiting).state is JobState.STOPPED
        assert_gone(job)


async def test_cancel(make: Callable[..., JobBody]) -> None:
    """Cancelling a wait stops nothing; cancelling the holder stops all, then it goes on."""
    inside = asyncio.Event()
    job = make(SLEEP)

    async def hold() -> None:
        async with job:
            inside.set()
            await job.wait()

    holder = asyncio.create_task(hold())
    await inside.wait()
    waiting = asyncio.create_task(job.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert job.state is JobState.RUNNING
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    assert job.workers[0].state == "STOPPED"
    assert_gone(job)


async def test_an_error_in_the_body(make: Callable[..., JobBody]) -> None:
    """It comes out as it is, when nothing of the job is left."""
    job = make(SLEEP)
    with pytest.raises(KeyError, match="mine"):
        async with job:
            raise KeyError("mine")
    assert job.state is JobState.STOPPED
    assert_gone(job)


async def test_a_command_that_cannot_be_started(make: Callable[..., JobBody]) -> None:
    """The start raises; the job counts as failed, and its streams end."""
    job = make(["no-such-command"])
    with pytest.raises(WorkerSpawnError):
        async with job:
            raise AssertionError("it was started")
    assert [line async for line in job.logs()] == []


async def test_an_error_while_closing(make: Callable[..., JobBody], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told and raised, streams and events come to their ends, and nothing is left."""
    monkeypatch.setattr(Here, "broken", True)
    monkeypatch.setattr("davincirunsdk.supervision.attempt.Attempt._drain", _broken)
    job = make(SLEEP)
    async with job:
        job.stop()
        with pytest.raises(AssertionError, match="does not close"):
            await asyncio.wait_for(job.wait(), 20)
    kinds = [event.kind async for event in job.events()]
    assert "internal_error" in kinds
    assert kinds[-1] == "finished"
    assert_gone(job)


async def _broken(_: object) -> None:
    raise AssertionError("it does not close")


async def test_a_reader_that_leaves_early(make: Callable[..., JobBody]) -> None:
    """Its stream is forgotten; the others and the job go on."""
    job = make(["sh", "-c", "echo one; echo two; sleep 0.3; echo three"])
    async with job:
        async with job.logs() as lines:
            async for line in lines:
                assert line.text == "one"
                break
        rest = [line.text async for line in job.logs([0])]
        result = await job.wait()
    assert rest[-1] == "three"
    assert result.state is JobState.SUCCEEDED
