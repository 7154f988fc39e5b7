"""The host's loop is never held for long by us, as its own processor time shows."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import DistributedRuntimeError, FMKManager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PY = sys.executable

pytestmark = pytest.mark.usefixtures("job_folder")


@asynccontextmanager
async def watched() -> AsyncIterator[list[float]]:
    """Collect the processor time of the loop's thread between two ticks of a clock in that loop."""
    holds: list[float] = []

    async def tick() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time()
            holds.append(now - before)
            before = now

    # A collection of what all earlier tests left is not the job's.
    gc.collect()
    gc.freeze()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    yield holds
    gc.unfreeze()
    ticking.cancel()
    await asyncio.wait({ticking})


async def test_a_reader_of_a_flood() -> None:
    """Eight workers write as fast as they can, a task does nothing but read lines, one rank fails."""
    program = (
        "import os, sys, time\n"
        "piece = b'a line of a usual length, or somewhat shorter\\n' * 1000\n"
        "end = time.monotonic() + 2\n"
        "while time.monotonic() < end or os.environ['RANK'] != '3': os.write(1, piece)\n"
        "sys.exit(3)"
    )
    async with watched() as holds, FMKManager([PY, "-c", program], nproc_per_node=8) as job:
        count = 0
        async for _ in job.logs():
            count += 1
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
        stopping = [event.time async for event in job.events() if event.kind == "stopping"]
    assert caught.value.exit_code == 3
    assert count > 1000
    assert max(holds) < 0.05
    failed = next(worker for worker in job.workers if worker.rank == 3)
    assert failed.ended is not None
    assert stopping[0] - failed.ended < 0.5


async def test_many_jobs_that_start_at_once() -> None:
    """Twenty jobs in one loop."""
    async with watched() as holds, AsyncExitStack() as stack:
        jobs = [FMKManager(["sleep", "600"], nproc_per_node=2) for _ in range(20)]
        # Once before: what is imported then is not what a service pays for.
        await stack.enter_async_context(FMKManager(["sleep", "600"], nproc_per_node=1))
        holds.clear()
        await asyncio.gather(*(job.__aenter__() for job in jobs))
        await asyncio.gather(*(job.__aexit__(None, None, None) for job in jobs))
    assert max(holds) < 0.05
