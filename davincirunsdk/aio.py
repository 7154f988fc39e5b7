"""Awaitable twins of the blocking API, under the same names."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from davincirunsdk.concurrency import Patience, in_thread
from davincirunsdk.environment import compiler_cache
from davincirunsdk.errors import DistributedRuntimeError
from davincirunsdk.manager import FMKManager
from davincirunsdk.options import JobOptions, NodeKeywords, spelled_out
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Unpack

T = TypeVar("T")

__all__ = [
    "init_rank_table",
    "set_random_ms_cache_dir",
    "start_and_wait_distributed_train",
    "start_distributed_train",
    "wait_distributed_train",
]


async def init_rank_table() -> dict[str, str] | Literal[False]:
    """Find the platform's rank table, wait until it is complete, and set the variables that name it.

    A v0.1 table is converted to v1.0. Sets RANK_TABLE_FILE, MA_CURRENT_HOST_IP, RANK_START and
    RANK_SIZE in this process's environment. A second call does no harm.

    Returns:
        A copy of the environment after setting; False when there is no table, and nothing is set.

    Raises:
        RankTableError: The table is wrong.
        RankTableTimeoutError: It did not become complete in time.
        PlatformError: It does not tell which of its nodes this one is.
    """
    from davincirunsdk.manager import log_notice
    from davincirunsdk.platforms import prepare_rank_table

    names = await prepare_rank_table(dict(os.environ), notify=log_notice)
    if names is None:
        return False
    os.environ.update(names)
    return dict(os.environ)


@asynccontextmanager
async def set_random_ms_cache_dir() -> AsyncIterator[None]:
    """Let MindSpore's compiler cache go to a fresh folder, for every job started inside.

    Sets `MS_COMPILER_CACHE_PATH` in this process's environment; afterwards the variable is as it
    was and the folder is gone.
    """
    async with _in_threads(compiler_cache.set_random_ms_cache_dir()):
        yield


@spelled_out(NodeKeywords)
def start_distributed_train(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] = "./log",
    *,
    output_notebook: bool = False,
    **keywords: Unpack[NodeKeywords],
) -> FMKManager:
    """Make an async context manager that starts one worker per device of this node.

    Args:
        command: Words of the command.
        work_dir: Folder the workers run in.
        log_dir: Folder of the log files, relative to the caller's folder.
        output_notebook: Show worker output in the notebook while it runs.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        The manager; enter it to start. Errors and cancellation: see `FMKManager`.
    """
    return FMKManager(
        command,
        work_dir,
        log_dir,
        output_notebook=output_notebook,
        **keywords,
    )


async def wait_distributed_train(
    fmk_manager: FMKManager, destroy_when_finished: bool = True, raise_exception: bool = True
) -> int:
    """Wait for the end of training.

    Cancelling cancels the waiting; the job goes on as long as its `async with` does.

    Args:
        fmk_manager: What `start_distributed_train` gave.
        destroy_when_finished: Leave no process of the job behind. False keeps survivors until
            `destroy` or the end of the `async with`.
        raise_exception: Raise when a worker failed.

    Returns:
        0 when all workers succeeded, 1 otherwise, also for a job that was stopped.

    Raises:
        DistributedRuntimeError: A worker failed, and `raise_exception` is true.
    """
    if not destroy_when_finished:
        fmk_manager._keep_survivors()
    try:
        result = await fmk_manager.wait()
    except DistributedRuntimeError:
        if raise_exception:
            raise
        return 1
    finally:
        if destroy_when_finished and fmk_manager._decided.done():
            await fmk_manager.destroy()
    return 0 if result.state is JobState.SUCCEEDED else 1


@spelled_out(NodeKeywords)
async def start_and_wait_distributed_train(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] = "./log",
    *,
    output_notebook: bool = False,
    random_cache_dir: bool = True,
    destroy_when_finished: bool = True,
    raise_exception: bool = True,
    **keywords: Unpack[NodeKeywords],
) -> int:
    """Start one worker per device of this node and wait for the end of training.

    Cancelling stops the job with its grace period. The environment of this process is not touched:
    the compiler cache folder is given to the workers only.

    Args:
        command: Words of the command.
        work_dir: Folder the workers run in.
        log_dir: Folder of the log files, relative to the caller's folder.
        output_notebook: Show worker output in the notebook while it runs.
        random_cache_dir: Give MindSpore's compiler cache a fresh folder.
        destroy_when_finished: Leave no process of the job behind. Here, where nobody gets the
            manager, False only lets the others go on after a failure until all have ended.
        raise_exception: Raise when a worker failed.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        0 when all workers succeeded, 1 otherwise.

    Raises:
        DistributedRuntimeError: A worker failed, and `raise_exception` is true.
        DavinciRunError: The job could not be started.
    """
    options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
    async with AsyncExitStack() as stack:
        if random_cache_dir:
            folder = await stack.enter_async_context(_in_threads(compiler_cache.fresh_cache_folder()))
            options = replace(options, env={compiler_cache.CACHE_VARIABLE: str(folder), **options.env})
        async with FMKManager.from_options(options) as manager:
            return await wait_distributed_train(manager, destroy_when_finished, raise_exception)


@asynccontextmanager
async def _in_threads(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Make and remove a folder, which may be large, off the loop; a cancellation waits for that."""
    waits = Patience(lambda: None)
    made = await waits.wait(in_thread(context.__enter__))
    try:
        waits.settle()
        yield made
    finally:
        await waits.wait(in_thread(context.__exit__, None, None, None))
        waits.settle()
