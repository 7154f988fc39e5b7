"""What is opened in a thread for a task that is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import pytest

from davincirunsdk.concurrency import opened

if TYPE_CHECKING:
    from collections.abc import Callable


def open_null() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def until_delivered(loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
    """Hold the loop until the thread has ended, so that its result comes in the next round, `then` behind."""
    for thread in threading.enumerate():
        if thread.name == "davincirun-open_null":
            thread.join(10)
    loop.call_soon(then)


@pytest.mark.parametrize("with_result", [False, True], ids=["before the result", "with the result"])
async def test_what_nobody_takes_is_closed_whenever_the_cancellation_comes(with_result: bool) -> None:
    """Also between the result and the next step of the task, which then never sees it."""
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def close(descriptor: int) -> None:
        os.close(descriptor)
        loop.call_soon_threadsafe(closed.set_result, descriptor)

    task = asyncio.create_task(opened(open_null, close=close))

    if with_result:
        # Behind the task's first step.
        loop.call_soon(until_delivered, loop, task.cancel)
    else:
        loop.call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(closed, 10)


async def test_what_is_taken_stays_open() -> None:
    descriptor = await opened(open_null, close=os.close)
    os.fstat(descriptor)
    os.close(descriptor)
