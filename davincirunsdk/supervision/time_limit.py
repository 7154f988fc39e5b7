"""The time limit of a job, and the warning before it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from davincirunsdk.supervision.cause import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable

_WARNED = 60.0
"""Seconds before the limit at which the workers are warned, unless that is more than half of the time."""


def set_limits(
    seconds: float,
    *,
    reach: Callable[[TimeLimit], None],
    warn_signal: str | None,
    warn_before: float | None,
    warn: Callable[[signal.Signals, float], None],
) -> list[asyncio.TimerHandle]:
    """Have the job warned and stopped when its time is over.

    Args:
        seconds: The time.
        reach: Called at its end.
        warn_signal: Name of the signal that the workers are warned with, None for no warning.
        warn_before: Seconds before the end, None for what is usual.
        warn: Called with the signal and the seconds that are left.

    Returns:
        What to cancel when the job has ended.
    """
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(seconds, reach, TimeLimit(seconds=seconds))]
    if warn_signal is not None:
        before = min(_WARNED, seconds / 2) if warn_before is None else warn_before
        timers.append(loop.call_later(seconds - before, warn, signal.Signals[warn_signal], before))
    return timers
