"""The documented blocking API: the one place where synchronous code meets the event loop.

Jobs started here run in one background loop of the process, in a thread that starts with the first
job. When the program has ended, its threads included, what still runs is stopped with its grace
period.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from anyio.from_thread import start_blocking_portal

from davincirunsdk import aio
from davincirunsdk.environment.compiler_cache import (
    CACHE_VARIABLE,
    fresh_cache_folder,
    set_random_ms_cache_dir,
)
from davincirunsdk.errors import DistributedRuntimeError
from davincirunsdk.manager import FMKManager
from davincirunsdk.options import JobOptions, NodeKeywords, spelled_out
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import FrameType

    from anyio.from_thread import BlockingPortal
    from typing_extensions import Unpack

    from davincirunsdk.types import RunResult

__all__ = [
    "init_rank_table",
    "set_random_ms_cache_dir",
    "start_and_wait_distributed_train",
    "start_distributed_train",
    "wait_distributed_train",
]

T = TypeVar("T")

_EXIT_THREAD = "davincirun-exit"


class _Terminated(BaseException):
    """SIGTERM came while the main thread waited."""


_INTERRUPTS = (KeyboardInterrupt, _Terminated)


class _Background:
    """The background loop, opened with the first use and closed when the program has ended."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A forked child has neither the thread nor the jobs, and perhaps a lock that nobody frees."""
        self._lock = threading.Lock()
        self._opened: Future[BlockingPortal] | None = None
        self._managers: list[FMKManager] = []

    def portal(self) -> BlockingPortal:
        with self._lock:
            opened = self._opened
            if opened is None:
                opened = Future()
                # Opened and closed in a thread of its own: Ctrl-C while it opens would leave it half made.
                # No atexit handler closes it: those run when no thread can be started any more, which
                # stopping needs. Not a daemon, though the caller may be one.
                threading.Thread(target=self._live, args=[opened], name=_EXIT_THREAD, daemon=False).start()
                self._opened = opened
        return opened.result()

    def add(self, manager: FMKManager) -> None:
        with self._lock:
            self._managers = [*(other for other in self._managers if not other._is_over), manager]

    def _live(self, opened: Future[BlockingPortal]) -> None:
        try:
            with start_blocking_portal("asyncio", name="davincirun-loop") as portal:
                opened.set_result(portal)
                _join_others()
                with self._lock:
                    managers = self._managers if self._opened is opened else []
                endings = [portal.start_task_soon(manager._end_here) for manager in managers]
                for ending in endings:
                    ending.exception()
        except RuntimeError as error:
            if opened.done():
                raise
            # No thread can be had for the loop; there may be one later.
            with self._lock:
                self._opened = None
            opened.set_exception(error)


def _join_others() -> None:
    """Wait until the program has ended but for us: the interpreter waits for these threads as well."""
    threading.main_thread().join()
    while others := [
        thread
        for thread in threading.enumerate()
        # Ctrl-C in the moment of the first may have let a second of ours start: they wait for nobody's end.
        if not thread.daemon and thread.name != _EXIT_THREAD and thread.is_alive()
    ]:
        others[0].join()


_background = _Background()


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

    The job runs on by itself, supervised and logged, until its end, `wait_distributed_train` with
    `destroy_when_finished`, `manager.destroy()`, or the end of the interpreter.

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
        ValueError: An argument has no sense.
    """
    options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
    return _start(options)


def _start(options: JobOptions) -> FMKManager:
    manager = FMKManager.from_options(options)
    try:
        run_in_background(manager.__aenter__, hasten=lambda: manager._end_here(True))
        _background.add(manager)
    except _INTERRUPTS:
        # It may have come when all workers ran already.
        _end(manager)
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
    """
    owner = fmk_manager._owner
    if owner is None:
        raise RuntimeError("this FMKManager was not started: use start_distributed_train()")
    if owner is _running_loop():
        raise RuntimeError(
            "this FMKManager runs in the event loop of the calling thread, which waiting would block: "
            "use `await manager.wait()` or `await davincirunsdk.aio.wait_distributed_train(manager)`"
        )
    if not destroy_when_finished:
        fmk_manager._keep_survivors()
    fmk_manager._channels.attach_display()
    try:
        result = _wait(fmk_manager, owner, destroy_when_finished)
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
    options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
    with sigterm_ends_waiting(), ExitStack() as stack:
        if random_cache_dir:
            folder = stack.enter_context(fresh_cache_folder())
            options = replace(options, env={CACHE_VARIABLE: str(folder), **options.env})
        manager = _start(options)
        try:
            return wait_distributed_train(manager, destroy_when_finished, raise_exception)
        except _INTERRUPTS:
            # It may have come between the two calls.
            if destroy_when_finished:
                _end(manager)
            raise


