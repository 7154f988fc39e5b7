"""Uses the Ray engine from Python: `ray_driver.py WAY NODES LOG_DIR [WORKER_ARG...]`, outcome as JSON.

Ways: `blocking` calls `run_blocking`, also where a loop runs in the thread; `cancel` cancels `run` when all
workers are ready; `streams` reads logs and events.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from davincirunsdk import DistributedRuntimeError
from davincirunsdk.engines import ray

WORKER = str(Path(__file__).with_name("worker.py"))


def tell(**outcome: object) -> None:
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()


async def blocking(nodes: int, log_dir: str, *arguments: str) -> None:
    command = [sys.executable, WORKER, *arguments]
    try:
        result = ray.run_blocking(command, log_dir=log_dir, nnodes=nodes, nproc_per_node=2, resource="CPU")
    except DistributedRuntimeError as error:
        tell(exit_code=error.exit_code, root=error.root_cause.rank, report=str(error))
    else:
        tell(state=result.state, ranks=[worker.rank for worker in result.workers])


async def cancel(nodes: int, log_dir: str, *arguments: str) -> None:
    command = [sys.executable, WORKER, *arguments]
    task = asyncio.create_task(ray.run(command, log_dir=log_dir, nnodes=nodes, nproc_per_node=2))
    while len(list(Path(log_dir).glob("*.txt"))) < 2 * nodes or not all(
        path.read_text() for path in Path(log_dir).glob("*.txt")
    ):
        await asyncio.sleep(0.05)
    began = time.monotonic()
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        tell(cancelled=True, seconds=time.monotonic() - began)


async def streams(nodes: int, log_dir: str, *arguments: str) -> None:
    command = [sys.executable, WORKER, *arguments]
    async with ray.manager(command, log_dir=log_dir, nnodes=nodes, nproc_per_node=2) as job:
        lines = [(line.rank, line.text) async for line in job.logs()]
        result = await job.wait()
        events = [(event.kind, event.rank) async for event in job.events()]
    tell(lines=lines, events=events, state=result.state, paths=[str(w.log_path) for w in result.workers])


if __name__ == "__main__":
    way, count, folder, *rest = sys.argv[1:]
    asyncio.run({"blocking": blocking, "cancel": cancel, "streams": streams}[way](int(count), folder, *rest))
