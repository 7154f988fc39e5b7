"""Processor time and memory of each worker with its helpers, looked at now and then for the run report."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.types import Event, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from davincirunsdk.supervision.worker import Worker

_STEP = 5.0
"""Seconds between two looks, at least."""

_FIRST = 0.5
"""Seconds until the first one: short jobs are to have a curve, too."""

_SHARE = 0.005
"""Part of a core that looking may take: with many processes it is done more rarely."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


async def sample(workers: Callable[[], Sequence[Worker]], emit: Callable[[Event], None]) -> None:
    """Look until cancelled.

    Args:
        workers: Gives the workers as they stand.
        emit: Takes an event of kind `usage` for each worker that runs.
    """
    before: dict[int, tuple[float, float]] = {}
    pause = _FIRST
    while True:
        await asyncio.sleep(pause)
        running = [worker for worker in workers() if worker.running and worker.pid is not None]
        began = time.thread_time()
        totals, spent = await in_thread(_look, [worker.pid for worker in running if worker.pid is not None])
        now = time.time()
        for worker in running:
            pid = worker.pid or 0
            cpu, memory = totals.get(pid, (0.0, 0))
            then, last = before.get(pid, (worker.started or now, 0.0))
            before[pid] = now, cpu
            share = max(0.0, cpu - last) / max(now - then, 1e-3)
            usage = Usage(cpu=round(share, 3), memory=memory, output=worker.pump.file.size)
            emit(Event(kind="usage", time=now, rank=worker.spec.rank, pid=pid, usage=usage))
        spent += time.thread_time() - began
        pause = max(_STEP, spent / _SHARE)


def _look(pids: Sequence[int]) -> tuple[Mapping[int, tuple[float, int]], float]:
    """Add up processor seconds and resident bytes below each pid; also what looking cost."""
    began = time.thread_time()
    parents: dict[int, int] = {}
    figures: dict[int, tuple[float, int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        names = []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            pid = int(name)
            parents[pid] = int(fields[1])
            # Children that were awaited count, too: what a helper did was done for its worker.
            figures[pid] = sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE
    totals: dict[int, tuple[float, int]] = {}
    tops = set(pids)
    for pid, (cpu, memory) in figures.items():
        above = pid
        while above not in tops and above > 1:
            above = parents.get(above, 0)
        if above in tops:
            seconds, size = totals.get(above, (0.0, 0))
            totals[above] = seconds + cpu, size + memory
    return totals, time.thread_time() - began
