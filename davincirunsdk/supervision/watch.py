"""The watch over a job that may hang: who shows signs of progress, and for how long nobody has.

What counts as a sign, of any rank: output, a step, and bytes read or written by the rank's process or one
below it (a data loader, a compiler, a checkpoint's writer). Processor time alone is none, for a rank that
waits in a collective may spin: it only puts the alarm off, to three times the limit, and so does a job
that has not made its first step, which may compile. So a rank that prints rarely is never taken for hung
while it works on files or steps, and one that computes in silence has three times as long.

A time in which this program itself was held up (a suspended machine, a debugger) is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from davincirunsdk.concurrency import Patience, in_thread, resolve
from davincirunsdk.host.activity import Activity, look_at
from davincirunsdk.supervision.cause import Stalled
from davincirunsdk.types import Event, Stacks, WorkerStack, WorkerState, join_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from davincirunsdk.supervision.attempt import Attempt
    from davincirunsdk.supervision.worker import Worker

logger: logging.Logger = logging.getLogger("davincirunsdk")

_DELAYED = 3.0
"""The limit times this counts for a job that is busy, and before the first step."""
_BUSY = 0.05
"""Part of a processor that a rank uses at least when it is busy."""
_LOOKS = 10
"""Looks within the limit."""
_LONGEST_PAUSE = 30.0
"""Seconds between two looks at most: what happened in a pause is only known to lie in it."""
_COST = 0.005
"""Part of a processor that the looks may use."""
_LOOK_PATIENCE = 10.0
"""Seconds for a look at all processes; of one that hangs, only output and steps are known."""
_STACKS_PATIENCE = 35.0
_ALONE_PAUSES = (5.0, 10.0, 20.0, 40.0)
"""Seconds without any sign after which those that are left may wait for ranks that have ended well."""


@dataclass(slots=True)
class _Sight:
    """What was last seen of one rank."""

    mark: tuple[int, int | None]
    io: Mapping[int, int]
    cpu: float = 0.0
    cpu_at_sign: float = 0.0


class StallClock:
    """Tells from looks at the ranks how long there has been no sign of progress. Pure: knows no clock.

    Args:
        limit: Seconds without a sign after which the job has stalled.
        now: Monotonic seconds of the beginning.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._sights: dict[int, _Sight] = {}
        self._last_sign = now
        self._last_look = now
        self._stepped = False
        self._busy = False
        self.stopped: tuple[int, ...] = ()

    def look(
        self,
        now: float,
        marks: Mapping[int, tuple[int, int | None]],
        activities: Mapping[int, Activity] | None,
        *,
        expected: float,
    ) -> bool:
        """Take a look.

        Args:
            now: Monotonic seconds.
            marks: Of each rank that runs: bytes printed, and the step.
            activities: What their processes do; None where nothing could be seen.
            expected: Seconds after which this look was due; a much later one was held up.

        Returns:
            Whether there was a sign since the look before.
        """
        pause = now - self._last_look
        if pause > 2 * expected + 1.0:
            self._last_sign += pause - expected
        self._last_look = now
        sign = False
        for rank, mark in marks.items():
            activity = (activities or {}).get(rank)
            before = self._sights.get(rank)
            if before is None:
                before = self._sights[rank] = _Sight(mark, {})
                sign = sign or mark[0] > 0
            elif mark != before.mark:
                before.mark, sign = mark, True
            if activity is not None:
                if before.io and any(count > before.io.get(pid, 0) for pid, count in activity.io.items()):
                    sign = True
                before.io, before.cpu = activity.io, activity.cpu
            self._stepped = self._stepped or bool(mark[1])
        for rank in set(self._sights) - set(marks):
            # Its end is something that happened.
            del self._sights[rank]
            sign = True
        if activities is not None:
            self.stopped = tuple(sorted(rank for rank, one in activities.items() if one.stopped))
        if sign:
            self._last_sign = now
            for sight in self._sights.values():
                sight.cpu_at_sign = sight.cpu
        silent = now - self._last_sign
        self._busy = any(sight.cpu - sight.cpu_at_sign >= _BUSY * silent for sight in self._sights.values())
        return sign

    @property
    def is_busy(self) -> bool:
        """True when a rank has used the processor since the last sign."""
        return self._busy

    def silent(self, now: float) -> float:
        """Seconds without a sign."""
        return now - self._last_sign

    def left(self, now: float) -> float:
        """Seconds until the job counts as stalled, if it shows no sign; 0 or less when it does."""
        delayed = self._busy or not self._stepped
        return self._limit * (_DELAYED if delayed else 1.0) - self.silent(now)


