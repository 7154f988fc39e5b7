"""A program with a job in it that ends in one of many ways: `host.py WAY FOLDER GRACE COMMAND...`.

It acts when the file `FOLDER/go` appears, or on the signal that the test sends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk import FMKManager, start_distributed_train, wait_distributed_train

if TYPE_CHECKING:
    from collections.abc import Callable

way, folder, grace_period, count, *command = sys.argv[1:]
log_dir = str(Path(folder) / "log")


def job() -> FMKManager:
    """Make the job's manager."""
    return FMKManager(command, log_dir=log_dir, nproc_per_node=int(count), grace_period=float(grace_period))


def start() -> FMKManager:
    """Start the job by the blocking API."""
    return start_distributed_train(
        command, log_dir=log_dir, nproc_per_node=int(count), grace_period=float(grace_period)
    )


def wait_for_go() -> None:
    """Block until the test says so."""
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)


async def go() -> None:
    """Wait until the test says so."""
    await asyncio.to_thread(wait_for_go)


async def returns() -> None:
    await job().__aenter__()
    await go()


async def returns_from_block() -> None:
    async def run() -> None:
        async with job() as manager:
            await manager.wait()

    task = asyncio.create_task(run())
    await go()
    assert not task.done()


async def exits_in_task() -> None:
    async def leave() -> None:
        await go()
        sys.exit(5)

    # asyncio itself would complain of an exit that nobody fetches.
    asyncio.create_task(leave()).add_done_callback(asyncio.Task.exception)
    async with job() as manager:
        await manager.wait()


async def waits() -> None:
    async with job() as manager:
        await manager.wait()


async def dies(death: str) -> None:
    async with job():
        await go()
        if death == "os._exit":
            os._exit(6)
        ctypes.string_at(0)


def forgets() -> None:
    start()
    wait_for_go()
    sys.excepthook = lambda *_: None
    raise RuntimeError


def forgets_in_thread() -> None:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    wait_for_go()
    sys.excepthook = lambda *_: None
    raise RuntimeError


def waits_in_thread() -> None:
    thread = threading.Thread(target=lambda: wait_distributed_train(start()), daemon=True)
    thread.start()
    thread.join()


WAYS: dict[str, Callable[[], object]] = {
    "return from main": lambda: asyncio.run(returns()),
    "return from main with the block in a task": lambda: asyncio.run(returns_from_block()),
    "sys.exit in a task": lambda: asyncio.run(exits_in_task()),
    "wait": lambda: asyncio.run(waits()),
    "os._exit": lambda: asyncio.run(dies("os._exit")),
    "segmentation fault": lambda: asyncio.run(dies("segv")),
    "forget and raise": forgets,
    "forget in a thread and raise": forgets_in_thread,
    "blocking wait in a thread": waits_in_thread,
    "blocking wait": lambda: wait_distributed_train(start()),
}

if __name__ == "__main__":
    WAYS[way]()
