"""Who guards the guardian: it is started again when somebody ends it while workers run."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import Patience, in_thread_or_here, until_readable
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.supervision.messages import GuardianEnded, Message

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_REVIVALS = 20
"""Starts of the guardian during one attempt; a Python that cannot run it must not be started for ever."""


class GuardianWatch:
    """Looks after the guardian during one attempt.

    Args:
        post: Takes `GuardianEnded`; whoever reads it has `revive` run.
        warn: Takes a sentence when workers are left without a guardian.
        on_cancel: Called when a task of the watch is cancelled; it goes on.
        over: Done when the attempt is over.
    """

    def __init__(
        self,
        *,
        post: Callable[[Message], None],
        warn: Callable[[str], None],
        on_cancel: Callable[[], None],
        over: asyncio.Future[None],
    ) -> None:
        self._post = post
        self._warn = warn
        self._waits = Patience(on_cancel)
        self._over = over
        self._revivals = 0

    async def watch(self) -> None:
        """Wait for the end of the guardian or of its standby, and post it."""
        handles: list[int] = []
        try:
            with select.epoll() as either:
                for pid in guardian.pids():
                    handles.append(os.pidfd_open(pid))
                    either.register(handles[-1], select.EPOLLIN)
                ended = bool(handles) and await until_readable(either.fileno(), self._waits, self._over)
        except ProcessLookupError:
            # Ended and reaped already, by a host program that reaps everything.
            ended = True
        except (AttributeError, OSError):
            # Kernels before 5.3: they are looked at when the next job starts.
            ended = False
        finally:
            for handle in handles:
                os.close(handle)
        if ended:
            self._post(GuardianEnded())

    async def revive(self) -> None:
        """Start the guardian again and watch on."""
        self._revivals += 1
        if self._revivals > _REVIVALS:
            self._warn("the guardian ends again and again: if this process is killed, workers may stay")
            return
        revival = in_thread_or_here(guardian.revive)
        await self._waits.until_any(revival, self._over)
        if not revival.done():
            return
        if (error := revival.exception()) is not None:
            self._warn(f"the guardian was ended and cannot be started again: {error}")
            return
        await self.watch()