class LookOut:
    """Looks at processes in a thread, and does without where that hangs.

    Attributes:
        cost: Seconds of processor time that the last look took.
    """

    def __init__(self) -> None:
        self.cost: float = 0.0
        self._hanging: asyncio.Future[tuple[float, dict[int, Activity]]] | None = None

    async def look(
        self, waits: Patience, over: asyncio.Future[None], workers: Sequence[Worker]
    ) -> dict[int, Activity] | None:
        """Look what running workers do.

        Args:
            waits: Of the task that waits.
            over: Ends the look.
            workers: Whose processes.

        Returns:
            The activity of each rank, None where nothing could be seen in time.
        """
        if self._hanging is not None and not self._hanging.done():
            return None
        ranks = {worker.pid: worker.spec.rank for worker in workers if worker.pid is not None}
        try:
            look = self._hanging = in_thread(_timed_look, tuple(ranks))
        except OSError:
            # No thread to be had: output and steps are seen without.
            return None
        await _until(waits, _LOOK_PATIENCE, look, over)
        if not look.done():
            return None
        self.cost, found = look.result()
        return {ranks[pid]: activity for pid, activity in found.items()}


class StallWatch:
    """Looks at the ranks of an attempt now and then, and has it stopped when it has stalled.

    Args:
        limit: Seconds without a sign of progress.
        stop: Stop the attempt; otherwise only warn, once a stall.
        take_stacks: Takes and saves the stacks of all running workers, in a thread.
        emit: Takes events.
    """

    def __init__(
        self,
        limit: float,
        *,
        stop: bool,
        take_stacks: Callable[[], Stacks],
        emit: Callable[[Event], None],
    ) -> None:
        self._limit = limit
        self._stop = stop
        self._take_stacks = take_stacks
        self._emit = emit
        self._looks = LookOut()
        self._pause = min(max(limit / _LOOKS, 0.05), _LONGEST_PAUSE)

    async def watch(self, attempt: Attempt, over: asyncio.Future[None]) -> None:
        """Watch until the attempt is stopped or over.

        Args:
            attempt: Whose workers.
            over: Done when nothing is left to watch.
        """
        waits = Patience(lambda: None)
        clock = StallClock(self._limit, time.monotonic())
        warned = False
        pause = self._pause
        while True:
            await _until(waits, pause, over)
            if over.done() or attempt.is_stopping:
                return
            now = time.monotonic()
            running = _running_ranks(attempt)
            if not running:
                continue
            activities = await self._looks.look(waits, over, running)
            self._pause = max(self._pause, self._looks.cost / _COST)
            if clock.look(now, _marks(running), activities, expected=pause) and warned:
                warned = False
                self._emit(Event(kind="resumed", time=time.time(), detail="ranks show progress again"))
            left = clock.left(now)
            pause = self._pause if warned else min(self._pause, max(left, self._pause / _LOOKS))
            if left <= 0 and not warned:
                warned = True
                await self._tell(waits, over, attempt, running, clock)

    async def _tell(
        self,
        waits: Patience,
        over: asyncio.Future[None],
        attempt: Attempt,
        running: Sequence[Worker],
        clock: StallClock,
    ) -> None:
        silent = clock.silent(time.monotonic())
        stacks = Stacks(time=time.time(), workers=())
        try:
            taking = in_thread(self._take_stacks)
        except OSError:
            pass
        else:
            await _until(waits, _STACKS_PATIENCE, taking, over)
            if taking.done() and taking.exception() is None:
                stacks = taking.result()
        if over.done() or attempt.is_stopping:
            return
        cause = describe(silent, attempt.workers, stacks, clock.stopped)
        self._emit(Event(kind="stalled", time=time.time(), detail=cause.words))
        logger.warning("%s", cause.words)
        if self._stop:
            attempt.stop(cause)


async def tell_who_is_alone(
    attempt: Attempt, over: asyncio.Future[None], emit: Callable[[Event], None]
) -> None:
    """Say that ranks are left whose peers have ended well, if they show no sign of work after that.

    Args:
        attempt: Of which the first rank has ended well and others are left.
        over: Done when nothing is left to watch.
        emit: Takes the warning.
    """
    waits = Patience(lambda: None)
    for pause in _ALONE_PAUSES:
        running = _running_ranks(attempt)
        clock = StallClock(pause, time.monotonic())
        looks = LookOut()
        for wait in (0.0, pause):
            await _until(waits, wait, over)
            seen = await looks.look(waits, over, running)
            if over.done() or attempt.is_stopping or not running:
                return
            sign = clock.look(time.monotonic(), _marks(_running_ranks(attempt)), seen, expected=wait)
        if sign or clock.is_busy:
            continue
        gone = [worker.spec.rank for worker in attempt.workers if worker.state is WorkerState.SUCCEEDED]
        left = join_ranks(worker.spec.rank for worker in running)
        verb, whom = "shows" if len(running) == 1 else "show", "it" if len(gone) == 1 else "them"
        text = (
            f"{left} {verb} no sign of work since {join_ranks(gone)} ended well: to wait for {whom} in a "
            "collective is to wait for ever"
        )
        logger.warning("%s", text)
        emit(Event(kind="warning", time=time.time(), detail=text))
        return


