"""FMKManager: one job on this node, from its arguments to its result."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from davincirunsdk.concurrency import Patience, call_in_loop, in_thread, in_thread_or_here, resolve, shield
from davincirunsdk.errors import DavinciRunError, DistributedRuntimeError, WorkerSpawnError
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.logs.events_file import EVENTS_PATIENCE, EventLog
from davincirunsdk.logs.pump import LogPump
from davincirunsdk.logs.streams import BlockStream, Feed, LineStream, LogHub
from davincirunsdk.options import JobOptions, NodeKeywords, spelled_out
from davincirunsdk.steps.job import JobSteps
from davincirunsdk.supervision.attempt import Attempt
from davincirunsdk.supervision.cause import InternalError, StopWanted
from davincirunsdk.supervision.prepare import prepare
from davincirunsdk.supervision.verdict import INTERNAL_ERROR, judge, must_raise
from davincirunsdk.supervision.worker import spawn_error
from davincirunsdk.types import Event, JobState, RunResult, Stacks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Unpack

    from davincirunsdk.cluster import Cluster
    from davincirunsdk.output import Sink, Snapshot
    from davincirunsdk.supervision.prepare import Preparation
    from davincirunsdk.supervision.worker import Worker
    from davincirunsdk.types import Progress, WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

T = TypeVar("T")

_STREAM_BYTES = 4 << 20
"""What a stream holds for a slow reader."""
_DISPLAY_PATIENCE = 2.0
"""Seconds without progress after which a stuck display is given up at the end of a job."""
_REAPING_DELAY = 0.5
"""Seconds in which dead orphans collect, to be reaped together."""


class FMKManager:
    """One job on this node: starts its workers, supervises them, ends them.

    Use it as `async with FMKManager(["python", "train.py"]) as manager`. It belongs to the loop
    that entered it and may be awaited from any other loop, too. Leaving the block stops what still
    runs, with the grace period; cancelling the task that holds the block does the same and then
    lets the cancellation through.

    Args:
        command: Words of the command, strings or path-likes; relative paths in it are seen from
            `work_dir`.
        work_dir: Folder the workers run in, made if missing.
        log_dir: Folder of the log files, relative to the caller's folder; None for the platform's
            log folder, or `./log` where it has none.
        output_notebook: Show worker output in the notebook while it runs; no effect elsewhere.
        notify: Takes progress lines while the job is not started yet, such as what is waited for.
        **keywords: See `JobOptions`, which documents every option once.

    Attributes:
        inherits_orphans: True where this process is a sub-reaper (prctl(2)) and has no children but
            this job's: then its orphans are the job's too. The command line sets it.

    Raises:
        TypeError: `command` is one string, or another argument is of a wrong kind.
        ValueError: `command` is empty, or another argument has no sense.
        PlatformError: The current folder, from which a path is seen, has been removed.
    """

    @spelled_out(NodeKeywords)
    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        work_dir: str | os.PathLike[str] = "./",
        log_dir: str | os.PathLike[str] | None = "./log",
        *,
        output_notebook: bool = False,
        notify: Callable[[str], None] | None = None,
        **keywords: Unpack[NodeKeywords],
    ) -> None:
        options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
        self._set_up(options, notify)

    @classmethod
    def from_options(cls, options: JobOptions, *, notify: Callable[[str], None] | None = None) -> FMKManager:
        """Make a manager of options that have been checked before.

        Args:
            options: What to run.
            notify: Takes progress lines while the job is not started yet.
        """
        manager = cls.__new__(cls)
        manager._set_up(options, notify)
        return manager

    def _set_up(self, options: JobOptions, notify: Callable[[str], None] | None) -> None:
        self._options = options
        self._notify = notify or log_notice
        self._fail_fast = options.fail_fast
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attempt: Attempt | None = None
        self._launch: Preparation | None = None
        self._cluster: Cluster | None = None
        self._hub = LogHub(None)
        self._sink: Sink | None = None
        self._task: asyncio.Task[None] | None = None
        self._locating: asyncio.Future[Any] | None = None
        self._stop_early = False
        self._decided: asyncio.Future[None] | None = None
        self._result: RunResult | None = None
        self._final: RunResult | None = None
        self._error: DavinciRunError | None = None
        self._internal_error: Exception | None = None
        self._told = False
        self._events: list[Event] = []
        self._last_progress: dict[int | None, Event] = {}
        self._steps: JobSteps | None = None
        self._event_feeds: list[Feed[Event]] = []
        self._events_ended = False
        self._events_lock = threading.Lock()
        self._event_log: EventLog | None = None
        self._events_written: asyncio.Future[None] | None = None
        self._began = time.time()
        self._process = os.getpid()
        self._reaping: asyncio.TimerHandle | None = None
        self.inherits_orphans: bool = False

    async def __aenter__(self) -> FMKManager:
        """Start all workers.

        Returns:
            The manager, when all workers have been started.

        Raises:
            RankTableError: The rank table is wrong or not complete in time.
            PlatformError: Nodes, devices, a folder or the port cannot be had.
            WorkerSpawnError: The command or a worker cannot be started; nothing of it is left.
        """
        if self._loop is not None:
            raise RuntimeError("this FMKManager was entered before; make a new one for another run")
        loop = self._loop = asyncio.get_running_loop()
        self._decided = loop.create_future()
        try:
            launch = await self._prepare()
        except BaseException:
            self._end_readers()
            raise
        started: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._supervise(started), name=f"davincirun-{launch.job_id}")
        self._task.add_done_callback(lambda _: self._tell_decided())
        if self._stop_early:
            self._request_stop()
        waits = Patience(self._request_stop)
        with shield():
            await waits.until_any(started, self._task)
            if self._task.done() or waits.cancelled:
                await waits.until_any(self._task)
        waits.settle()
        if isinstance(self._error, WorkerSpawnError):
            raise self._error
        if self._task.done() and self._internal_error is not None and not started.done():
            raise self._internal_error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop what still runs, and let an error of the body through as it is."""
        if self._task is None:
            return
        self._request_stop()
        waits = Patience(self._request_stop)
        with shield():
            await waits.until_any(self._task)
        if self._error is not None and not self._told and kind is None:
            logger.error("the job failed and nobody waited for it:\n%s", self._error)
        waits.settle()

    async def wait(self) -> RunResult:
        """Wait for the end of the job.

        Cancelling cancels the waiting, not the job.

        Returns:
            The result of a job that succeeded or was stopped.

        Raises:
            DistributedRuntimeError: A worker failed by itself.
        """
        await self._in_own_loop(self._wait_here)
        return self.outcome()

    def outcome(self) -> RunResult:
        """Tell how the job ended, once that is `decided`; returns and raises as `wait` does."""
        self._told = True
        if self._internal_error is not None:
            raise self._internal_error
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self, *, now: bool = False) -> Awaitable[None]:
        """Stop the job: SIGTERM to all workers, SIGKILL when the grace period is over.

        The stop begins with the call. In a thread without a running loop the call returns when
        nothing of the job is left; in a loop, awaiting what it returns does. Cancelling that
        cancels the waiting, not the stop. The stop of a job that has ended does nothing; one that
        has no worker yet starts none.

        Args:
            now: SIGKILL at once.
        """
        owner = self._loop
        if owner is None or self._process != os.getpid():
            return _Ending(None)
        if self._task is None:
            # Still looking for nodes and devices: no worker will be started.
            self._stop_early = True
            if self._locating is not None:
                call_in_loop(owner, self._locating.cancel)
            return _Ending(None)
        if self._task.done():
            return _Ending(None)
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run_coroutine_threadsafe(self.end_here(now), owner).result()
            return _Ending(None)
        if running is owner:
            self._request_stop(now=now)
            return _Ending(self._gone)
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.end_here(now), owner))

    def destroy(self) -> Awaitable[None]:
        """End whatever is left of the job, survivors of a failure too; see `stop`."""
        return self.stop()

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        if self._error is not None or self._internal_error is not None:
            return JobState.FAILED
        if self._result is not None:
            return self._result.state
        if self._attempt is None:
            return JobState.PENDING
        return JobState.STOPPING if self._attempt.is_stopping else JobState.RUNNING

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The workers of this node as they stand now, in rank order."""
        return self._statuses(auxiliary=False)

    @property
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """Processes that serve the workers and are no rank, such as MindSpore's scheduler."""
        return self._statuses(auxiliary=True)

    @property
    def gone(self) -> bool:
        """True when the job has ended and nothing of it is left."""
        return self._task is not None and self._task.done()

    @property
    def error(self) -> DavinciRunError | None:
        """What `wait` raises, None while there is no failure."""
        return self._error

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to all processes of the job here that handle it; from the manager's own loop."""
        if self._attempt is not None:
            self._attempt.pass_on(number)

    def reap_orphans(self) -> None:
        """Reap dead children that are not ours to await, soon; for the command, which inherits them.

        From the manager's own loop. Not at once: after a worker's end there is more urgent work.
        """
        assert self._loop is not None
        if self._reaping is None:
            self._reaping = self._loop.call_later(_REAPING_DELAY, self._reap_orphans)

    def _reap_orphans(self) -> None:
        from davincirunsdk.leftovers.process_tree import reap_orphans

        self._reaping = None
        pids = {worker.pid for worker in self._attempt.workers} if self._attempt is not None else set()
        if None in pids:
            # One just started may have ended, and nobody knows yet that it is no orphan.
            self.reap_orphans()
        else:
            reap_orphans(but={*pids, guardian.pid()})

    @property
    def decided(self) -> bool:
        """True when the outcome is known, though survivors may still run."""
        return self._decided is not None and self._decided.done()

    @property
    def job_id(self) -> str:
        """Name of the job, as in its log files; "" before the start."""
        return self._launch.job_id if self._launch is not None else ""

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
        return self._hub.subscribe(None if ranks is None else frozenset(ranks), _STREAM_BYTES)

    def events(self) -> Feed[Event]:
        """Stream the job's events, from its first on, until it has ended."""
        feed: Feed[Event] = Feed()
        with self._events_lock:
            for event in sorted([*self._events, *self._last_progress.values()], key=lambda one: one.time):
                feed.offer(event)
            if self._events_ended:
                feed.close()
            else:
                self._event_feeds.append(feed)
        return feed

    async def stacks(self) -> Stacks:
        """Look where the running workers are, without harm to them, and write it beside the logs.

        With py-spy (`pip install davincirunsdk[stacks]`) every frame of every thread is seen; without,
        a script that calls `davincirunsdk.register_stacks` once shows its own; of others it is known what
        the kernel has them do. Cancelling cancels the waiting.

        Returns:
            Where each worker of this node is; workers at the same place stand together.
        """
        found: list[Stacks] = []

        async def take() -> None:
            found.append(await self._take_stacks())

        await self._in_own_loop(take)
        return found[0] if found else Stacks(time=time.time(), workers=())

    async def _take_stacks(self) -> Stacks:
        # It loads psutil, which a start need not wait for.
        from davincirunsdk.diagnosis.stacks import Target, take_and_save

        launch = self._launch
        assert launch is not None
        targets = [
            Target(rank=worker.spec.rank, name=worker.spec.name, pid=worker.pid)
            for worker in self._workers(auxiliary=False)
            if worker.running and worker.pid is not None
        ]
        return await in_thread(take_and_save, targets, launch.log_dir, launch.job_id)

    def attach_display(self) -> None:
        """Move a notebook's display to the calling cell; a blocking wait calls it when it begins."""
        attach = getattr(self._sink, "attach", None)
        if attach is not None:
            attach()

    def keep_survivors(self) -> None:
        """From now on a failure stops nobody; for callers that ask for it after the start."""
        self._fail_fast = False
        if self._attempt is not None:
            self._attempt.fail_fast = False

    async def end_here(self, now: bool = False) -> None:
        """Stop the job and wait until nothing is left, in the manager's own loop; see `stop`."""
        self._request_stop(now=now)
        if self._task is not None:
            await self._gone()

    @property
    def owner(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the job runs in, None before the start."""
        return self._loop

    async def _prepare(self) -> Preparation:
        from davincirunsdk.platforms import locate, without_outer_job

        inherited = dict(os.environ)
        # Inside another job's worker, too, what the caller gives for this one counts.
        options = self._options
        env = {**without_outer_job(inherited), **options.env}
        assert self._loop is not None
        locating = self._loop.create_task(locate(options, env, notify=self._notify))
        cluster = self._cluster = await self._before_start(locating)
        # It may hang on a dead mount: whoever gives up the start does not wait for it.
        launch = await self._before_start(
            in_thread(
                lambda: prepare(options, cluster, inherited=inherited, on_trouble=self._on_trouble),
                unwanted=lambda late: late.close(),
            )
        )
        pumps: list[LogPump] = []
        try:
            self._launch = launch
            steps = self._steps = JobSteps(
                launch.first.specs, self._options.progress_pattern, self._note_progress
            )
            self._open_display(launch)
            for spec, file in zip(launch.first.specs, launch.first.files, strict=True):
                pumps.append(LogPump(spec.rank, file, self._hub, steps.scanners[len(pumps)]))
            self._event_log = EventLog(launch.events, launch.job_id, cluster.node.name)
            self._events_written = self._event_log.start()
        except BaseException as error:
            if self._steps is not None:
                self._steps.end()
            if self._sink is not None:
                self._sink.close(0.0)
            for pump in pumps:
                pump.discard()
            launch.close()
            if isinstance(error, OSError):
                specs = launch.first.specs
                raise spawn_error(specs[min(len(pumps), len(specs) - 1)], error) from None
            raise
        self._attempt = Attempt(
            launch.first.specs,
            pumps,
            mark=launch.mark,
            grace_period=options.grace_period,
            fail_fast=self._fail_fast,
            inherits_orphans=self.inherits_orphans,
            ranks_elsewhere=len(cluster.nodes) > 1,
            emit=self._emit,
        )
        return launch

    async def _before_start(self, future: asyncio.Future[T]) -> T:
        """Await a part of the start that a stop gives up."""
        self._locating = future
        try:
            return await future
        except asyncio.CancelledError:
            if self._stop_early:
                raise WorkerSpawnError("the job was stopped before a worker was started") from None
            raise

    def _open_display(self, launch: Preparation) -> None:
        display = self._options.display
        if not display.on_stream and not display.output_notebook:
            return
        from davincirunsdk.output import choose_sink, parse_prefix

        self._sink = choose_sink(
            names={spec.rank: spec.name for spec in launch.first.specs},
            snapshot=self._snapshot,
            echo=display.ranks if display.on_stream else None,
            output_notebook=display.output_notebook,
            stream=sys.stdout if display.on_stream else None,
            live=display.live,
            prefix=parse_prefix(display.prefix),
            colour=display.color,
        )
        if self._sink is not None:
            self._hub.show = self._sink.write

    def _snapshot(self) -> Snapshot:
        from davincirunsdk.output import Snapshot

        return Snapshot(
            job_id=self.job_id,
            state=self.state,
            workers=(*self.workers, *self.auxiliaries),
            log_dir=self._launch.log_dir if self._launch is not None else self._options.default_log_dir,
            report=str(self._error) if self._error is not None else "",
        )

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        attempt = self._attempt
        assert attempt is not None
        assert self._steps is not None
        waits = Patience(self._request_stop)
        self._steps.begin()
        try:
            await attempt.run(
                started=lambda: resolve(started, None),
                decided=lambda: self._judge(waits, at_end=False),
            )
        except WorkerSpawnError as error:
            self._error = error
        except Exception as error:
            self._internal_error = error
        try:
            self._steps.end()
            await self._judge(waits, at_end=True)
        except Exception as error:
            self._note_internal_error(error)
        finally:
            await self._end_streams(waits)
        waits.settle()

    def _note_internal_error(self, error: Exception) -> None:
        """Tell an error of our own that came when the workers had ended."""
        self._internal_error = self._internal_error or error
        cause = InternalError.of(error)
        logger.error("%s\n%s", cause.words, cause.traceback)
        now = time.time()
        self._emit(Event(kind="internal_error", time=now, detail=cause.traceback))
        detail = f"{JobState.FAILED}: {cause.words}"
        self._emit(Event(kind="finished", time=now, exit_code=INTERNAL_ERROR, detail=detail))

    async def _end_streams(self, waits: Patience) -> None:
        """Let display, events file and readers come to their ends."""
        if self._sink is not None:
            await waits.wait(in_thread_or_here(self._sink.close, _DISPLAY_PATIENCE))
        assert self._event_log is not None
        assert self._events_written is not None
        self._event_log.close()
        await waits.within(EVENTS_PATIENCE, self._events_written)
        self._end_readers()

    def _end_readers(self) -> None:
        self._hub.close()
        with self._events_lock:
            self._events_ended = True
            for feed in self._event_feeds:
                feed.close()

    async def _judge(self, waits: Patience, *, at_end: bool) -> None:
        """Turn what the workers did into a result or an error; at the end once more, with all that came."""
        launch, attempt, cluster = self._launch, self._attempt, self._cluster
        assert launch is not None
        assert attempt is not None
        assert cluster is not None
        seen, now = attempt.seen(), time.time()
        # In a thread: looking through much output takes its time.
        result = await waits.wait(
            in_thread_or_here(
                lambda: judge(
                    seen,
                    job_id=launch.job_id,
                    log_dir=launch.log_dir,
                    cluster=cluster,
                    began=self._began,
                    ended=now,
                )
            )
        )
        if result.report is not None and must_raise(result.report):
            self._error = DistributedRuntimeError(result.report.text, report=result.report, result=result)
        if not at_end:
            self._result = None if self._error is not None else result
            self._tell_decided()
            return
        blamed = result.report.root_cause if result.report is not None else None
        cause = f": {blamed.name}, {blamed.reason}" if result.failures and blamed is not None else ""
        if isinstance(self._error, WorkerSpawnError):
            result = replace(result, state=JobState.FAILED, exit_code=self._error.exit_code)
            cause = f": {self._error}"
        elif self._internal_error is not None:
            result = replace(result, state=JobState.FAILED, exit_code=INTERNAL_ERROR)
            cause = f": {InternalError.of(self._internal_error).words}"
        self._result = self._final = result
        detail = f"{result.state}{cause}"
        self._emit(Event(kind="finished", time=result.ended, exit_code=result.exit_code, detail=detail))

    def _request_stop(self, *, now: bool = False) -> None:
        if self._attempt is not None and self._task is not None and not self._task.done():
            self._attempt.stop(StopWanted(), now=now)

    async def _gone(self) -> None:
        assert self._task is not None
        await asyncio.wait({self._task})

    async def _wait_here(self) -> None:
        assert self._decided is not None
        await asyncio.wait({self._decided})

    async def _in_own_loop(self, function: Callable[[], Any]) -> None:
        owner = self._loop
        if owner is None or self._task is None:
            raise RuntimeError(
                "this FMKManager was not started: use `async with` or start_distributed_train()"
            )
        if self._process != os.getpid():
            raise RuntimeError(
                f"this FMKManager belongs to process {self._process}, from which this one was forked"
            )
        if self._task.done():
            return
        if asyncio.get_running_loop() is owner:
            await function()
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(), owner))

    def _tell_decided(self) -> None:
        assert self._decided is not None
        resolve(self._decided, None)

    def _emit(self, event: Event) -> None:
        with self._events_lock:
            if event.progress is None:
                self._events.append(event)
            else:
                # Who comes late needs the last one only, and days of them would fill the memory.
                self._last_progress[event.rank] = event
            for feed in self._event_feeds:
                feed.offer(event)
        if self._event_log is not None:
            self._event_log.put(event)

    def _note_progress(self, rank: int, progress: Progress) -> None:
        self._emit(
            Event(kind="progress", time=time.time(), rank=rank, detail=str(progress), progress=progress)
        )

    def _on_trouble(self, text: str) -> None:
        logger.warning("%s", text)
        self._emit(Event(kind="warning", time=time.time(), detail=text))

    def _statuses(self, *, auxiliary: bool) -> tuple[WorkerStatus, ...]:
        if self._final is not None:
            # As they were judged: one that was stopped may have been failing already.
            return self._final.auxiliaries if auxiliary else self._final.workers
        return tuple(worker.status() for worker in self._workers(auxiliary=auxiliary))

    def _workers(self, *, auxiliary: bool) -> list[Worker]:
        group = self._attempt
        return [] if group is None else [w for w in group.workers if w.spec.auxiliary is auxiliary]


class _Ending:
    """What `stop` returns in the manager's own loop: awaiting it waits until nothing is left."""

    def __init__(self, wait: Callable[[], Awaitable[None]] | None) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, None, None]:
        if self._wait is not None:
            yield from self._wait().__await__()


def log_notice(text: str) -> None:
    """Log a progress line of the start, such as what is waited for."""
    # A warning: somebody waits for the job, and only those reach a program without logging set up.
    logger.warning("%s", text)
