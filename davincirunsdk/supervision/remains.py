"""The processes of a job beside its workers: found by their mark and their parents, and ended at the end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from typing import TYPE_CHECKING

from davincirunsdk.leftovers.ending import Ending
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.leftovers.pass_on import pass_on
from davincirunsdk.leftovers.proc import since_boot
from davincirunsdk.leftovers.process_tree import ProcessTree, Top

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

    from davincirunsdk.leftovers.proc import MarkedProcess
    from davincirunsdk.supervision.message_loop import MessageLoop
    from davincirunsdk.supervision.worker import Worker

logger: logging.Logger = logging.getLogger("davincirunsdk")

_CLEAN_LOOKS = 2
_LOOK_PAUSE = 0.1
"""Looks without a find, and seconds after each, until no survivor is left."""


class Remains:
    """Finds and ends what an attempt's workers have started.

    Args:
        mark: The job's mark, which is in every worker's environment.
        workers: Of the attempt.
        inherits_orphans: This process is the sub-reaper of the job and of nothing else.
        stop_signal: Asks processes to end.
        deadline: Gives the monotonic second of SIGKILL, which may change.

    Attributes:
        stop_tick: Clock tick since boot at which the stop began, None before.
    """

    def __init__(
        self,
        mark: str,
        workers: Sequence[Worker],
        *,
        inherits_orphans: bool,
        stop_signal: signal.Signals,
        deadline: Callable[[], float],
    ) -> None:
        self.stop_tick: int | None = None
        self._mark = mark
        self._workers = workers
        self._inherits_orphans = inherits_orphans
        self._stop_signal = stop_signal
        self._deadline = deadline
        # Of the clock of `MarkedProcess.started`, which counts in ticks.
        self._since = since_boot() - 1
        self._known_tree: ProcessTree | None = None
        self._known_ending: Ending | None = None

    def tops(self) -> list[Top]:
        """The workers that have been started, as they stand now."""
        return [
            Top(
                worker.pid,
                rank=worker.spec.rank,
                ended=worker.exit_tick,
                told=worker.told,
                pipe=worker.pump.inode,
                silence=worker.silence,
            )
            for worker in self._workers
            if worker.pid is not None
        ]

    def pass_on(self, number: int, tops: list[Top]) -> None:
        """Pass a signal on to all processes that handle it; blocking, for a thread."""
        pass_on(number, ProcessTree(self._mark, since=self._since), tops)

    def ending(self) -> Ending:
        """The end of them all; made when it is first asked for."""
        if self._known_ending is None:
            self._known_ending = Ending(
                self._tree(),
                tops=self.tops,
                deadline=self._deadline,
                number=self._stop_signal,
                note=lambda keys: guardian.note_told(self._mark, keys),
                began=self.stop_tick,
            )
        return self._known_ending

    def end_at_once(self) -> None:
        """End them with SIGKILL; blocking, for a thread."""
        ending = self.ending()
        ending.hasten()
        ending.end()

    def hasten(self) -> None:
        """Have a changed deadline noted, where the end has begun."""
        if self._known_ending is not None:
            self._known_ending.hasten()

    def close(self) -> None:
        """Give back what the end needed."""
        if self._known_ending is not None:
            self._known_ending.close()

    async def outlast(self, loop: MessageLoop, unwanted: Callable[[], bool]) -> None:
        """Wait until all have ended by themselves, or are not wanted any more.

        Args:
            loop: Of the attempt.
            unwanted: Tells whether they are to be ended.
        """
        clean = 0
        while not unwanted() and clean < _CLEAN_LOOKS:
            look = loop.look(lambda: self._tree().find(self.tops()))
            if survivors := await loop.result_of(look, []):
                clean = 0
                await _until_ended(survivors, loop, unwanted)
            else:
                # One that is at its exec just now may not be seen.
                clean += 1
                await loop.until(unwanted, time.monotonic() + _LOOK_PAUSE)

    def _tree(self) -> ProcessTree:
        if self._known_tree is None:
            self._known_tree = ProcessTree(
                self._mark,
                guardians=guardian.pids if self._inherits_orphans else None,
                since=self._since,
            )
        return self._known_tree


async def _until_ended(
    processes: Sequence[MarkedProcess], loop: MessageLoop, unwanted: Callable[[], bool]
) -> None:
    running = asyncio.get_running_loop()
    handles: set[int] = set()
    limit = math.inf

    def ended(handle: int) -> None:
        running.remove_reader(handle)
        os.close(handle)
        handles.discard(handle)
        loop.look_again()

    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        except (AttributeError, OSError):
            # No handles here: look again, now and then.
            limit = time.monotonic() + 1.0
            continue
        handles.add(handle)
        running.add_reader(handle, ended, handle)
    try:
        await loop.until(lambda: unwanted() or (not handles and limit == math.inf), limit)
    finally:
        for handle in tuple(handles):
            ended(handle)


def say_what_stays(ending: Ending, warn: Callable[[str], None]) -> None:
    """Say which processes could not be ended.

    Args:
        ending: That is over.
        warn: Takes a line for people.
    """
    for process in ending.left:
        why = (
            "cannot be signalled (operation not permitted): it runs as another user"
            if process.key in ending.refused
            else "does not end after SIGKILL: it is stuck in the kernel"
        )
        warn(f"{process.command}, pid {process.pid}, outlived its worker and {why}")


def log_what_was_ended(found: Sequence[MarkedProcess]) -> None:
    """Say which processes had to be ended.

    Args:
        found: Those that outlived their workers.
    """
    if found:
        logger.warning(
            "%s and had to be ended: %s",
            "1 process outlived its worker"
            if len(found) == 1
            else f"{len(found)} processes outlived their workers",
            ", ".join(f"{process.pid} ({process.command})" for process in found[:8]),
        )
