"""Streams share the loop with everybody else, are bounded in memory, and go with their readers."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk import FMKManager
from davincirunsdk.logs import streams
from davincirunsdk.logs.streams import BlockStream, Feed, LineStream, LogHub
from davincirunsdk.types import LogBlock

if TYPE_CHECKING:
    from collections.abc import Callable

PY = sys.executable


def block(data: bytes, rank: int = 0, moment: float = 0.0) -> LogBlock:
    """Make one."""
    return LogBlock(rank=rank, data=data, time=moment)


async def longest_hold(reading: Callable[[], Any]) -> float:
    """Read in a task and return the processor time of this thread in the longest turn of the loop."""
    longest = 0.0
    # What thousands of tests before it have left would be looked through by the collector of garbage.
    gc.collect()
    gc.freeze()
    try:
        task = asyncio.ensure_future(reading())
        before = time.thread_time()
        while not task.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        await task
    finally:
        gc.unfreeze()
    return longest


@pytest.mark.parametrize("size", [1, 7, 65536, 1 << 20], ids=lambda size: f"blocks of {size}")
@pytest.mark.parametrize("line", [b"\n", b"a\n", b"x\r", b"y" * 100 + b"\n"], ids=repr)
async def test_a_reader_that_awaits_nothing_else_lets_the_loop_run(line: bytes, size: int) -> None:
    """However large the blocks and short the lines: nobody else waits for 50 ms of our time."""
    hub = LogHub(None)
    stream = hub.subscribe(None, 1 << 30)
    data = line * ((1 << 20 if size > 7 else 1 << 14) // len(line))
    for start in range(0, len(data), size):
        hub.publish(block(data[start : start + size]))
    hub.close()
    count = 0

    async def read() -> None:
        nonlocal count
        async for _ in LineStream(stream):
            count += 1

    assert await longest_hold(read) < 0.05
    assert count == len(data) // len(line) or line == b"x\r"


async def test_a_history_of_events_does_not_hold_the_loop() -> None:
    """The same with a feed of anything."""
    feed: Feed[int] = Feed()
    for number in range(100_000):
        feed.offer(number)
    feed.close()

    async def read() -> None:
        assert [number async for number in feed] == list(range(100_000))

    assert await longest_hold(read) < 0.05


@pytest.mark.parametrize("ranks", [1, 8])
def test_bounds_count_what_a_block_really_needs(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-byte blocks, full of their own weight, stay within the bounds of history and stream."""
    monkeypatch.setattr(streams, "_HISTORY_BYTES", 1 << 16)
    hub = LogHub(None)
    stream = hub.subscribe(None, 1 << 16)
    tracemalloc.start()
    try:
        for number in range(1 << 14):
            hub.publish(block(b"x", number % ranks, number * 1e-3))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 19
    stream.close()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=3000)), max_size=60))
def test_small_blocks_held_together_change_no_byte(pieces: list[tuple[int, bytes]]) -> None:
    """What a stream gives of each rank is what was published of it, in order."""
    hub = LogHub(None)
    stream = hub.subscribe(None, 1 << 30)
    for rank, data in pieces:
        hub.publish(block(data, rank))
    late = hub.subscribe(None, 1 << 30)
    hub.close()

    async def read(blocks: BlockStream) -> dict[int, bytes]:
        found = dict.fromkeys(range(3), b"")
        async for one in blocks:
            found[one.rank] += one.data
        return found

    written = {rank: b"".join(data for of, data in pieces if of == rank) for rank in range(3)}
    assert asyncio.run(read(stream)) == asyncio.run(read(late)) == written


@pytest.mark.parametrize("way", ["dropped", "broken off", "cancelled", "block left", "closed"])
async def test_a_stream_without_its_reader_is_forgotten(way: str) -> None:
    """However a reader leaves: nothing collects for it, and output may go by unseen again."""
    hub = LogHub(None)

    async def leave() -> None:
        lines = LineStream(hub.subscribe(None, 1 << 20))
        hub.publish(block(b"one\ntwo\n"))
        if way == "block left":
            async with lines:
                await lines.__anext__()
        elif way == "broken off":
            async for _ in lines:
                break
        elif way == "cancelled":
            task = asyncio.ensure_future(_read_on(lines))
            del lines
            await asyncio.sleep(0.01)
            assert hub.watched
            task.cancel()
            await asyncio.wait({task})
        else:
            await lines.__anext__()
            if way == "closed":
                await lines.aclose()

    for _ in range(12):
        await leave()
    gc.collect()
    assert not hub.watched


async def _read_on(lines: LineStream) -> None:
    async for _ in lines:
        pass


async def test_a_reader_that_nobody_holds_gets_its_lines() -> None:
    """A task that is held by what it waits for only is not collected with its stream."""
    hub = LogHub(None)
    seen: list[str] = []

    def begin() -> None:
        lines = LineStream(hub.subscribe(None, 1 << 20))

        async def read() -> None:
            seen.extend([line.text async for line in lines])

        # The mistake that users make: nobody keeps this task.
        asyncio.ensure_future(read())  # noqa: RUF006

    begin()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    hub.publish(block(b"one\n"))
    hub.close()
    while seen != ["one"]:
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("job_folder")
async def test_streams_of_events_go_with_their_readers() -> None:
    """A service whose clients come and go holds no feed of one that has left."""
    async with FMKManager(["sleep", "600"], nproc_per_node=1) as job:
        feeds = [weakref.ref(job.events()) for _ in range(3)]
        async for _ in job.events():
            break
        left = job.events()
        await left.__anext__()
        feeds.append(weakref.ref(left))
        del left
        gc.collect()
        assert [feed() for feed in feeds] == [None] * 4


@pytest.mark.usefixtures("job_folder")
async def test_streams_of_a_job_are_context_managers() -> None:
    """`async with` gives each of them, and leaving it ends only the reading."""
    async with FMKManager(["sh", "-c", "echo one; sleep 600"], nproc_per_node=1) as job:
        async with job.logs() as lines:
            assert (await lines.__anext__()).text == "one"
        async with job.log_blocks() as blocks:
            assert (await blocks.__anext__()).data == b"one\n"
        async with job.events() as events:
            assert (await events.__anext__()).kind == "started"
        for stream in (lines, blocks):
            with pytest.raises(StopAsyncIteration):
                await stream.__anext__()
        assert job.state == "RUNNING"
