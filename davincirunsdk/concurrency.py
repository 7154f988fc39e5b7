"""Waits that supervision needs and asyncio does not have: outlasting a cancellation, a thread per call."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from davincirunsdk.errors import WorkerSpawnError, explain

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

T = TypeVar("T")


class Patience:
    """Waits that a cancellation cannot cut short; it is noted and goes on afterwards.

    A process must not be lost because the task that looks after it is cancelled, and a loop that
    shuts down cancels every task it finds. A cancel scope's shield does not hold off
    `Task.cancel()`, so the shield is made here.

    Args:
        on_cancel: Called at every cancellation, to hasten what is waited for.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._cancellation: asyncio.CancelledError | None = None

    async def until_any(self, *futures: asyncio.Future[Any]) -> None:
        """Wait until one of the futures is done, however often this task is cancelled."""
        while not any(future.done() for future in futures):
            try:
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as cancellation:
                self.note(cancellation)

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Wait for `future`, however often this task is cancelled.

        Returns:
            Its result.

        Raises:
            Exception: Whatever the future holds.
        """
        await self.until_any(future)
        return future.result()

    async def within(self, timeout: float, future: asyncio.Future[Any]) -> None:
        """Wait for `future`, at most `timeout` seconds, however often this task is cancelled."""
        loop = asyncio.get_running_loop()
        limit: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout, resolve, limit, None)
        await self.until_any(future, limit)
        timer.cancel()

    def note(self, cancellation: asyncio.CancelledError) -> None:
        """Take over a cancellation that came to another wait of this task."""
        self._cancellation = cancellation
        self._on_cancel()

    @property
    def cancelled(self) -> bool:
        """True when a cancellation was noted."""
        return self._cancellation is not None

    def settle(self) -> None:
        """Let a noted cancellation go on.

        Raises:
            asyncio.CancelledError: If there was one.
        """
        if self._cancellation is not None:
            raise self._cancellation


async def until_readable(descriptor: int, waits: Patience, *others: asyncio.Future[Any]) -> bool:
    """Wait until a descriptor can be read or a future is done, however often this task is cancelled.

    Args:
        descriptor: Such as a process's handle, which can be read when the process has ended.
        waits: Notes the cancellations.
        others: What ends the waiting as well.

    Returns:
        Whether it can be read.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, resolve, readable, None)
    try:
        await waits.until_any(readable, *others)
    finally:
        loop.remove_reader(descriptor)
    return readable.done()


def shield() -> AbstractContextManager[Any]:
    """Hold off the cancel scopes of a host program that uses anyio.

    Those deliver their cancellation anew in every turn of the loop until the task gives in, which
    would burn a core for a whole grace period of patience.
    """
    anyio = sys.modules.get("anyio")
    return contextlib.nullcontext() if anyio is None else anyio.CancelScope(shield=True)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread, None where none does.

    Raises:
        RuntimeError: Another library's loop runs here, which waiting would block.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        if _in_trio():
            raise RuntimeError(
                "davincirunsdk runs on asyncio, and this thread runs trio: write `await "
                "trio.to_thread.run_sync(start_and_wait_distributed_train, command)`"
            ) from None
        return None


def _in_trio() -> bool:
    trio = sys.modules.get("trio")
    try:
        return trio is not None and trio.lowlevel.current_root_task() is not None
    except RuntimeError:
        return False


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Set a future's result unless it is done; from the loop's own thread."""
    if not future.done():
        future.set_result(result)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call `function` in the loop's thread soon; nothing happens if that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return


def in_thread(
    function: Callable[..., T], *args: Any, unwanted: Callable[[T], object] | None = None
) -> asyncio.Future[T]:
    """Call a blocking function in a daemon thread of its own.

    Not an executor: a stuck disk must not use up a pool, must not hold the interpreter's exit, and
    the pools of `concurrent.futures` refuse work while the interpreter ends, which is when jobs
    that were forgotten are stopped.

    Args:
        function: What to call.
        args: Its arguments.
        unwanted: Takes a result that comes when the future has been cancelled, in the same thread or
            another: what was opened has to be closed.

    Returns:
        A future of the running loop. Cancelling it does not end the call.

    Raises:
        WorkerSpawnError: No thread can be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            if error is None and unwanted is not None:
                in_thread_or_here(unwanted, result)
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type] # no error: the result is a T

    def call() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            call_in_loop(loop, deliver, None, error)
        else:
            call_in_loop(loop, deliver, result, None)

    try:
        threading.Thread(target=call, name=f"davincirun-{function.__name__}", daemon=True).start()
    except RuntimeError as refusal:
        # Since Python 3.12; before, one could be started to the last.
        ending = "interpreter shutdown" in str(refusal)
        why = "the program is ending" if ending else explain(OSError(errno.EAGAIN, ""))
        raise WorkerSpawnError(f"no thread can be started: {why}", errno=errno.EAGAIN) from None
    return future


async def opened(function: Callable[..., T], *args: Any, close: Callable[[T], object]) -> T:
    """Open something in a thread, as `in_thread` does, for somebody who may be cancelled meanwhile.

    Args:
        function: Opens it.
        args: Its arguments.
        close: Closes what nobody takes any more, in a thread.

    Returns:
        What was opened.

    Raises:
        asyncio.CancelledError: At once; what is open then, or later, is closed.
    """
    future = in_thread(function, *args, unwanted=close)
    try:
        return await future
    except asyncio.CancelledError:
        # A task that is cancelled between the result and its own next step never sees the result.
        if not future.cancelled() and future.done() and future.exception() is None:
            in_thread_or_here(close, future.result())
        raise


def in_thread_or_here(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Call a blocking function as `in_thread` does, or at once if no thread can be started.

    For what ends a job: workers that use up all processes of a container must not keep it from that,
    and a loop that is held up is the lesser evil.

    Returns:
        A future of the running loop.
    """
    try:
        return in_thread(function, *args)
    except OSError:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future
