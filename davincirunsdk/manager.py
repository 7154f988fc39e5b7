"""FMKManager: one job on this node, from its arguments to its result."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk.cluster import file_name
from davincirunsdk.concurrency import Patience, in_thread, in_thread_or_here, resolve
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.host.claims import Claims
from davincirunsdk.job import JobBody, log_notice
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.logs.events_file import EventLog
from davincirunsdk.logs.pump import LogPump
from davincirunsdk.options import JobOptions, NodeKeywords, spelled_out, without_effect
from davincirunsdk.steps.job import JobSteps
from davincirunsdk.supervision.attempt import Attempt
from davincirunsdk.supervision.cause import RanksEnded, StopWanted, TimeLimit
from davincirunsdk.supervision.prepare import prepare
from davincirunsdk.supervision.restarts import Restarts, requeued
from davincirunsdk.supervision.verdict import judge
from davincirunsdk.supervision.worker import spawn_error
from davincirunsdk.types import Event, JobState, Stacks, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from davincirunsdk.cluster import Cluster, Fact
    from davincirunsdk.ending import Ending
    from davincirunsdk.engines.meeting import Again, Meeting
    from davincirunsdk.supervision.prepare import Launch, Preparation
    from davincirunsdk.supervision.watch import StallWatch
    from davincirunsdk.supervision.worker import Worker
    from davincirunsdk.types import Progress, RunResult, WorkerStatus

__all__ = ["FMKManager", "log_notice"]

logger: logging.Logger = logging.getLogger("davincirunsdk")

_REAPING_DELAY = 0.5
"""Seconds in which dead orphans collect, to be reaped together."""


class FMKManager(JobBody):
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
        on_event: Called with every event, in the job's loop; it must not block.
        **keywords: See `JobOptions`, which documents every option once.

    Raises:
        TypeError: `command` is one string, or another argument is of a wrong kind.
        ValueError: `command` is empty, or another argument is out of range.
        PlatformError: The current folder, from which a path is seen, has been removed.
    """

    _attempt: Attempt | None = None
    _meeting: Meeting | None = None
    _between_attempts: bool = False
    _launch: Preparation | None = None
    _cluster: Cluster | None = None
    _steps: JobSteps | None = None
    _claims: Claims | None = None
    _reaping: asyncio.TimerHandle | None = None
    _restarts: Restarts | None = None
    _pausing: asyncio.Future[None] | None = None
    _stopped_in_pause: bool = False
    _inherits_orphans: bool = False

    @spelled_out(NodeKeywords)
    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        work_dir: str | os.PathLike[str] = "./",
        log_dir: str | os.PathLike[str] | None = "./log",
        *,
        output_notebook: bool = False,
        notify: Callable[[str], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
        **keywords: Unpack[NodeKeywords],
    ) -> None:
        options = JobOptions.of(command, work_dir, log_dir, output_notebook=output_notebook, **keywords)
        self._set_up(options, notify, on_event)

    @classmethod
    def from_options(
        cls,
        options: JobOptions,
        *,
        notify: Callable[[str], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> FMKManager:
        """Make a manager of options that have been checked before.

        Args:
            options: What to run.
            notify: Takes progress lines while the job is not started yet.
            on_event: Called with every event, in the job's loop.
        """
        manager = cls.__new__(cls)
        manager._set_up(options, notify, on_event)
        return manager

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The workers of this node as they stand now, in rank order."""
        return self._statuses(auxiliary=False)

    @property
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """Processes that serve the workers and are not ranks, such as MindSpore's scheduler."""
        return self._statuses(auxiliary=True)

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Which source said what about size and place of the job, in order of trust; () before the start."""
        return self._cluster.facts if self._cluster is not None else ()

    @property
    def job_id(self) -> str:
        """Name of the job, as in its log files; "" before the start."""
        return self._launch.job_id if self._launch is not None else ""

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to all processes of the job here that handle it; from the manager's own loop."""
        if self._attempt is not None:
            self._attempt.pass_on(number)

    def stacks(self) -> Ending[Stacks]:
        """Look where the running workers are, without harm to them, and write it beside the logs.

        With py-spy (`pip install davincirunsdk[stacks]`) every frame of every thread is seen; without,
        a script that calls `davincirunsdk.register_stacks` once shows its own; of others it is known what
        the kernel has them do. A coroutine or the result itself, as with `wait`; cancelling cancels the
        waiting.

        Returns:
            Where each worker of this node is; workers at the same place stand together.
        """
        return self._in_own_loop("stacks", self._take_stacks)

    async def _take_stacks(self) -> Stacks:
        return await in_thread(self._look_at_stacks)

    def _look_at_stacks(self) -> Stacks:
        """Take and save the stacks of all running workers; blocking, for a thread."""
        # It loads psutil, which a start need not wait for.
        from davincirunsdk.diagnosis.stacks import Target, take_and_save

        targets = [
            Target(rank=worker.spec.rank, name=worker.spec.name, pid=worker.pid)
            for worker in self._workers(auxiliary=False)
            if worker.running and worker.pid is not None
        ]
        if not targets:
            return Stacks(time=time.time(), workers=())
        return take_and_save(targets, self._log_dir, self.job_id)

    @property
    def _log_dir(self) -> Path:
        return self._launch.log_dir if self._launch is not None else self._options.default_log_dir

    def _statuses(self, *, auxiliary: bool) -> tuple[WorkerStatus, ...]:
        if self._final is not None:
            # As they were judged: one that was stopped may have been failing already.
            return self._final.auxiliaries if auxiliary else self._final.workers
        return tuple(worker.status() for worker in self._workers(auxiliary=auxiliary))

    def _workers(self, *, auxiliary: bool) -> list[Worker]:
        group = self._attempt
        return [] if group is None else [w for w in group.workers if w.spec.auxiliary is auxiliary]

    async def _prepare(self) -> None:
        claims = self._claims = Claims()
        try:
            await self._prepare_with_claims(claims)
        except BaseException:
            claims.release()
            raise

    async def _prepare_with_claims(self, claims: Claims) -> None:
        from davincirunsdk.platforms import locate, without_outer_job
        from davincirunsdk.platforms.holding import hold

        options = self._options
        inherited = dict(os.environ)
        # Inside another job's worker, too, what the caller gives for this one counts.
        env = {**without_outer_job(inherited), **options.env}
        cluster = await locate(options, env, notify=self._notify)
        if JOB_MARK not in inherited:  # a worker's own job shares the cards of the job outside
            claims.job = options.name or file_name(cluster.job_id)
            cluster = await hold(cluster, claims, env, wait=options.wait_devices, notify=self._notify)
        self._cluster = cluster
        # It may hang on a dead mount: whoever gives up the start does not wait for it.
        launch = await in_thread(
            lambda: prepare(options, cluster, inherited=inherited, on_trouble=self._on_trouble),
            unwanted=lambda late: late.close(),
        )
        try:
            self._launch = launch
            for text in without_effect(
                options, world_size=cluster.world_size, environment=launch.first.specs[-1].env
            ):
                self._on_trouble(text)
            names = {spec.rank: spec.name for spec in launch.first.specs}
            self._channels.open_display(options.display, names, self._snapshot)
            self._attempt = self._make_attempt(launch, launch.first)
            about = (("mark", launch.mark.rpartition("/")[2]), *self._about())
            self._channels.open_event_log(EventLog(launch.events, launch.job_id, cluster.node.name, about))
            if len(cluster.nodes) > 1 and options.meet != "off":
                self._meeting = await self._meet(cluster, env)
            # Nodes that meet start again together, as one.
            alone = 1 if self._meeting is not None else len(cluster.nodes)
            if options.max_restarts and not options.fail_fast:
                self._on_trouble("no restart: fail_fast=False keeps the workers that survive a failure")
            self._restarts = Restarts(options, nnodes=alone, requeued=requeued(inherited))
        except BaseException as error:
            if self._attempt is not None:
                for worker in self._attempt.workers:
                    worker.pump.discard()
            if self._steps is not None:
                self._steps.end()
            launch.close()
            if isinstance(error, OSError) and not isinstance(error, WorkerSpawnError):
                raise spawn_error(launch.first.specs[0], error) from None
            raise

    def _make_attempt(self, launch: Preparation, start: Launch) -> Attempt:
        """Make an attempt of what is to be started.

        Raises:
            WorkerSpawnError: There are no descriptors to be had; its files are still open.
        """
        options = self._options
        pumps: list[LogPump] = []
        steps = JobSteps(start.specs, options.progress_pattern, self._note_progress)
        try:
            for spec, file in zip(start.specs, start.files, strict=True):
                pumps.append(LogPump(spec.rank, file, self._channels.hub, steps.scanners[len(pumps)]))
        except BaseException as error:
            steps.end()
            for pump in pumps:
                pump.discard()
            if isinstance(error, OSError):
                raise spawn_error(start.specs[len(pumps)], error) from None
            raise
        self._steps = steps
        assert self._cluster is not None
        return Attempt(
            start.specs,
            pumps,
            mark=launch.mark,
            grace_period=options.grace_period,
            stop_signal=signal.Signals[options.stop_signal],
            fail_fast=options.fail_fast,
            keep_going=options.keep_going,
            straggler_timeout=options.straggler_timeout,
            inherits_orphans=self._inherits_orphans,
            ranks_elsewhere=len(self._cluster.nodes) > 1,
            emit=self._emit,
            watch=self._make_watch(),
        )

    def _make_watch(self) -> StallWatch | None:
        options = self._options
        assert self._cluster is not None
        if options.stall_timeout is None:
            return None
        if len(self._cluster.nodes) > 1 and options.driven_attempt is None:
            # Ranks of other nodes may go on, of which nothing is known here.
            self._on_trouble("stall_timeout has no effect on a job of several nodes: it is not watched")
            return None
        from davincirunsdk.supervision.watch import StallWatch

        return StallWatch(
            options.stall_timeout,
            stop=options.on_stall != "warn" and options.driven_attempt is None,
            take_stacks=self._look_at_stacks,
            emit=self._emit,
        )

    async def _meet(self, cluster: Cluster, env: Mapping[str, str]) -> Meeting | None:
        """Begin to meet the launchers of the job's other nodes; the workers do not wait for them.

        Raises:
            PlatformError: There can be no meeting, and one is required.
        """
        from davincirunsdk.engines.convene import convene

        return await convene(
            cluster,
            self._options,
            env,
            stop=self._stop_for_others,
            say=self._on_trouble,
            workers=lambda: self.workers,
            others_ended=self._note_others_ended,
        )

    def _stop_for_others(self, reason: str) -> None:
        if self._between_attempts:
            # There is nothing to stop but the attempt that would come next.
            self._stop_wanted = True
            if self._pausing is not None:
                resolve(self._pausing, None)
        if self._attempt is not None:
            self._attempt.stop(StopWanted(reason=reason))

    def _note_others_ended(self) -> None:
        if self._attempt is not None:
            self._attempt.note_ranks_ended()

    def _decide_together(self, joint: RunResult, trouble: str) -> float | None:
        """Decide on node 0 about another attempt of all nodes; see `Meeting.end_attempt`."""
        restarts = self._restarts
        assert restarts is not None
        cause = None if joint.state is JobState.FAILED else StopWanted()
        joint = restarts.with_attempts(joint, cause)
        report = joint.report
        if report is not None and report.verdict in (Verdict.TIME_LIMIT, Verdict.INTERNAL_ERROR):
            trouble = report.why
        if trouble:
            if self._options.max_restarts and joint.state is JobState.FAILED:
                restarts.why = trouble
            return None
        return restarts.next(joint, cause, time_left=self._ends_at - time.monotonic())

    async def _run(self, waits: Patience) -> None:
        assert self._restarts is not None
        assert self._claims is not None
        looking = self._look_at_usage()
        try:
            while True:
                attempt, steps = self._attempt, self._steps
                assert attempt is not None
                assert steps is not None
                self._restarts.begin()
                steps.begin()
                try:
                    await attempt.run(started=self._tell_started, decided=lambda: self._decide(waits))
                finally:
                    steps.end()
                if not await self._may_try_again(waits, attempt):
                    return
        finally:
            self._claims.release()
            if looking is not None:
                looking.cancel()
                await waits.until_any(looking)

    def _reach_time_limit(self, limit: TimeLimit) -> None:
        if self._attempt is not None:
            self._attempt.stop(limit)

    async def _may_try_again(self, waits: Patience, attempt: Attempt) -> bool:
        """Make the next attempt after its delay, if there is to be one; False when this was the last."""
        launch, restarts = self._launch, self._restarts
        assert launch is not None
        assert restarts is not None
        assert self._owner is not None
        if self._decided.done() or self._stop_wanted or self._options.driven_attempt is not None:
            return False
        result = await self._judge(waits)
        port: int | None = None
        again: Again | None = None
        if self._meeting is None:
            pause = restarts.next(result, attempt.seen().cause, time_left=self._ends_at - time.monotonic())
        else:
            ending = self._meeting.end_attempt(result, self._decide_together)
            earlier = restarts.earlier
            again = await waits.wait(asyncio.ensure_future(ending))
            pause = None if again is None else again.pause
            if again is None:
                # Decided, but a node that was lost did not come back for it.
                restarts.earlier = earlier
            else:
                self._between_attempts, port = True, again.port or None
                # Node 0 has noted it while it decided.
                restarts.earlier = (
                    restarts.earlier if len(restarts.earlier) == again.number else result.attempts
                )
        if pause is None:
            if restarts.why:
                self._on_trouble(f"no restart: {restarts.why}")
            return False
        # A node that came back in the middle has missed the ones before.
        number = len(restarts.earlier) if again is None else again.number
        text = restarts.announce(number, pause)
        logger.warning("%s", text)
        self._emit(Event(kind="restarting", time=time.time(), detail=text))
        # Whoever started the job need not wait with it for a worker that runs.
        self._tell_started()
        self._pausing = self._owner.create_future()
        await waits.within(pause, self._pausing)
        if self._stop_wanted:
            self._stopped_in_pause = True
            return False
        start = await waits.wait(in_thread(lambda: launch.again(number, port)))
        try:
            if self._stop_wanted:
                start.close()
                return False
            self._attempt = self._make_attempt(launch, start)
        except BaseException:
            start.close()
            raise
        self._between_attempts = False
        return True

    def _tell_started(self) -> None:
        super()._tell_started()
        if self._meeting is not None:
            self._meeting.note_started()

    async def _conclude(self, waits: Patience) -> None:
        try:
            await super()._conclude(waits)
        finally:
            if self._meeting is not None:
                await waits.wait(asyncio.ensure_future(self._meeting.close()))

    async def _agree(self, waits: Patience, result: RunResult) -> RunResult:
        if self._meeting is None:
            return result
        fault = "" if self._start_error is None else str(self._start_error)
        return await waits.wait(asyncio.ensure_future(self._meeting.conclude(result, fault=fault)))

    def _emit(self, event: Event) -> None:
        self._channels.emit(event)
        if event.kind == "stopping" and self._meeting is not None and self._attempt is not None:
            cause = self._attempt.cause
            if cause is not None and not isinstance(cause, RanksEnded):
                self._meeting.note_stop(
                    cause.words, self._stop_code if isinstance(cause, StopWanted) else None
                )

    def _look_at_usage(self) -> asyncio.Task[None] | None:
        if self._options.html is None and not self._options.sample_usage:
            return None
        from davincirunsdk.supervision.usage import sample

        look = sample(lambda: self._workers(auxiliary=False), self._channels.emit, self._on_trouble)
        return asyncio.get_running_loop().create_task(look, name="davincirun-usage")

    @property
    def _restart_count(self) -> int:
        return len(self._restarts.earlier) if self._restarts is not None else 0

    def _own_document(self, path: Path) -> Path:
        if self._cluster is None or len(self._cluster.nodes) == 1:
            return path
        return path.with_name(f"{path.stem}-node-{self._cluster.node_rank}{path.suffix}")

    def _document(self, path: Path) -> Path | None:
        if self._cluster is None or len(self._cluster.nodes) == 1:
            return path
        if self._meeting is not None and self._meeting.joined:
            return path if self._cluster.node_rank == 0 else None
        # Nodes that were started apart may write to one folder.
        return self._own_document(path)

    async def _judge(self, waits: Patience) -> RunResult:
        launch, attempt, cluster = self._launch, self._attempt, self._cluster
        assert launch is not None
        assert attempt is not None
        assert cluster is not None
        seen, now = attempt.seen(), time.time()
        if self._stopped_in_pause:
            seen = replace(seen, cause=StopWanted(reason="stop was asked for before the restart"), failed=())
        # In a thread: looking through much output takes its time.
        restarts = self._restarts
        assert restarts is not None
        result = await waits.wait(
            in_thread_or_here(
                lambda: judge(
                    seen,
                    job_id=launch.job_id,
                    log_dir=launch.log_dir,
                    cluster=cluster,
                    began=self._began,
                    ended=now,
                    earlier=restarts.earlier[:-1] if self._stopped_in_pause else restarts.earlier,
                    lang=choose_language(self._options.lang),
                    look=True,
                    kills_before=launch.memory_kills,
                    first_counts=self._options.keep_going,
                )
            )
        )
        if self._stopped_in_pause:
            return replace(result, attempts=restarts.earlier)
        return restarts.with_attempts(result, seen.cause)

    def _begin_stop(self, *, now: bool, reason: str) -> None:
        if self._pausing is not None:
            resolve(self._pausing, None)
        if self._attempt is not None:
            self._attempt.stop(StopWanted(reason=reason), now=now)
        if self._meeting is not None:
            # Those of other nodes may go on where the workers here have ended.
            self._meeting.note_wish(reason, self._stop_code)
            if now:
                self._meeting.hurry()

    def _is_stopping(self) -> bool:
        return self._attempt is not None and self._attempt.is_stopping

    def _fault_is_told(self, error: Exception) -> bool:
        return self._attempt is not None and self._attempt.internal_error is error

    def _note_ranks_ended(self) -> None:
        """Learn that the workers of all other nodes have ended; for whoever knows of them."""
        if self._attempt is not None:
            self._attempt.note_ranks_ended()

    def _keep_survivors(self) -> None:
        """From now on a failure stops nobody; for callers that ask for it after the start."""
        if self._attempt is not None:
            self._attempt.fail_fast = False

    def _reap_orphans(self) -> None:
        """Reap dead children that are not ours to await, soon; for the command, which inherits them.

        From the manager's own loop. Not at once: after a worker's end there is more urgent work.
        """
        assert self._owner is not None
        if self._reaping is None:
            self._reaping = self._owner.call_later(_REAPING_DELAY, self._reap_orphans_now)

    def _reap_orphans_now(self) -> None:
        from davincirunsdk.leftovers.process_tree import reap_orphans

        self._reaping = None
        pids = {worker.pid for worker in self._attempt.workers} if self._attempt is not None else set()
        if None in pids:
            # One just started may have ended, and nobody knows yet that it is not an orphan.
            self._reap_orphans()
        else:
            reap_orphans(but={*pids, *guardian.pids()})

    def _note_progress(self, rank: int, progress: Progress) -> None:
        self._channels.emit(
            Event(kind="progress", time=time.time(), rank=rank, detail=str(progress), progress=progress)
        )

    def _on_trouble(self, text: str) -> None:
        logger.warning("%s", text)
        self._channels.emit(Event(kind="warning", time=time.time(), detail=text))
