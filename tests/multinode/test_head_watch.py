"""The watch over the place of a cluster's head: who can be reached is never taken for lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from davincirunsdk.engines import ray_agent
from davincirunsdk.engines.ray_agent import until_unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STEP = 0.5
BOUND = 20.0


@pytest.fixture(autouse=True)
def shorter_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the head every half second instead of every five."""
    monkeypatch.setattr(ray_agent, "HEAD_STEP", STEP)


class Head:
    """A place on the loopback that can be reached while it is up."""

    def __init__(self) -> None:
        self.place = ("127.0.0.1", 0)
        self.looks: asyncio.Queue[None] = asyncio.Queue()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Listen, at the same port each time."""
        self.server = server = await asyncio.start_server(self._answer, *self.place)
        self.place = server.sockets[0].getsockname()[:2]
        try:
            yield
        finally:
            server.close()
            await server.wait_closed()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.looks.put_nowait(None)
        writer.close()


@asynccontextmanager
async def watch(
    head: Head, bounds: list[float]
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Queue[bool]]]:
    """Watch a head for as long as the block runs; the last of the bounds counts."""
    changes: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(
        until_unreachable(head.place, lambda: bounds[-1], on_change=changes.put_nowait)
    )
    try:
        yield watching, changes
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def looked_at(head: Head, watching: asyncio.Task[None], times: int) -> None:
    """Wait until the watch has looked so often, or is over."""
    for _ in range(times):
        look = asyncio.create_task(head.looks.get())
        await asyncio.wait({look, watching}, timeout=BOUND, return_when=asyncio.FIRST_COMPLETED)
        assert not watching.done(), "a head that can be reached was taken for lost"
        assert look.done(), "the watch does not look any more"


@pytest.mark.parametrize("bound", [0.0, STEP / 5, STEP, 60 * STEP])
async def test_a_head_that_can_be_reached_is_never_lost(bound: float) -> None:
    """However short the patience that a long grace period leaves, even below the time between two looks."""
    head = Head()
    async with head.up(), watch(head, [bound]) as (watching, changes):
        await looked_at(head, watching, 4)
        assert changes.empty()


async def test_a_head_that_comes_back_in_time_is_not_lost() -> None:
    """Each change is told once; the patience begins anew with every connection."""
    head = Head()
    async with head.up():
        pass
    async with watch(head, [BOUND]) as (watching, changes):
        for _ in range(2):
            assert await asyncio.wait_for(changes.get(), BOUND) is False
            async with head.up():
                assert await asyncio.wait_for(changes.get(), BOUND) is True
                await looked_at(head, watching, 2)
        assert await asyncio.wait_for(changes.get(), BOUND) is False
        assert not watching.done()
        assert changes.empty()


async def test_a_head_that_stays_away_is_lost() -> None:
    """The watch ends when the patience is over; one that shrinks meanwhile counts as it is then."""
    head, bounds = Head(), [600.0]
    async with head.up():
        pass
    async with watch(head, bounds) as (watching, changes):
        assert await asyncio.wait_for(changes.get(), BOUND) is False
        assert not watching.done()
        bounds.append(0.5)
        await asyncio.wait_for(asyncio.shield(watching), BOUND)


async def test_one_look_that_fails_never_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patience shorter than the time between two looks is waited from the first look that fails."""
    monkeypatch.setattr(ray_agent, "HEAD_STEP", 3.0)
    head = Head()
    async with head.up():
        async with watch(head, [2.5]) as (watching, changes):
            await looked_at(head, watching, 1)
            head.server.close()
            assert await asyncio.wait_for(changes.get(), BOUND) is False
            async with head.up():
                back = asyncio.create_task(changes.get())
                await asyncio.wait({back, watching}, timeout=BOUND, return_when=asyncio.FIRST_COMPLETED)
                assert not watching.done(), "one refused look was taken for the end"
                assert back.result() is True