def describe(silent: float, workers: Sequence[Worker], stacks: Stacks, stopped: Sequence[int]) -> Stalled:
    """Say who waits where, and who is not there.

    Args:
        silent: Seconds without a sign.
        workers: All workers of the attempt.
        stacks: Where the running ones are.
        stopped: Ranks that a signal has stopped.
    """
    ranks = [worker for worker in workers if not worker.spec.auxiliary]
    gone = [worker.spec.rank for worker in ranks if worker.state is WorkerState.SUCCEEDED]
    running = [worker for worker in ranks if worker.running]
    behind = _behind(running)
    odd = tuple(stopped) or tuple(rank for rank in _odd(stacks.workers)) or behind
    parts = []
    if stopped:
        verb = "are" if len(stopped) > 1 else "is"
        parts.append(f"{join_ranks(stopped)} {verb} stopped by a signal (SIGCONT lets it go on)")
    if gone and running:
        left = join_ranks(worker.spec.rank for worker in running)
        parts.append(f"{left} may wait for {join_ranks(gone)}, which ended well")
    elsewhere = [worker for worker in stacks.workers if worker.frames or worker.rank not in stopped]
    parts += _places(elsewhere, odd)
    if behind:
        verb = "are" if len(behind) > 1 else "is"
        parts.append(f"{join_ranks(behind)} {verb} behind the others in steps")
    if stacks.path is not None:
        parts.append(f"stacks are in {stacks.path}")
    return Stalled(seconds=round(silent, 1), detail="; ".join(parts), ranks=odd)


def _places(stacks: Sequence[WorkerStack], odd: Sequence[int]) -> list[str]:
    """Say in a clause for each place who is there, those that are not with the others first."""
    places: dict[str, list[int]] = {}
    for worker in stacks:
        where = f"in {worker.frames[0]}" if worker.frames else worker.state
        places.setdefault(where, []).append(worker.rank)
    order = sorted(places.items(), key=lambda item: (not set(item[1]) & set(odd), -len(item[1])))
    clauses = [f"{join_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} {where}" for where, ranks in order]
    return clauses[:4] + ([f"{len(clauses) - 4} more places"] if len(clauses) > 4 else [])


def _odd(stacks: Sequence[WorkerStack]) -> tuple[int, ...]:
    """Find the ranks that are not where most are; none without a majority."""
    places: dict[tuple[str, ...], list[int]] = {}
    for worker in stacks:
        # The line within a function may differ where ranks have different parts in one call.
        place = tuple(frame.partition(":")[0] for frame in worker.place)
        places.setdefault(place, []).append(worker.rank)
    most = max(places.values(), key=len, default=[])
    if 2 * len(most) <= len(stacks):
        return ()
    return tuple(sorted(rank for ranks in places.values() if ranks is not most for rank in ranks))


def _behind(running: Sequence[Worker]) -> tuple[int, ...]:
    """Find the ranks whose last step is smaller than the others'."""
    steps = {
        worker.spec.rank: progress.step
        for worker in running
        if (progress := worker.pump.progress()) is not None
    }
    furthest = max(steps.values(), default=0)
    return tuple(rank for rank, step in steps.items() if step < furthest)


async def _until(waits: Patience, seconds: float, *futures: asyncio.Future[Any]) -> None:
    """Wait for one of the futures, at most some seconds."""
    loop = asyncio.get_running_loop()
    limit: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, resolve, limit, None)
    await waits.until_any(limit, *futures)
    timer.cancel()


def _running_ranks(attempt: Attempt) -> list[Worker]:
    return [worker for worker in attempt.workers if worker.running and not worker.spec.auxiliary]


def _marks(running: Sequence[Worker]) -> dict[int, tuple[int, int | None]]:
    return {
        worker.spec.rank: (
            worker.pump.file.size + worker.pump.file.lost,
            progress.step if (progress := worker.pump.progress()) is not None else None,
        )
        for worker in running
    }


def _timed_look(pids: tuple[int, ...]) -> tuple[float, dict[int, Activity]]:
    began = time.thread_time()
    found = look_at(pids)
    return time.thread_time() - began, found