def _wait(manager: FMKManager, owner: asyncio.AbstractEventLoop, destroy: bool) -> RunResult:
    with sigterm_ends_waiting():
        try:
            if manager._is_over:
                # Perhaps with its loop: `asyncio.run` is over.
                return manager._outcome()
            return asyncio.run_coroutine_threadsafe(manager._wait_here(), owner).result()
        finally:
            if destroy:
                _end(manager)


def _end(manager: FMKManager) -> None:
    """Stop what is left and wait until it is gone; every further interrupt hastens it."""
    owner = manager._owner
    if owner is None or manager._is_over:
        return
    interrupt: BaseException | None = None
    while True:
        try:
            asyncio.run_coroutine_threadsafe(manager._end_here(interrupt is not None), owner).result()
        except _INTERRUPTS as again:
            interrupt = again
        else:
            break
    if interrupt is not None:
        raise interrupt


@contextmanager
def sigterm_ends_waiting() -> Iterator[None]:
    """Turn SIGTERM into an exception, where the program leaves it to its default action.

    That action comes at the end of the outermost block, when job and cache folder are gone.
    """
    usable = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not usable:
        yield
        return

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Call(Generic[T]):
    """A coroutine in the background loop that can be ended from outside, whether it has begun or not.

    The portal's own futures will not do: cancelling one waits for nothing and does not reach a start,
    which shields itself from cancel scopes, and an interrupt may come before there is a future.

    Args:
        function: Makes the coroutine.
        hasten: Makes one that hastens its end.
    """

    def __init__(
        self, function: Callable[[], Awaitable[T]], hasten: Callable[[], Awaitable[None]] | None
    ) -> None:
        self._function = function
        self._hasten = hasten
        self._task: asyncio.Future[T] | None = None
        self._unwanted = False

    async def run(self) -> T:
        if self._unwanted:
            raise asyncio.CancelledError
        self._task = asyncio.ensure_future(self._function())
        await asyncio.wait({self._task})
        return self._task.result()

    async def end(self, hasten: bool) -> None:
        """Cancel it and wait for its end; after this it cannot begin any more."""
        self._unwanted = True
        if self._task is None:
            return
        self._task.cancel()
        if hasten and self._hasten is not None:
            await self._hasten()
        await asyncio.wait({self._task})


def run_in_background(
    function: Callable[[], Awaitable[T]], hasten: Callable[[], Awaitable[None]] | None = None
) -> T:
    """Run a coroutine function in the background loop; Ctrl-C cancels it and waits for its end.

    Args:
        function: Makes the coroutine.
        hasten: Makes one that hastens the end, for every further Ctrl-C.
    """
    call = _Call(function, hasten)
    portal = _background.portal()
    try:
        return portal.start_task_soon(call.run).result()
    except _INTERRUPTS:
        _insist(lambda again: portal.start_task_soon(call.end, again).result())
        raise


def _insist(end: Callable[[bool], None]) -> None:
    """Call `end` until it returns; its argument tells whether another Ctrl-C came meanwhile."""
    again = False
    while True:
        try:
            end(again)
        except _INTERRUPTS:
            again = True
        else:
            return


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
