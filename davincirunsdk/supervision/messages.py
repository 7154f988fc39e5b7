"""What the tasks of an attempt tell its supervisor, and the one stream it comes by."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from davincirunsdk.concurrency import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from davincirunsdk.errors import WorkerSpawnError
    from davincirunsdk.supervision.cause import Cause
    from davincirunsdk.supervision.worker import Worker


# Few of them are dataclasses of their own: to make one costs a third of a millisecond of every start.
@dataclass(frozen=True, slots=True, kw_only=True)
class _OfWorker:
    worker: Worker


class Spawned(_OfWorker):
    """A worker's process runs."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed(_OfWorker):
    """A worker's process could not be started."""

    error: WorkerSpawnError


class Exited(_OfWorker):
    """A worker's process has ended; it is not reaped before this message has been dealt with."""

    __slots__ = ()


class PumpEnded(_OfWorker):
    """A worker's output has ended, or nobody waits for it any longer."""

    __slots__ = ()


class TracebackWaited(_OfWorker):
    """A worker that was spared the SIGTERM for its unfinished traceback has had its time."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrdered:
    """The attempt is to end.

    Attributes:
        cause: Why.
        now: With SIGKILL at once.
    """

    cause: Cause
    now: bool = False


class GuardianEnded:
    """Somebody ended the guardian."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A task of the attempt met an error that is our own."""

    error: Exception


class Nudge:
    """A time has come, or some work in a thread is done: whoever waits looks again."""

    __slots__ = ()


Message: TypeAlias = (
    Spawned
    | SpawnFailed
    | Exited
    | PumpEnded
    | TracebackWaited
    | StopOrdered
    | GuardianEnded
    | Broken
    | Nudge
)


class Inbox:
    """A queue that loses no message to a cancellation.

    A queue that hands an item to the task that waits loses it if `Task.cancel()` hits that task before it
    has run on, and with it the end of a worker. So items stay in the queue until they are taken, and what
    is waited for is a bell.

    Args:
        on_cancel: Called when the reading task is cancelled; it goes on reading.

    Attributes:
        cancellation: What cancelled the reading task last, None if nothing did.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._messages: deque[Message] = deque()
        self._closed = False
        self._on_cancel = on_cancel
        self._bell: asyncio.Future[None] | None = None
        self.cancellation: asyncio.CancelledError | None = None

    def post(self, message: Message) -> None:
        """Add a message; from the loop's thread. After `close` it goes nowhere."""
        if self._closed:
            return
        self._messages.append(message)
        if self._bell is not None:
            resolve(self._bell, None)

    def posted(self) -> Iterator[Message]:
        """Take what has been posted, and what is posted meanwhile."""
        while self._messages:
            yield self._messages.popleft()

    async def filled(self) -> None:
        """Wait for a message, however often this task is cancelled."""
        while not self._messages:
            self._bell = asyncio.get_running_loop().create_future()
            try:
                await self._bell
            except asyncio.CancelledError as cancellation:
                self.cancellation = cancellation
                self._on_cancel()
            finally:
                self._bell = None

    def close(self) -> None:
        """Drop what nobody will read."""
        self._closed = True
        self._messages.clear()
