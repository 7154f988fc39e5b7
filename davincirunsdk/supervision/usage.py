"""Processor, memory and NPU of each worker with its helpers, looked at now and then for the run report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.supervision.npu_use import NpuTool
from davincirunsdk.types import Event, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from davincirunsdk.supervision.worker import Worker
    from davincirunsdk.types import NpuUsage

_STEP = 5.0
"""Seconds between two looks, at least."""

_FIRST = 0.5
"""Seconds until the first one: short jobs are to have a curve, too."""

_SHARE = 0.003
"""Part of a core that looking may take: with many processes it is done more rarely. Of the 0.005 that are
promised, the rest is for handing on what was seen."""

_NPU_SHARE = 0.5
"""Part of that for npu-smi, where there is one."""

_NPU_REST = 600.0
"""Seconds between two tries, at most, of an npu-smi that does not answer."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


async def sample(
    workers: Callable[[], Sequence[Worker]], emit: Callable[[Event], None], on_trouble: Callable[[str], None]
) -> None:
    """Look until cancelled.

    Args:
        workers: Gives the workers as they stand.
        emit: Takes an event of kind `usage` for each worker that runs.
        on_trouble: Takes a sentence when an npu-smi that is there is of no use.
    """
    tool = None
    with contextlib.suppress(OSError):
        tool = await in_thread(NpuTool.find)
    if tool is None:
        await _sample(workers, emit, {}, _SHARE)
        return
    npus: dict[int, NpuUsage] = {}
    # Apart from the other: one that hangs holds up no curve but its own.
    asking = asyncio.create_task(_ask_npus(tool, workers, npus, on_trouble), name="davincirun-npus")
    try:
        await _sample(workers, emit, npus, _SHARE * (1 - _NPU_SHARE))
    finally:
        asking.cancel()
        tool.close()


async def _sample(
    workers: Callable[[], Sequence[Worker]],
    emit: Callable[[Event], None],
    npus: Mapping[int, NpuUsage],
    part: float,
) -> None:
    before: dict[int, tuple[float, float]] = {}
    pause = _FIRST
    while True:
        await asyncio.sleep(pause)
        running = [worker for worker in workers() if worker.running and worker.pid is not None]
        began = time.thread_time()
        pids = [worker.pid for worker in running if worker.pid is not None]
        try:
            totals, spent = await in_thread(_look, pids)
        except OSError:
            # No thread can be started: workers may have used up all processes.
            continue
        now = time.time()
        for worker in running:
            pid = worker.pid or 0
            cpu, memory = totals.get(pid, (0.0, 0))
            then, last = before.get(pid, (worker.started or now, 0.0))
            before[pid] = now, cpu
            share = max(0.0, cpu - last) / max(now - then, 1e-3)
            usage = Usage(
                cpu=round(share, 3),
                memory=memory,
                output=worker.pump.file.size,
                npu=npus.get(worker.spec.npu_id),
            )
            emit(Event(kind="usage", time=now, rank=worker.spec.rank, pid=pid, usage=usage))
        spent += time.thread_time() - began
        pause = max(_STEP, spent / part)


async def _ask_npus(
    tool: NpuTool,
    workers: Callable[[], Sequence[Worker]],
    npus: dict[int, NpuUsage],
    on_trouble: Callable[[str], None],
) -> None:
    """Keep `npus` as npu-smi last told it: physical number to figures, none while it does not answer."""
    pause, silent = _FIRST / 2, 0
    while True:
        await asyncio.sleep(pause)
        numbers = sorted({worker.spec.npu_id for worker in workers() if worker.running} - {-1})
        if not numbers:
            pause = _STEP
            continue
        try:
            found, spent = await in_thread(tool.look, numbers)
        except OSError:
            found, spent = {}, 0.0
        npus.clear()
        npus.update(found)
        silent = 0 if found else silent + 1
        if silent == 1:
            on_trouble("npu-smi does not answer as expected: the run report lacks the NPUs' use meanwhile")
        pause = max(min(_STEP * 2**silent, _NPU_REST), spent / (_SHARE * _NPU_SHARE))


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
