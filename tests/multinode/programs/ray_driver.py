"""Uses the Ray engine from Python: `ray_driver.py WAY NODES LOG_DIR [WORKER_ARG...]`, outcome as JSON.

Ways: `blocking` calls `run_blocking` where a loop runs in the thread; `patient` does so where none does, with
a grace period of ten minutes, and tells of Ctrl-C; `cancel` cancels `run` when all workers are ready;
`stages` cancels it ever later; `streams` reads logs and events; `two` runs a short job beside a long one, and
one more after; `inside` runs one job in a task of the cluster, and one in an asynchronous actor.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

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


def patient(nodes: int, log_dir: str, *arguments: str) -> None:
    command = [sys.executable, WORKER, *arguments]
    try:
        ray.run_blocking(command, log_dir=log_dir, nnodes=nodes, nproc_per_node=2, grace_period=600)
    except KeyboardInterrupt:
        tell(interrupted=True)


async def stages(nodes: int, log_dir: str, *arguments: str) -> None:
    command = [sys.executable, WORKER, *arguments]
    seconds = []
    for delay in (0.1, 0.6, 1.2, 1.8, 2.4, 3.0, 3.6):
        task = asyncio.create_task(ray.run(command, log_dir=log_dir, nnodes=nodes, nproc_per_node=2))
        await asyncio.sleep(delay)
        began = time.monotonic()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            seconds.append(time.monotonic() - began)
    tell(seconds=seconds)


async def two(nodes: int, log_dir: str, *arguments: str) -> None:
    async def run(name: str, seconds: float) -> str:
        command = [sys.executable, WORKER, "--seconds", str(seconds), *arguments]
        result = await ray.run(command, log_dir=f"{log_dir}/{name}", nnodes=nodes // 2, nproc_per_node=2)
        return result.state

    states = await asyncio.gather(run("short", 0), run("long", 5))
    tell(states=[*states, await run("short", 0)])


async def inside(nodes: int, log_dir: str, *arguments: str) -> None:
    import ray as cluster

    command = [sys.executable, WORKER, *arguments]

    def task() -> str:
        return str(ray.run_blocking(command, log_dir=f"{log_dir}/task", nnodes=nodes, nproc_per_node=2).state)

    class Actor:
        async def run(self) -> str:
            return str(
                (await ray.run(command, log_dir=f"{log_dir}/actor", nnodes=nodes, nproc_per_node=2)).state
            )

    cluster.init(address="auto", log_to_driver=False, logging_level="ERROR")
    place: Any = cluster.remote(num_cpus=0)
    tell(states=[await place(task).remote(), await place(Actor).remote().run.remote()])


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
    ways = {
        "blocking": blocking,
        "cancel": cancel,
        "stages": stages,
        "streams": streams,
        "two": two,
        "inside": inside,
    }
    if way == "patient":
        # `asyncio.run` would take the first Ctrl-C for its loop, which does not turn.
        patient(int(count), folder, *rest)
    else:
        asyncio.run(ways[way](int(count), folder, *rest))
