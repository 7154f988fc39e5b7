"""Other nodes, or fewer, for the next attempt when nodes were lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.errors import PlatformError
from davincirunsdk.logs.file import keep_attempt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from davincirunsdk.engines.node import Member, NodeHandle, Placement

logger: logging.Logger = logging.getLogger("davincirunsdk")

LAST_OF_LOST = 3.0
"""Seconds after its grace period in which the guardian of a lost node ends what is left there."""

_AGAIN = 3.0
"""Seconds to the next try when nodes that were placed do not answer."""

_CLOCKS = 30.0
"""Seconds by which the clocks of a lost node and of its file server may differ."""


async def renew(
    placement: Placement,
    before: Sequence[Member],
    plan: Callable[[Sequence[NodeHandle]], Awaitable[None]],
    *,
    attempt: int,
    time_left: float,
) -> None:
    """Take nodes until they answer: one that has just died may be given for a free one.

    Args:
        placement: Of the job.
        before: Nodes of the attempt that has ended.
        plan: Asks the nodes what they have, and plans the next attempt.
        attempt: Number of the one that has ended.
        time_left: Seconds until the job's time limit.

    Raises:
        PlatformError: Not enough nodes can be had in time; says what is missing.
        RankTableError: They are not those of the rank table.
    """
    await _set_logs_aside(before, attempt)
    bound = min(placement.renewal_timeout, time_left)
    ends = time.monotonic() + bound
    while True:
        handles = await placement.renew(max(0.0, ends - time.monotonic()))
        try:
            await asyncio.wait_for(plan(handles), max(1.0, ends - time.monotonic()))
        except asyncio.TimeoutError:
            raise PlatformError(f"the nodes did not say within {bound:g} s what they have") from None
        except PlatformError as error:
            if time.monotonic() + _AGAIN >= ends:
                raise
            logger.info("nodes taken in vain: %s", error)
            await asyncio.sleep(_AGAIN)
        else:
            return


async def _set_logs_aside(members: Sequence[Member], attempt: int) -> None:
    """Put the attempt's number into its log files' names, before other nodes take over.

    Args:
        members: The nodes, whose workers have ended.
        attempt: Its number.
    """

    async def ask(member: Member) -> None:
        with contextlib.suppress(NodeLostError):
            await member.handle.set_logs_aside(attempt)

    def rename(member: Member) -> None:
        for worker in (*member.workers, *member.auxiliaries):
            # Only one that this attempt wrote: on another disk the name may be another job's.
            with contextlib.suppress(OSError):
                if worker.log_path.stat().st_mtime >= (worker.started or math.inf) - _CLOCKS:
                    keep_attempt(worker.log_path, attempt)

    await asyncio.gather(*(in_thread(rename, member) if member.lost else ask(member) for member in members))
