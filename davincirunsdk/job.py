"""What every job is, on one node or on many: what its user sees, and its life until nothing is left."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from davincirunsdk import __version__
from davincirunsdk.channels import Channels
from davincirunsdk.concurrency import (
    Patience,
    in_thread,
    resolve,
    running_loop,
    shield,
)
from davincirunsdk.errors import DavinciRunError, WorkerSpawnError
from davincirunsdk.logs.streams import BlockStream, Feed, LineStream
from davincirunsdk.outcome import Outcome
from davincirunsdk.own_loop import OwnLoop
from davincirunsdk.phrases import count
from davincirunsdk.supervision.cause import InternalError
from davincirunsdk.supervision.verdict import INTERNAL_ERROR
from davincirunsdk.types import Event, JobState, RunResult, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from davincirunsdk.cluster import Fact
    from davincirunsdk.ending import Ending
    from davincirunsdk.metrics import MetricsFile
    from davincirunsdk.options import JobOptions
    from davincirunsdk.output import Snapshot
    from davincirunsdk.supervision.cause import TimeLimit
    from davincirunsdk.types import FailureReport, WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

_ALIVE = frozenset({WorkerState.RUNNING, WorkerState.STOPPING})


class JobBody(ABC):
    """What both kinds of managers share.

    A job belongs to the loop that entered it and may be awaited from any other loop, too. Leaving
    the block stops what still runs, with the grace period; cancelling the task that holds the block
    does the same and then lets the cancellation through.

    Subclasses say how workers are found (`_prepare`), started and supervised (`_run`), stopped
    (`_begin_stop`) and judged (`_judge`); streams, events, display and the order of the end are here.
    Members with an underscore are for this package's own modules.
    """

    _started: asyncio.Future[None]
    _decided: asyncio.Future[None]

    def _set_up(
        self,
        options: JobOptions,
        notify: Callable[[str], None] | None,
        on_event: Callable[[Event], object] | None,
    ) -> None:
        self._options = options
        self._notify = notify or log_notice
        self._channels = Channels(on_event)
        self._home = OwnLoop(type(self).__name__)
        self._began = time.time()
        self._preparing: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_wanted = False
        self._ends_at = math.inf
        self._stop_code = 128 + signal.SIGTERM
        self._stop_reason = ""
        self._outcome = Outcome()
        self._awaited = False

    def _about(self) -> tuple[tuple[str, str | int], ...]:
        """What the events file says of the job: who looks after it, and what it runs."""
        table = self._options.rank_table
        return (
            ("launcher", os.getpid()),
            ("started_by", "davincirun" if self._options.command_line else "a program"),
            ("command", shlex.join(self._options.command)),
            ("versions", f"davincirunsdk {__version__}, Python {platform.python_version()}"),
            *((("rank_table", str(table)),) if table is not None else ()),
        )

    # What a job does, by its kind.

    @abstractmethod
    async def _prepare(self) -> None:
        """Do all that comes before the first worker; an error or a cancellation leaves nothing behind."""

    @abstractmethod
    async def _run(self, waits: Patience) -> None:
        """Start the workers, say so with `_tell_started`, and see them to their end.

        Raises:
            DavinciRunError: They could not all be started; nothing of them is left.
        """

    @abstractmethod
    async def _judge(self, waits: Patience) -> RunResult:
        """Say how the job ended, with the report unless all went well."""

    async def _agree(self, waits: Patience, result: RunResult) -> RunResult:
        """Give what the launchers of other nodes have to say to the result.

        Raises:
            DavinciRunError: This node's part cannot be one of the job.
        """
        return result

    @abstractmethod
    def _begin_stop(self, *, now: bool, reason: str) -> None:
        """Begin to stop the running workers, or hasten that; never blocks."""

    @abstractmethod
    def _reach_time_limit(self, limit: TimeLimit) -> None:
        """Stop the running workers: the job's time is over."""

    async def _give_back(self, waits: Patience) -> None:  # noqa: B027 # this host needs nothing back
        """Give back what the job ran on; last, for all is told and written by then."""

    def _fault_is_told(self, error: Exception) -> bool:
        """Tell whether events and log have this error of our own already."""
        return False

    @abstractmethod
    def _is_stopping(self) -> bool:
        """Tell whether the workers have been told to end."""

    @abstractmethod
    def signal_workers(self, number: int) -> None:
        """Pass a signal on to every running worker; from the job's own loop."""

    @property
    @abstractmethod
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The workers as they stand now, in rank order."""

    @property
    @abstractmethod
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """Processes that serve the workers and are not ranks, such as MindSpore's scheduler."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Host names of the nodes of which this job starts the workers; () where it is this host alone."""
        return ()

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Which source said what about size and place of the job; () where nobody was asked, or not yet."""
        return ()

    @property
    @abstractmethod
    def job_id(self) -> str:
        """Name of the job, as in its log files; "" before the start."""

    # What its user sees.

    async def __aenter__(self) -> Self:
        """Start all workers.

        Returns:
            The manager, when all workers have been started.

        Raises:
            RankTableError: The rank table is wrong or not complete in time.
            PlatformError: Nodes, devices, a folder or the port cannot be had.
            WorkerSpawnError: The command or a worker cannot be started; nothing of it is left.
        """
        loop = self._home.enter()
        self._started, self._decided = loop.create_future(), loop.create_future()
        self._channels.bind(loop)
        waits = Patience(self._request_stop)
        try:
            await self._prepare_with(waits)
        except BaseException:
            self._channels.discard()
            self._tell_over()
            raise
        self._task = loop.create_task(self._supervise(), name=f"davincirun-{self.job_id}")
        self._task.add_done_callback(self._tell_over)
        if self._stop_wanted:
            self._request_stop()
        with shield():
            await waits.until_any(self._started, self._task)
            if self._task.done() or waits.cancelled:
                await waits.until_any(self._task)
        waits.settle()
        if (wrong := self._outcome.start_error or self._outcome.fault) is not None:
            self._outcome.throw(wrong)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop what still runs, and let an error of the body through as it is."""
        if self._task is None:
            return
        if not self._task.done() and isinstance(error, asyncio.CancelledError):
            self._note_who_ran(error)
        self._request_stop()
        waits = Patience(self._request_stop)
        with shield():
            await waits.until_any(self._task)
        outcome = self._outcome
        unsaid = not outcome.told and kind is None
        if outcome.failure is not None and unsaid:
            logger.error("the job failed and nobody waited for it:\n%s", outcome.failure)
        waits.settle()
        if outcome.fault is not None and unsaid:
            raise outcome.fault

    def __await__(self) -> NoReturn:
        """Refuse what does not start a job."""
        raise TypeError(
            "the manager of a job is not awaited: write `async with ... as manager:` to start the job, "
            "and `await manager.wait()` inside to wait for its end"
        )

    def wait(self) -> Ending[RunResult]:
        """Wait for the end of the job.

        In a thread with a running event loop the call returns a coroutine; cancelling it cancels the
        waiting, not the job. In a thread without one the call itself waits and returns the result.

        Returns:
            The result of a job that succeeded or was stopped.

        Raises:
            DistributedRuntimeError: A worker failed by itself.
            RuntimeError: The job was never started, or belongs to the process that this one was forked
                from.
        """
        return self._home.call("wait", self._wait_here)

    def stop(self, *, now: bool = False) -> Ending[None]:
        """Stop the job: SIGTERM to all workers, SIGKILL when the grace period is over.

        The stop begins with the call. In a thread with a running event loop the call returns a
        coroutine that waits until nothing of the job is left; it need not be awaited, and cancelling
        it cancels the waiting, not the stop. In a thread without one the call itself waits. The stop
        of a job that has ended does nothing; one that has no worker yet starts none.

        Args:
            now: SIGKILL at once.

        Raises:
            RuntimeError: The job was never started, or belongs to the process that this one was forked
                from.
        """
        # At once, whether the result is awaited or not.
        self._home.call_now("stop", partial(self._request_stop, now=now))
        return self._home.call("stop", self._home.until_over)

    def destroy(self) -> Ending[None]:
        """End whatever is left of the job, survivors of a failure too; see `stop`."""
        self._home.loop_of("destroy")
        return self.stop()

    @property
    def state(self) -> JobState:
        """Where the job stands: FAILED as soon as that is known, though others may still be stopping."""
        if self.error is not None:
            return JobState.FAILED
        if self._outcome.result is not None:
            return self._outcome.result.state
        if self._task is None or not self._started.done():
            return JobState.PENDING
        return JobState.STOPPING if self._is_stopping() else JobState.RUNNING

    @property
    def error(self) -> BaseException | None:
        """What `wait` raises, None while there is no failure."""
        return self._outcome.error

    def logs(self, ranks: Iterable[int] | None = None) -> LineStream:
        """Stream output as lines, in order per rank, from the last MiB before now on.

        Any number of streams may be open; a slow reader slows nobody, its stream counts what it
        left out in `dropped`.

        Args:
            ranks: Which ranks, None for all.

        Returns:
            An asynchronous iterator of `LogLine`, which ends with the job.
        """
        return LineStream(self.log_blocks(ranks))

    def log_blocks(self, ranks: Iterable[int] | None = None) -> BlockStream:
        """Stream output as `LogBlock`s of bytes; otherwise as `logs`."""
        return self._channels.blocks(ranks)

    def events(self) -> Feed[Event]:
        """Stream the job's events, from its first on, until it has ended.

        Events of several nodes carry the times of their nodes' own clocks.
        """
        return self._channels.events()

    def __repr__(self) -> str:
        """Name, command and state; never a variable's value."""
        command = " ".join(self._options.command)
        shown = command if len(command) <= 60 else f"{command[:57]}..."
        ranks = f", {count(len(self.workers), 'worker')}" if self.workers else ""
        return f"<{type(self).__name__} {self.job_id or '(not started)'}: {shown!r}, {self.state}{ranks}>"

    # What our own modules use.

    @property
    def _is_over(self) -> bool:
        """True when nothing of the job is left, or none of it was ever started in this process."""
        return self._home.is_over

    async def _end_here(self, now: bool = False) -> None:
        """Stop the job and wait until nothing is left, in the job's own loop."""
        self._request_stop(now=now)
        await self._home.until_over()

    def note_signal(self, number: signal.Signals) -> None:
        """Learn which signal is the reason of the stop that comes next; called by the command."""
        self._stop_code, self._stop_reason = 128 + number, number.name

    def _request_stop(self, *, now: bool = False, reason: str = "stop was asked for") -> None:
        self._stop_wanted = True
        if self._task is None:
            # Still looking for nodes and devices: no worker will be started.
            if self._preparing is not None:
                self._preparing.cancel()
        elif not self._task.done():
            self._begin_stop(now=now, reason=self._stop_reason or reason)

    def _say(self, text: str) -> None:
        logger.warning("%s", text)
        self._channels.emit(Event(kind="warning", time=time.time(), detail=text))

    def _tell_started(self) -> None:
        resolve(self._started, None)

    async def _decide(self, waits: Patience) -> None:
        """Say how the job ends, though survivors may still run."""
        self._outcome.decide(await self._judge(waits))
        resolve(self._decided, None)

    def _snapshot(self) -> Snapshot:
        from davincirunsdk.output import Snapshot

        return Snapshot(
            job_id=self.job_id,
            state=self.state,
            workers=(*self.workers, *self.auxiliaries),
            log_dir=self._log_dir,
            report=str(self._outcome.failure or ""),
            page=None if self._options.html is None else self._document(self._options.html),
        )

    @property
    def _log_dir(self) -> Path:
        return self._options.default_log_dir

    # How a job lives.

    async def _prepare_with(self, waits: Patience) -> None:
        loop = asyncio.get_running_loop()
        self._preparing = preparing = loop.create_task(self._prepare(), name="davincirun-prepare")
        try:
            await asyncio.wait({preparing})
        except asyncio.CancelledError as cancellation:
            waits.note(cancellation)
        with shield():
            await waits.until_any(preparing)
        if preparing.cancelled() and not waits.cancelled:
            raise WorkerSpawnError("the job was stopped before a worker was started")
        if preparing.cancelled() or preparing.exception() is not None:
            waits.settle()
        preparing.result()

    async def _supervise(self) -> None:
        """Run, judge, and end what leaves the job, in this order, whatever each of them raises."""
        waits = Patience(self._request_stop)
        cancellation: asyncio.CancelledError | None = None
        metrics = self._begin_metrics()
        limits = self._set_limits()
        for step in (
            self._run,
            self._conclude,
            self._channels.close,
            self._write_documents,
            self._give_back,
        ):
            try:
                await step(waits)
            except asyncio.CancelledError as error:
                cancellation = error
            except DavinciRunError as error:
                self._outcome.note_start_error(error)
            except Exception as error:
                self._note_fault(error)
            for limit in limits:
                # The first step is the run: what comes after it has bounds of its own.
                limit.cancel()
        self._channels.end_readers()
        if metrics is not None:
            await metrics.end(waits)
        if cancellation is not None:
            raise cancellation
        waits.settle()

    def _set_limits(self) -> list[asyncio.TimerHandle]:
        options = self._options
        if options.timeout is None:
            return []
        # Loaded only here: most jobs have none.
        from davincirunsdk.supervision.time_limit import set_limits

        self._ends_at = time.monotonic() + options.timeout
        return set_limits(
            options.timeout,
            reach=self._reach_time_limit,
            warn_signal=options.warn_signal,
            warn_before=options.warn_before,
            warn=self._warn_workers,
        )

    def _warn_workers(self, number: signal.Signals, before: float) -> None:
        self._say(f"{before:g} s are left until the time limit: {number.name} to the workers")
        self.signal_workers(number)

    async def _conclude(self, waits: Patience) -> None:
        try:
            result = await self._judge(waits)
            try:
                result = await self._agree(waits, result)
            except DavinciRunError as error:
                self._outcome.note_start_error(error)
        except Exception as error:
            self._note_fault(error)
            self._finish(time.time(), INTERNAL_ERROR, f"{JobState.FAILED}: {InternalError.of(error).words}")
            return
        detail = self._outcome.conclude(result)
        result = self._outcome.final or result
        self._finish(result.ended, result.exit_code, detail, result.report)

    def _finish(
        self, moment: float, exit_code: int, detail: str, report: FailureReport | None = None
    ) -> None:
        self._channels.emit(
            Event(kind="finished", time=moment, exit_code=exit_code, detail=detail, report=report)
        )

    async def _write_documents(self, waits: Patience) -> None:
        """Write what was asked for when all is known, and run the user's command; neither changes the end."""
        options, result = self._options, self._outcome.final
        if result is None or not (options.report or options.html or options.on_end):
            return
        # Loaded only here: most jobs ask for none of it.
        from davincirunsdk.documents import write_all

        await write_all(waits, options, result, events=self._events_path, place=self._document)

    def _begin_metrics(self) -> MetricsFile | None:
        if self._options.metrics is None:
            return None
        from davincirunsdk.metrics import MetricsFile, openmetrics

        return MetricsFile(
            self._own_document(self._options.metrics),
            lambda: openmetrics(self.job_id, self.state, self.workers, self._restart_count),
            self._started,
        )

    @property
    def _restart_count(self) -> int:
        """How often the workers were started again so far."""
        return 0

    def _own_document(self, path: Path) -> Path:
        """Where this process writes what each node has of its own."""
        return path

    def _document(self, path: Path) -> Path | None:
        """Where this process writes a document of the whole job; None where another one writes it."""
        return path

    @property
    def _events_path(self) -> Path | None:
        """The events file, None without one."""
        return self._channels.events_path

    def report_html(self) -> Ending[str]:
        """Draw the run report as it stands: a page without scripts that needs no other file.

        A coroutine or the page itself, as with `wait`; cancelling cancels the waiting.

        Returns:
            The page.

        Raises:
            RuntimeError: The job was never started, or its events could not be written.
            OSError: The events file cannot be read.
        """
        return self._home.call("report_html", self._draw)

    async def _draw(self) -> str:
        events = self._events_path
        if events is None:
            raise RuntimeError("the events of this job could not be written: there is nothing to draw")
        from davincirunsdk.documents import page

        # When all is over the call needs no loop, and there may be none.
        return page(events) if running_loop() is None else await in_thread(page, events)

    def _note_fault(self, error: Exception) -> None:
        """Keep an error of our own: it is the outcome, and it is never silent."""
        self._outcome.fault = self._outcome.fault or error
        if not self._fault_is_told(error):
            cause = InternalError.of(error)
            logger.error("%s\n%s", cause.words, cause.traceback)
            self._channels.emit(Event(kind="internal_error", time=time.time(), detail=cause.traceback))

    def _note_who_ran(self, error: BaseException) -> None:
        ran = [worker.name for worker in self.workers if worker.state in _ALIVE]
        listed = ", ".join(ran[:16]) + (", ..." if len(ran) > 16 else "")
        who = f"{len(ran)} of {len(self.workers)} workers still ran: {listed}"
        if sys.version_info >= (3, 11):
            error.add_note(f"davincirunsdk: this has stopped job {self.job_id}; {who}")
        self._request_stop(reason=f"the task that holds the job was cancelled; {who}")

    def _tell_over(self, _: object = None) -> None:
        resolve(self._decided, None)
        self._home.end()

    async def _wait_here(self) -> RunResult:
        self._awaited = True
        if not self._decided.done():
            await asyncio.wait({self._decided})
        return self._outcome.take()


def log_notice(text: str) -> None:
    """Log a progress line of the start, such as what is waited for."""
    # A warning: somebody waits for the job, and only those reach a program without logging set up.
    logger.warning("%s", text)
