"""Whether an attempt that failed is worth another one, and when.

A restart cures what has passed by then: a device that was lost and is back, a link that flapped, a
neighbour that took the memory. It does not cure a program, so it is not tried after what says that the
program is wrong, nor again where the one before made nothing better.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from davincirunsdk.concurrency import resolve
from davincirunsdk.phrases import count
from davincirunsdk.supervision.cause import (
    InternalError,
    NodeLost,
    Stalled,
    StartFailed,
    StopWanted,
    Straggling,
    TimeLimit,
)
from davincirunsdk.types import AttemptRecord, Event, JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from davincirunsdk.concurrency import Patience
    from davincirunsdk.options import JobOptions
    from davincirunsdk.supervision.cause import Cause
    from davincirunsdk.types import RunResult

logger: logging.Logger = logging.getLogger("davincirunsdk")

T = TypeVar("T")

_NEVER = {
    2: "exit code 2 is a usage error",
    126: "exit code 126 says that a command cannot be executed",
    127: "exit code 127 says that a command was not found",
}
_WRONG_PROGRAM = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_ERROR_LINE = r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit|Warning))\b(.*)$"
_DIFFERS = re.compile(r"\b(E[A-Z0-9]\d{4}|ERR\d{5}|[125]07\d{3})\b|0x[0-9a-fA-F]+|\d+")
"""Numbers, and first what they are not: codes of CANN, torch_npu and the runtime, which say what happened."""
_LONGEST_DELAY = 300.0
_QUICK = 10.0
"""Seconds; attempts that all die within them, without a step, do not get better."""
_QUICK_DEATHS = 3
_WITHOUT_PROGRESS = 3
"""Attempts in a row, the first one counted, of which none gets further than the ones before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the decision about another attempt needs to know of one that has ended.

    Attributes:
        seconds: How long it ran.
        step: The furthest step of any rank, None where none was told.
        error: Its first error in words, without what differs from run to run, or "".
    """

    seconds: float
    step: int | None
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """Another attempt.

    Attributes:
        number: From 1.
        pause: Seconds until it.
        port: For the rendezvous, None for the one that the plan gives.
    """

    number: int
    pause: float
    port: int | None = None


class Restarts:
    """The attempts of one job on this node, and whether there is another one.

    Args:
        options: What the user asked for.
        nnodes: Nodes of the job whose launchers each see to their own workers alone.
        requeued: How often the batch system has run the whole job anew: these count too.

    Attributes:
        nnodes: As given; 1 for nodes that meet, which start again together, as one.
        earlier: Attempts that were followed by another one.
        why: Why there is no further one, "" where that goes without saying.
        stopped_in_pause: The job was stopped before the attempt that would have come next.
    """

    def __init__(self, options: JobOptions, *, nnodes: int, requeued: int) -> None:
        self._options = options
        self.nnodes = nnodes
        self._requeued = requeued
        self._trials: list[Trial] = []
        self._began = time.time()
        self.earlier: tuple[AttemptRecord, ...] = ()
        self.why: str = ""
        self.stopped_in_pause: bool = False
        self._pausing: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Note that an attempt begins."""
        self._began = time.time()
        self._pausing = None

    def with_attempts(self, result: RunResult, cause: Cause | None) -> RunResult:
        """Add all attempts to the result of the last one.

        Args:
            result: Of the attempt that began last.
            cause: Why it was stopped, None when it ended by itself.
        """
        if self.stopped_in_pause:
            return replace(result, attempts=self.earlier)
        reason = ""
        if result.failures:
            first = result.failures[0]
            reason = ", ".join(filter(None, [first.name, first.reason]))
        elif result.state is not JobState.SUCCEEDED and cause is not None:
            reason = cause.words
        last = AttemptRecord(
            number=len(self.earlier),
            started=self._began,
            ended=result.ended,
            exit_code=result.exit_code,
            reason=reason,
            step=_furthest_of(result),
        )
        return replace(result, attempts=(*self.earlier, last))

    def next(
        self, result: RunResult, cause: Cause | None, *, time_left: float, at_least: float = 0.0
    ) -> Next | None:
        """Decide about another attempt.

        Args:
            result: Of the last one, `with_attempts`.
            cause: Why that was stopped.
            time_left: Seconds until the job's time limit.
            at_least: Seconds that have to pass before it.

        Returns:
            The next one; None where there is none, and then `why` says so.
        """
        options, number = self._options, len(self.earlier) + 1
        if not options.max_restarts or result.state is JobState.SUCCEEDED or isinstance(cause, StopWanted):
            return None
        self._trials.append(
            Trial(
                seconds=result.ended - self._began,
                step=_furthest_of(result),
                error=_same_error(result.failures[0].tail) if result.failures else "",
            )
        )
        pause = max(delay(options.restart_delay, number - 1), at_least)
        self.why = why_not(self._trials, result, cause, on_stall=options.on_stall)
        if not self.why and self.nnodes > 1:
            self.why = "the job has several nodes, which a launcher on each cannot restart together"
        if not self.why and number + self._requeued > options.max_restarts:
            anew = f", {self._requeued} of them by the batch system" if self._requeued else ""
            self.why = f"the job has had its {count(options.max_restarts, 'restart')}{anew}"
        if not self.why and pause >= time_left:
            self.why = "the time limit would be reached before it"
        if self.why:
            return None
        self.earlier = result.attempts
        return Next(number=number, pause=pause)

    def announce(self, coming: Next, emit: Callable[[Event], None]) -> None:
        """Say what comes next, and why, in the log and in the events.

        Args:
            coming: The next attempt.
            emit: Takes the event.
        """
        most = self._options.max_restarts
        text = f"{self.earlier[-1]}; restart {coming.number} of at most {most} in {coming.pause:g} s"
        logger.warning("%s", text)
        emit(Event(kind="restarting", time=time.time(), detail=text))

    async def pause(self, waits: Patience, seconds: float) -> None:
        """Wait before another attempt, unless `end_pause` comes first.

        Args:
            waits: Of the job.
            seconds: How long.
        """
        await waits.within(seconds, self._end_of_pause())

    async def meanwhile(self, waits: Patience, work: Coroutine[Any, Any, T]) -> T | None:
        """Do something between two attempts, unless `end_pause` comes first, which cancels it.

        Args:
            waits: Of the job.
            work: What to do.

        Returns:
            Its result, None where it was cancelled.
        """
        working = asyncio.ensure_future(work)
        await waits.until_any(working, self._end_of_pause())
        if not working.done():
            working.cancel()
            await waits.until_any(working)
        return None if working.cancelled() else working.result()

    def _end_of_pause(self) -> asyncio.Future[None]:
        if self._pausing is None:
            self._pausing = asyncio.get_running_loop().create_future()
        return self._pausing

    def end_pause(self) -> None:
        """Wait no longer: there will be no other attempt."""
        if self._pausing is not None:
            resolve(self._pausing, None)


