"""The attempts of a job on this node, one after another, until one is the last."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread, in_thread_or_here
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.logs.pump import LogPump
from davincirunsdk.steps.job import JobSteps
from davincirunsdk.supervision.attempt import Attempt
from davincirunsdk.supervision.cause import StopWanted
from davincirunsdk.supervision.restarts import Restarts
from davincirunsdk.supervision.spawn import spawn_error
from davincirunsdk.supervision.verdict import judge
from davincirunsdk.types import Event, Stacks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from davincirunsdk.cluster import Cluster
    from davincirunsdk.concurrency import Patience
    from davincirunsdk.logs.streams import LogHub
    from davincirunsdk.options import JobOptions
    from davincirunsdk.supervision.prepare import Launch, Preparation
    from davincirunsdk.supervision.restarts import Next
    from davincirunsdk.supervision.watch import StallWatch
    from davincirunsdk.supervision.worker import Worker
    from davincirunsdk.types import Progress, RunResult


class Rounds:
    """Sees a prepared job through. All methods belong to the loop's thread, but for `look_at_stacks`.

    Args:
        launch: What was prepared, with what the first attempt starts.
        cluster: The job's nodes, and which is this one.
        options: What the user asked for.
        hub: Takes the workers' output.
        requeued: How often the batch system has run the whole job anew.
        inherits_orphans: This process is the sub-reaper of the job and of nothing else.
        emit: Takes every event.
        say: Takes a line for people.

    Attributes:
        attempt: The one that runs, or has run last.
        restarts: Says whether there is another one.
        stop_wanted: There will be no other one.

    Raises:
        WorkerSpawnError: There are no descriptors to be had for the first one.
    """

    def __init__(
        self,
        launch: Preparation,
        cluster: Cluster,
        options: JobOptions,
        hub: LogHub,
        *,
        requeued: int,
        inherits_orphans: bool,
        emit: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.restarts: Restarts = Restarts(options, nnodes=len(cluster.nodes), requeued=requeued)
        self.stop_wanted: bool = False
        self._launch = launch
        self._cluster = cluster
        self._options = options
        self._hub = hub
        self._inherits_orphans = inherits_orphans
        self._emit = emit
        self._say = say
        self._decided = False
        self._between = False
        self.attempt: Attempt
        self.attempt, self._steps = self._make(launch.first)

    @property
    def workers(self) -> list[Worker]:
        """The ranks here, in order."""
        return [worker for worker in self.attempt.workers if not worker.spec.auxiliary]

    def discard(self) -> None:
        """Give up what was never run."""
        for worker in self.attempt.workers:
            worker.pump.discard()
        self._steps.end()

    async def run(
        self,
        waits: Patience,
        *,
        started: Callable[[], None],
        decided: Callable[[], Awaitable[None]],
        agree: Callable[[RunResult], Awaitable[Next | None]] | None,
        ends_at: float,
        judge: Callable[[], Awaitable[RunResult]],
    ) -> None:
        """Run attempt after attempt until there is to be no other one.

        Args:
            waits: Of the job.
            started: Called when all workers run, or when they will be started again.
            decided: Awaited when the outcome is known before the end; see `Attempt.run`.
            agree: Awaited with an attempt's result to hear what all nodes do next, None where this node
                decides for itself.
            ends_at: Monotonic second of the job's time limit.
            judge: Awaited for the result of the attempt that has ended.

        Raises:
            WorkerSpawnError: As `Attempt.run`, and where there is no log file for another attempt.
        """

        async def decide() -> None:
            self._decided = True
            await decided()

        while True:
            self.restarts.begin()
            self._steps.begin()
            try:
                await self.attempt.run(started=started, decided=decide)
            finally:
                self._steps.end()
            if self._decided or self.stop_wanted or self._options.driven_attempt is not None:
                return
            result = await judge()
            if agree is not None:
                coming = await agree(result)
                self._between = coming is not None
            else:
                cause, left = self.attempt.seen().cause, ends_at - time.monotonic()
                coming = self.restarts.next(result, cause, time_left=left)
            if coming is None:
                if self.restarts.why:
                    self._say(f"no restart: {self.restarts.why}")
                return
            if not await self._prepare(waits, coming, started):
                return

    async def _prepare(self, waits: Patience, coming: Next, started: Callable[[], None]) -> bool:
        """Make the next attempt after its delay; False where a stop comes first."""
        restarts, launch = self.restarts, self._launch
        restarts.announce(coming, self._emit)
        # Whoever started the job need not wait with it for a worker that runs.
        started()
        await restarts.pause(waits, coming.pause)
        if self.stop_wanted:
            restarts.stopped_in_pause = True
            return False
        start = await waits.wait(in_thread(lambda: launch.again(coming.number, coming.port)))
        try:
            if self.stop_wanted:
                start.close()
                return False
            self.attempt, self._steps = self._make(start)
        except BaseException:
            start.close()
            raise
        self._between = False
        return True

    def stop(self, reason: str, *, now: bool = False) -> None:
        """End the job: the attempt that runs is the last one.

        Args:
            reason: Why.
            now: SIGKILL at once.
        """
        self.stop_wanted = True
        self.restarts.end_pause()
        self.attempt.stop(StopWanted(reason=reason), now=now)

    def stop_for_others(self, reason: str) -> None:
        """End the attempt for what happened on another node; all may try again together.

        Args:
            reason: What happened.
        """
        if self._between:
            # There is nothing to stop but the attempt that would come next.
            self.stop_wanted = True
            self.restarts.end_pause()
        self.attempt.stop(StopWanted(reason=reason))

    async def judge(self, waits: Patience, *, began: float) -> RunResult:
        """Say how the last attempt ended, or stands, with all attempts before it.

        Args:
            waits: Of the job.
            began: Wall-clock second of the job's start.
        """
        launch, restarts = self._launch, self.restarts
        seen, now = self.attempt.seen(), time.time()
        if restarts.stopped_in_pause:
            seen = replace(seen, cause=StopWanted(reason="stop was asked for before the restart"), failed=())
        # In a thread: looking through much output takes its time.
        result = await waits.wait(
            in_thread_or_here(
                lambda: judge(
                    seen,
                    job_id=launch.job_id,
                    log_dir=launch.log_dir,
                    cluster=self._cluster,
                    began=began,
                    ended=now,
                    earlier=restarts.earlier[:-1] if restarts.stopped_in_pause else restarts.earlier,
                    lang=choose_language(self._options.lang),
                    look=True,
                    kills_before=launch.memory_kills,
                    first_counts=self._options.keep_going,
                )
            )
        )
        return restarts.with_attempts(result, seen.cause)

    def look_at_stacks(self) -> Stacks:
        """Take and save the stacks of all running workers; blocking, for a thread."""
        # It loads psutil, which a start need not wait for.
        from davincirunsdk.diagnosis.stacks import Target, take_and_save

        targets = [
            Target(rank=worker.spec.rank, name=worker.spec.name, pid=worker.pid)
            for worker in self.workers
            if worker.running and worker.pid is not None
        ]
        if not targets:
            return Stacks(time=time.time(), workers=())
        return take_and_save(targets, self._launch.log_dir, self._launch.job_id)

    def _make(self, start: Launch) -> tuple[Attempt, JobSteps]:
        """Make an attempt of what is to be started, and what looks for steps in its output.

        Raises:
            WorkerSpawnError: There are no descriptors to be had; its files are still open.
        """
        options = self._options
        pumps: list[LogPump] = []
        steps = JobSteps(start.specs, options.progress_pattern, self._note_progress)
        try:
            for spec, file in zip(start.specs, start.files, strict=True):
                pumps.append(LogPump(spec.rank, file, self._hub, steps.scanners[len(pumps)]))
        except BaseException as error:
            steps.end()
            for pump in pumps:
                pump.discard()
            if isinstance(error, OSError):
                raise spawn_error(start.specs[len(pumps)], error) from None
            raise
        attempt = Attempt(
            start.specs,
            pumps,
            mark=self._launch.mark,
            grace_period=options.grace_period,
            stop_signal=signal.Signals[options.stop_signal],
            fail_fast=options.fail_fast,
            keep_going=options.keep_going,
            straggler_timeout=options.straggler_timeout,
            inherits_orphans=self._inherits_orphans,
            ranks_elsewhere=len(self._cluster.nodes) > 1,
            emit=self._emit,
            watch=self._stall_watch(),
        )
        return attempt, steps

    def _stall_watch(self) -> StallWatch | None:
        options = self._options
        if options.stall_timeout is None:
            return None
        if len(self._cluster.nodes) > 1 and options.driven_attempt is None:
            # Ranks of other nodes may go on, of which nothing is known here.
            self._say("stall_timeout has no effect on a job of several nodes: it is not watched")
            return None
        from davincirunsdk.supervision.watch import StallWatch

        return StallWatch(
            options.stall_timeout,
            stop=options.on_stall != "warn" and options.driven_attempt is None,
            take_stacks=self.look_at_stacks,
            emit=self._emit,
        )

    def _note_progress(self, rank: int, progress: Progress) -> None:
        self._emit(
            Event(kind="progress", time=time.time(), rank=rank, detail=str(progress), progress=progress)
        )
