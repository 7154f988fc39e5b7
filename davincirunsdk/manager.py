"""FMKManager: one job on this node, from its arguments to its result."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from davincirunsdk.cluster import file_name
from davincirunsdk.concurrency import Patience, in_thread, opened
from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.host.claims import Claims
from davincirunsdk.job import JobBody, log_notice
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.leftovers.orphans import OrphanReaper
from davincirunsdk.logs.events_file import EventLog
from davincirunsdk.options import JobOptions, NodeKeywords, spelled_out, without_effect
from davincirunsdk.supervision.cause import RanksEnded, StopWanted, TimeLimit
from davincirunsdk.supervision.prepare import prepare
from davincirunsdk.supervision.restarts import requeued
from davincirunsdk.supervision.rounds import Rounds
from davincirunsdk.supervision.spawn import spawn_error
from davincirunsdk.types import Event, Stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from davincirunsdk.cluster import Cluster, Fact
    from davincirunsdk.ending import Ending
    from davincirunsdk.engines.meeting import Meeting
    from davincirunsdk.supervision.prepare import Preparation
    from davincirunsdk.supervision.restarts import Next
    from davincirunsdk.supervision.worker import Worker
    from davincirunsdk.types import RunResult, WorkerStatus

__all__ = ["FMKManager", "log_notice"]

logger: logging.Logger = logging.getLogger("davincirunsdk")


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

    _rounds: Rounds | None = None
    _meeting: Meeting | None = None
    _launch: Preparation | None = None
    _cluster: Cluster | None = None
    _claims: Claims | None = None
    _orphans: OrphanReaper | None = None
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
        if self._rounds is not None:
            self._rounds.attempt.pass_on(number)

    def stacks(self) -> Ending[Stacks]:
        """Look where the running workers are, without harm to them, and write it beside the logs.

        With py-spy (`pip install davincirunsdk[stacks]`) every frame of every thread is seen; without,
        a script that calls `davincirunsdk.register_stacks` once shows its own; of others it is known what
        the kernel has them do. A coroutine or the result itself, as with `wait`; cancelling cancels the
        waiting.

        Returns:
            Where each worker of this node is; workers at the same place stand together.
        """
        return self._home.call("stacks", self._take_stacks)

    async def _take_stacks(self) -> Stacks:
        if self._rounds is None:
            return Stacks(time=time.time(), workers=())
        return await in_thread(self._rounds.look_at_stacks)

    @property
    def _log_dir(self) -> Path:
        return self._launch.log_dir if self._launch is not None else self._options.default_log_dir

    def _statuses(self, *, auxiliary: bool) -> tuple[WorkerStatus, ...]:
        final = self._outcome.final
        if final is not None:
            # As they were judged: one that was stopped may have been failing already.
            return final.auxiliaries if auxiliary else final.workers
        return tuple(worker.status() for worker in self._workers() if worker.spec.auxiliary is auxiliary)

    def _workers(self) -> list[Worker]:
        return [] if self._rounds is None else self._rounds.attempt.workers

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
        launch = await opened(
            lambda: prepare(options, cluster, inherited=inherited, on_trouble=self._say),
            close=lambda late: late.close(),
        )
        try:
            self._launch = launch
            for text in without_effect(
                options, world_size=cluster.world_size, environment=launch.first.specs[-1].env
            ):
                self._say(text)
            names = {spec.rank: spec.name for spec in launch.first.specs}
            self._channels.open_display(options.display, names, self._snapshot)
            rounds = self._rounds = Rounds(
                launch,
                cluster,
                options,
                self._channels.hub,
                requeued=requeued(inherited),
                inherits_orphans=self._inherits_orphans,
                emit=self._emit,
                say=self._say,
            )
            about = (("mark", launch.mark.rpartition("/")[2]), *self._about())
            self._channels.open_event_log(EventLog(launch.events, launch.job_id, cluster.node.name, about))
            if len(cluster.nodes) > 1 and options.meet != "off":
                self._meeting = await self._meet(cluster, env, rounds)
            if options.max_restarts and not options.fail_fast:
                self._say("no restart: fail_fast=False keeps the workers that survive a failure")
        except BaseException as error:
            if self._rounds is not None:
                self._rounds.discard()
            launch.close()
            if isinstance(error, OSError) and not isinstance(error, WorkerSpawnError):
                raise spawn_error(launch.first.specs[0], error) from None
            raise

    async def _meet(self, cluster: Cluster, env: Mapping[str, str], rounds: Rounds) -> Meeting | None:
        """Begin to meet the launchers of the job's other nodes; the workers do not wait for them.

        Raises:
            PlatformError: There can be no meeting, and one is required.
        """
        from davincirunsdk.engines.convene import convene

        meeting = await convene(
            cluster,
            self._options,
            env,
            stop=rounds.stop_for_others,
            say=self._say,
            workers=lambda: self.workers,
            others_ended=self._note_ranks_ended,
        )
        if meeting is not None:
            rounds.restarts.nnodes = 1
        return meeting

    async def _run(self, waits: Patience) -> None:
        assert self._rounds is not None
        assert self._claims is not None
        looking = self._look_at_usage()
        try:
            await self._rounds.run(
                waits,
                started=self._tell_started,
                decided=lambda: self._decide(waits),
                judge=lambda: self._judge(waits),
                agree=None if self._meeting is None else partial(self._agree_on_next, waits),
                ends_at=self._ends_at,
            )
        finally:
            self._claims.release()
            if looking is not None:
                looking.cancel()
                await waits.until_any(looking)

    async def _agree_on_next(self, waits: Patience, result: RunResult) -> Next | None:
        from davincirunsdk.engines.joint_restart import agree_on_next

        assert self._meeting is not None
        assert self._rounds is not None
        agreeing = agree_on_next(
            self._meeting,
            self._rounds.restarts,
            result,
            wanted=bool(self._options.max_restarts),
            ends_at=self._ends_at,
        )
        return await waits.wait(asyncio.ensure_future(agreeing))

    def _reach_time_limit(self, limit: TimeLimit) -> None:
        if self._rounds is not None:
            self._rounds.attempt.stop(limit)

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
        fault = str(self._outcome.start_error or "")
        return await waits.wait(asyncio.ensure_future(self._meeting.conclude(result, fault=fault)))

    def _emit(self, event: Event) -> None:
        self._channels.emit(event)
        if event.kind == "stopping" and self._meeting is not None and self._rounds is not None:
            cause = self._rounds.attempt.cause
            if cause is not None and not isinstance(cause, RanksEnded):
                self._meeting.note_stop(
                    cause.words, self._stop_code if isinstance(cause, StopWanted) else None
                )

    def _look_at_usage(self) -> asyncio.Task[None] | None:
        if self._options.html is None and not self._options.sample_usage:
            return None
        from davincirunsdk.supervision.usage import sample

        assert self._rounds is not None
        rounds = self._rounds
        look = sample(lambda: rounds.workers, self._channels.emit, self._say)
        return asyncio.get_running_loop().create_task(look, name="davincirun-usage")

    @property
    def _restart_count(self) -> int:
        return len(self._rounds.restarts.earlier) if self._rounds is not None else 0

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
        assert self._rounds is not None
        return await self._rounds.judge(waits, began=self._began)

    def _begin_stop(self, *, now: bool, reason: str) -> None:
        if self._rounds is not None:
            self._rounds.stop(reason, now=now)
        if self._meeting is not None:
            # Those of other nodes may go on where the workers here have ended.
            self._meeting.note_wish(reason, self._stop_code)
            if now:
                self._meeting.hurry()

    def _is_stopping(self) -> bool:
        return self._rounds is not None and self._rounds.attempt.is_stopping

    def _fault_is_told(self, error: Exception) -> bool:
        return self._rounds is not None and self._rounds.attempt.internal_error is error

    def _note_ranks_ended(self) -> None:
        """Learn that the workers of all other nodes have ended; for whoever knows of them."""
        if self._rounds is not None:
            self._rounds.attempt.note_ranks_ended()

    def _keep_survivors(self) -> None:
        """From now on a failure stops nobody; for callers that ask for it after the start."""
        if self._rounds is not None:
            self._rounds.attempt.fail_fast = False

    def _reap_orphans(self) -> None:
        """Reap dead children that are not ours to await, soon; for the command, which inherits them.

        From the manager's own loop.
        """
        if self._orphans is None:
            self._orphans = OrphanReaper(lambda: {worker.pid for worker in self._workers()})
        self._orphans.reap_soon()
