"""The documented blocking API: what a script writes that knows no event loop.

Jobs started here run in one background loop of the process; `davincirunsdk.background` says what
becomes of them at the end of the script.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from davincirunsdk import aio
from davincirunsdk.background import background, end, run_in_background, say, signals_end_waiting, wait
from davincirunsdk.concurrency import running_loop
from davincirunsdk.environment.compiler_cache import (
    CACHE_VARIABLE,
    fresh_cache_folder,
    set_random_ms_cache_dir,
)
from davincirunsdk.errors import DistributedRuntimeError
from davincirunsdk.manager import FMKManager
from davincirunsdk.options import JobOptions, NodeKeywords, spelled_out
from davincirunsdk.output.start_line import start_line
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from typing_extensions import Unpack

__all__ = [
    "init_rank_table",
    "set_random_ms_cache_dir",
    "start_and_wait_distributed_train",
    "start_distributed_train",
    "wait_distributed_train",
]


def init_rank_table() -> dict[str, str] | Literal[False]:
    """Find the platform's rank table, wait until it is complete, and set the variables that name it.

    A v0.1 table is converted to v1.0. Sets RANK_TABLE_FILE, MA_CURRENT_HOST_IP, RANK_START and
    RANK_SIZE in this process's environment. A second call does no harm. Ctrl-C ends the waiting.

    Returns:
        A copy of the environment after setting; False when there is no table, and nothing is set.

    Raises:
        RankTableError: The table is wrong.
        RankTableTimeoutError: It did not become complete in time.
        PlatformError: It does not tell which of its nodes this one is.
    """
    return run_in_background(aio.init_rank_table)


@spelled_out(NodeKeywords)
def start_distributed_train(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] = "./log",
    *,
    output_notebook: bool = False,
    **keywords: Unpack[NodeKeywords],
) -> FMKManager:
    """Start one worker per device of this node and return as soon as all are started.

    The job runs on by itself, supervised and logged. Outside a notebook its output goes to standard
    output, each line with its rank (`echo`). A script that ends normally without having waited for
    it waits for it then, and ends with its exit code if it fails; one that ends by an uncaught
    exception stops it.

    Args:
        command: Words of the command, strings or path-likes.
        work_dir: Folder the workers run in, made if missing.
        log_dir: Folder of the log files, relative to the caller's folder.
        output_notebook: Show worker output in the notebook while it runs; no effect elsewhere.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        The manager of the running job.

    Raises:
        DavinciRunError: The job could not be started; nothing of it is left.
        TypeError: `command` is one string.
        ValueError: An argument is out of range.
    """
    _show_by_default(keywords)
    options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
    return _start(options)


def _show_by_default(keywords: NodeKeywords) -> None:
    """Outside a notebook workers' output is the script's output, as it was in 0.1.5."""
    if keywords.get("echo") is None:
        keywords["echo"] = "none" if _in_notebook() else "all"


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from davincirunsdk.output.notebook import kernel_shell

    return kernel_shell() is not None


def _start(options: JobOptions) -> FMKManager:
    # Refuses a thread that another library's loop needs, before anything is started.
    running_loop()
    manager = FMKManager.from_options(options)
    with signals_end_waiting():
        try:
            run_in_background(manager.__aenter__, hasten=lambda: manager._end_here(True))
            background.add(manager)
            if options.display.on_stream:
                say(start_line(manager))
        except BaseException:
            # An interrupt may have come when all workers ran already.
            end(manager, interrupted=True)
            raise
    return manager


def wait_distributed_train(
    fmk_manager: FMKManager, destroy_when_finished: bool = True, raise_exception: bool = True
) -> int:
    """Wait for the end of training.

    Ctrl-C stops the job with its grace period, a second one at once; `KeyboardInterrupt` is raised
    when nothing of it is left. In the main thread of a program that has the default action for
    SIGTERM, that signal does the same and then ends the program. With
    `destroy_when_finished=False` both only end the waiting.

    Args:
        fmk_manager: What `start_distributed_train` gave.
        destroy_when_finished: Leave no process of the job behind. False keeps survivors of a
            failure, supervised and logged, until `manager.destroy()` or the end of the interpreter.
        raise_exception: Raise when a worker failed.

    Returns:
        0 when all workers succeeded, 1 otherwise, also for a job that was stopped.

    Raises:
        DistributedRuntimeError: A worker failed, and `raise_exception` is true.
        RuntimeError: The manager belongs to the calling thread's own running loop.
        TypeError: It is not a manager.
    """
    if not isinstance(fmk_manager, FMKManager):
        raise TypeError(f"fmk_manager is {fmk_manager!r}: expected what start_distributed_train() returned")
    if fmk_manager._home.loop_of("wait_distributed_train") is running_loop():
        raise RuntimeError(
            "this FMKManager runs in the event loop of the calling thread, which waiting would block: "
            "use `await manager.wait()` or `await davincirunsdk.aio.wait_distributed_train(manager)`"
        )
    if not destroy_when_finished:
        fmk_manager._keep_survivors()
    fmk_manager._channels.attach_display()
    try:
        result = wait(fmk_manager, destroy=destroy_when_finished)
    except DistributedRuntimeError:
        if raise_exception:
            raise
        return 1
    return 0 if result.state is JobState.SUCCEEDED else 1


@spelled_out(NodeKeywords)
def start_and_wait_distributed_train(
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

    Args:
        command: Words of the command, strings or path-likes.
        work_dir: Folder the workers run in, made if missing.
        log_dir: Folder of the log files, relative to the caller's folder.
        output_notebook: Show worker output in the notebook while it runs; no effect elsewhere.
        random_cache_dir: Give MindSpore's compiler cache a fresh folder, as inside
            `set_random_ms_cache_dir()`; only the workers see it, for other threads share this
            process's environment.
        destroy_when_finished: See `wait_distributed_train`.
        raise_exception: Raise when a worker failed.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        0 when all workers succeeded, 1 otherwise.

    Raises:
        DistributedRuntimeError: A worker failed, and `raise_exception` is true.
        DavinciRunError: The job could not be started; nothing of it is left.
        KeyboardInterrupt: After Ctrl-C, when nothing of the job is left.
    """
    _show_by_default(keywords)
    options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
    with signals_end_waiting(), ExitStack() as stack:
        if random_cache_dir:
            folder = stack.enter_context(fresh_cache_folder())
            options = replace(options, env={CACHE_VARIABLE: str(folder), **options.env})
        manager = _start(options)
        try:
            return wait_distributed_train(manager, destroy_when_finished, raise_exception)
        except BaseException:
            # An interrupt may have come between the two calls.
            if destroy_when_finished:
                end(manager, interrupted=True)
            raise
