"""The event loop that a job belongs to, and calls of the job from anywhere else."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, TypeVar

from davincirunsdk.concurrency import call_in_loop, resolve, running_loop
from davincirunsdk.ending import Ending, at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class OwnLoop:
    """The loop that entered a job: all that happens to the job happens there, until it is over.

    Args:
        kind: What the job calls itself in messages, such as `FMKManager`.

    Attributes:
        loop: None until the job is entered.
    """

    _over: asyncio.Future[None]

    def __init__(self, kind: str) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._kind = kind
        self._process = os.getpid()

    def enter(self) -> asyncio.AbstractEventLoop:
        """Make the running loop the job's.

        Raises:
            RuntimeError: It has one, or none runs.
        """
        if self.loop is not None:
            raise RuntimeError(f"this {self._kind} was entered before; make a new one for another run")
        loop = running_loop()
        if loop is None:
            raise RuntimeError(
                "a job is started in a running asyncio loop, or by start_distributed_train(...)"
            )
        self.loop = loop
        self._over = loop.create_future()
        return loop

    def end(self) -> None:
        """Note that nothing of the job is left."""
        resolve(self._over, None)

    @property
    def is_over(self) -> bool:
        """True when nothing of the job is left, or none of it was ever started in this process."""
        return self.loop is not None and self._over.done()

    async def until_over(self) -> None:
        """Wait, in the job's loop, until nothing of the job is left; cancelling ends the waiting."""
        if not self._over.done():
            await asyncio.wait({self._over})

    def loop_of(self, call: str) -> asyncio.AbstractEventLoop:
        """Find the loop that a call is for.

        Args:
            call: Name of the call.

        Raises:
            RuntimeError: There is none.
        """
        if self.loop is None:
            raise RuntimeError(
                f"{call}() on the manager of a job that was never started: start it with `async with "
                "manager:`, or with start_distributed_train(...) in code without an event loop"
            )
        if self._process != os.getpid() and not self._over.done():
            raise RuntimeError(
                f"{call}() on a job of process {self._process}, from which this one was forked: only that "
                "process can do it"
            )
        return self.loop

    def call_now(self, call: str, function: Callable[[], None]) -> None:
        """Have a function called in the job's loop, unless the job is over; waits for nothing.

        Args:
            call: Name of the call.
            function: Must not block.

        Raises:
            RuntimeError: As `loop_of`.
        """
        owner = self.loop_of(call)
        if self._over.done():
            return
        if running_loop() is owner:
            function()
        else:
            call_in_loop(owner, function)

    def call(self, call: str, function: Callable[[], Coroutine[Any, Any, T]]) -> Ending[T]:
        """Give a coroutine that runs a function in the job's own loop; without a loop here, its result.

        Args:
            call: Name of the call.
            function: When all is over it needs no loop.

        Raises:
            RuntimeError: As `loop_of`, or the job's loop does not run.
        """
        owner = self.loop_of(call)
        loop = running_loop()
        if loop is None:
            if self._over.done():
                # Without a loop: the result itself.
                return at_once(function())  # type: ignore[arg-type]
            return self._elsewhere(function(), owner).result()  # type: ignore[no-any-return] # as above
        if loop is owner or self._over.done():
            return Ending(function)
        return Ending(lambda: asyncio.wrap_future(self._elsewhere(function(), owner)))

    def _elsewhere(self, call: Coroutine[Any, Any, T], owner: asyncio.AbstractEventLoop) -> Any:
        """Run a coroutine in the job's own loop, for a caller outside.

        Raises:
            RuntimeError: That loop does not run, so that the caller would wait for ever.
        """
        if not owner.is_running():
            call.close()
            raise RuntimeError(f"the event loop of this {self._kind} does not run: nothing can happen in it")
        return asyncio.run_coroutine_threadsafe(call, owner)