def requeued(environment: Mapping[str, str]) -> int:
    """Say how often the batch system has run the whole job anew.

    Args:
        environment: The launcher's.
    """
    count = environment.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0


def why_not(trials: Sequence[Trial], result: RunResult, cause: Cause | None, *, on_stall: str) -> str:
    """Say why another attempt is not worth while.

    Args:
        trials: All attempts so far, the last one being that of `result`.
        result: Of the last attempt.
        cause: Why it was stopped, None when it ended by itself.
        on_stall: What the user wants done with a job that has stalled.

    Returns:
        One clause, or "" when it is worth while.
    """
    if isinstance(cause, StopWanted | Straggling | TimeLimit | InternalError | StartFailed | NodeLost):
        return cause.words
    if isinstance(cause, Stalled) and on_stall != "restart":
        return f"{cause.words}, and --on-stall (on_stall) is {on_stall}"
    last = trials[-1]
    if result.failures and not isinstance(cause, Stalled):
        code = result.failures[0].exit_code
        if code in _NEVER:
            return _NEVER[code]
        name = last.error.partition(":")[0].rpartition(".")[2]
        if name in _WRONG_PROGRAM:
            return f"{name} says that the program or its installation is wrong"
    before = trials[-2] if len(trials) > 1 else None
    if before is not None and last.error and last.error == before.error and last.step == before.step:
        where = "before any step" if last.step is None else f"at step {last.step}"
        return f"the same error {where} as in the attempt before: {last.error}"
    quick = trials[-_QUICK_DEATHS:]
    if len(quick) == _QUICK_DEATHS and all(one.step is None and one.seconds < _QUICK for one in quick):
        return f"each of the last {_QUICK_DEATHS} attempts ended within {_QUICK:g} s and made no step"
    if _makes_no_progress(trials):
        return f"none of the last {_WITHOUT_PROGRESS} attempts got beyond step {_furthest(trials)}"
    return ""


def delay(first: float, restarts: int) -> float:
    """Seconds to wait before another attempt: devices may still be held.

    Args:
        first: Before the first restart.
        restarts: How many there have been.
    """
    return min(first * 2.0 ** min(restarts, 60), max(first, _LONGEST_DELAY))


def _furthest_of(result: RunResult) -> int | None:
    steps = [worker.progress.step for worker in result.workers if worker.progress is not None]
    return max(steps, default=None) or None


def _furthest(trials: Sequence[Trial]) -> int:
    return max(trial.step or 0 for trial in trials)


def _makes_no_progress(trials: Sequence[Trial]) -> bool:
    if len(trials) < _WITHOUT_PROGRESS or not _furthest(trials):
        return False
    earlier, last = trials[: 1 - _WITHOUT_PROGRESS], trials[1 - _WITHOUT_PROGRESS :]
    return _furthest(last) <= _furthest(earlier)


def _same_error(tail: Sequence[str]) -> str:
    """Find the exception that a worker died of, without numbers: addresses, ports and times differ.

    Codes are kept: another one is another error.
    """
    for line in reversed(tail):
        if found := re.match(_ERROR_LINE, line.strip()):
            return _DIFFERS.sub(lambda number: number[1] or "#", f"{found[1]}{found[2]}")[:200]
    return ""
