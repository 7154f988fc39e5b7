"""Dead orphans that this process inherits as the job's sub-reaper or as pid 1, reaped now and then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from davincirunsdk.leftovers.guardian import guardian

if TYPE_CHECKING:
    from collections.abc import Callable

_DELAY = 0.5
"""Seconds in which dead orphans collect, to be reaped together."""


class OrphanReaper:
    """Reaps dead children that are nobody's to await. All methods belong to the job's loop.

    Args:
        awaited: Gives the pids of children that somebody awaits; None among them for one that has no pid
            yet.
    """

    def __init__(self, awaited: Callable[[], set[int | None]]) -> None:
        self._awaited = awaited
        self._timer: asyncio.TimerHandle | None = None

    def reap_soon(self) -> None:
        """Reap, but not at once: after a worker's end there is more urgent work."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY, self._reap)

    def _reap(self) -> None:
        from davincirunsdk.leftovers.process_tree import reap_orphans

        self._timer = None
        awaited = self._awaited()
        pids = {pid for pid in awaited if pid is not None}
        if len(pids) < len(awaited):
            # One just started may have ended, and nobody knows yet that it is not an orphan.
            self.reap_soon()
        else:
            reap_orphans(but={*pids, *guardian.pids()})
