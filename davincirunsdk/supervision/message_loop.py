"""The one loop over an attempt's messages: whoever waits deals with all that comes meanwhile.

So nothing can happen between a check and a wait that is not seen.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from davincirunsdk.concurrency import in_thread_or_here
from davincirunsdk.supervision import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.supervision.messages import Inbox, Message

T = TypeVar("T")
Limit: TypeAlias = "float | Callable[[], float]"

_LOOK_LIMIT = 20.0
"""Seconds after the end of the grace period until a look that does not come back is given up."""


class MessageLoop:
    """Waits of one task, which reads the inbox.

    Args:
        inbox: What is read.
        deal: Does what follows from a message.
        dealt: Called when all messages that were there have been dealt with.
        deadline: Gives the monotonic second of the end of the grace period, which may change.
        warn: Takes a line for people.
    """

    def __init__(
        self,
        inbox: Inbox,
        deal: Callable[[Message], None],
        *,
        dealt: Callable[[], None],
        deadline: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._inbox = inbox
        self._deal = deal
        self._dealt = dealt
        self._deadline = deadline
        self._warn = warn

    async def until(self, condition: Callable[[], bool], limit: Limit = math.inf) -> bool:
        """Deal with messages until `condition` holds.

        It counts only when nothing is left to be dealt with: what has ended is judged before the phase
        that waited for it is over.

        Args:
            condition: Looked at when all messages have been dealt with.
            limit: Monotonic second until which to wait at most; one that may change is called.

        Returns:
            Whether it holds.
        """
        loop = asyncio.get_running_loop()
        while True:
            for message in self._inbox.posted():
                self._deal(message)
            self._dealt()
            if condition():
                return True
            left = (limit() if callable(limit) else limit) - time.monotonic()
            if left <= 0:
                return False
            timer = loop.call_later(left, self.look_again) if left < math.inf else None
            await self._inbox.filled()
            if timer is not None:
                timer.cancel()

    def look_again(self, _: object = None) -> None:
        """Have whoever waits look at its condition."""
        self._inbox.post(messages.Nudge())

    def look(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Have something looked at or done in a thread; whoever waits hears of its end."""
        future = in_thread_or_here(function, *args)
        future.add_done_callback(self.look_again)
        return future

    async def result_of(self, look: asyncio.Future[T], without: T) -> T:
        """Wait for a look at processes, which a sick driver may hold up: then go on without its result."""
        began = time.monotonic()
        await self.until(look.done, lambda: max(self._deadline(), began) + _LOOK_LIMIT)
        if look.done():
            return look.result()
        self._warn("the system holds up the look at processes: some of this job may be left")
        return without
