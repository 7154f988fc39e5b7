"""The driver of a job on several nodes: one plan, one result, and no node left running when one fails."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk.arguments import flag, parse_ranks, refuse_unknown
from davincirunsdk.cluster import file_name
from davincirunsdk.concurrency import Patience, in_thread, opened, shield
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.engines.collect_logs import collect_logs
from davincirunsdk.engines.given_table import read_given
from davincirunsdk.engines.joint import judge
from davincirunsdk.engines.joint_attempt import JointAttempt
from davincirunsdk.engines.planning import plan_anew, plan_nodes
from davincirunsdk.engines.renewal import LAST_OF_LOST, renew
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host import addresses
from davincirunsdk.job import JobBody
from davincirunsdk.logs.events_file import EventLog
from davincirunsdk.logs.file import LogFile, open_log_files
from davincirunsdk.options import JobKeywords, JobOptions, spelled_out
from davincirunsdk.phrases import count, some_of
from davincirunsdk.supervision.cause import NodeLost
from davincirunsdk.supervision.restarts import Restarts, requeued
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.node import Member, NodeHandle, Placement
    from davincirunsdk.supervision.cause import TimeLimit
    from davincirunsdk.types import Event, RunResult, WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

_MOST_WARNINGS = 32
"""Warnings of nodes that are said: what one of a thousand nodes warns of, all others may, too."""


class NodesManager(JobBody):
    """One job on several nodes, from its arguments to its result; used as `FMKManager` is.

    It belongs to the loop that entered it. Leaving the block stops what still runs on any node,
    with the grace period; cancelling the task that holds the block does the same and then lets the
    cancellation through. When one worker fails or one node is lost, the workers of all other nodes
    get SIGTERM as soon as the news is here.

    Args:
        placement: The engine's nodes.
        command: Words of the command; relative paths in it are seen from `work_dir`.
        work_dir: Folder the workers run in, on every node; relative to the caller's folder.
        log_dir: Folder of the log files, on every node; relative to the caller's folder. None for
            the platform's. The events of all nodes are written there here, beside the driver.
        collect: Ranks whose output is brought here for `logs`, written as for `echo`; by default
            all. All output is in the log files on the nodes in any case.
        collect_logs: After a failure, bring the log files of nodes with other file systems to the log
            folder here: all of a file up to 8 MiB, head and tail of a longer one, 256 MiB in all.
        notify: Takes progress lines while the job is not started yet.
        on_event: Called with every event of all nodes, in the job's loop; it must not block.
        **keywords: See `JobOptions`, which documents every option once.

    Raises:
        TypeError: `command` is one string.
        ValueError: `command` is empty, or another argument is out of range.
    """

    @spelled_out(JobKeywords)
    def __init__(
        self,
        placement: Placement,
        command: Sequence[str | os.PathLike[str]],
        work_dir: str | os.PathLike[str] = "./",
        log_dir: str | os.PathLike[str] | None = "./log",
        *,
        collect: str = "all",
        collect_logs: bool = False,
        notify: Callable[[str], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
        **keywords: Unpack[JobKeywords],
    ) -> None:
        refuse_unknown(keywords, JobKeywords.__annotations__)
        self._set_up(JobOptions.of(command, work_dir, log_dir, **keywords), notify, on_event)
        self._set_up_nodes(placement, collect, collect_logs)

    @classmethod
    def from_options(
        cls,
        placement: Placement,
        options: JobOptions,
        *,
        collect: str = "all",
        collect_logs: bool = False,
        notify: Callable[[str], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> NodesManager:
        """Make a manager of options that have been checked before.

        Args:
            placement: The engine's nodes.
            options: What to run.
            collect: Ranks whose output is brought here for `logs`.
            collect_logs: Bring log files here after a failure.
            notify: Takes progress lines while the job is not started yet.
            on_event: Called with every event of all nodes, in the job's loop.
        """
        manager = cls.__new__(cls)
        manager._set_up(options, notify, on_event)
        manager._set_up_nodes(placement, collect, collect_logs)
        return manager

    def _set_up_nodes(self, placement: Placement, collect: str, collect_logs: bool) -> None:
        from davincirunsdk.platforms import job_id

        self._placement = placement
        self._job_id = self._options.name or file_name(job_id(os.environ))
        self._collect = parse_ranks(collect)
        self._collect_logs = flag("collect_logs", collect_logs)
        self._members: list[Member] = []
        self._given: GivenTable | None = None
        self._table = ""
        self._attempt: JointAttempt | None = None
        self._engine_lost = ""
        self._passed_on = 0
        self._restarts = Restarts(self._options, nnodes=1, requeued=requeued(os.environ))
        self._not_renewed: RunResult | None = None

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The workers of all nodes as last reported, in rank order."""
        found = [worker for member in self._members for worker in member.workers]
        return tuple(sorted(found, key=lambda worker: worker.rank))

    @property
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """Processes that serve the workers and are not ranks, such as MindSpore's scheduler."""
        return tuple(worker for member in self._members for worker in member.auxiliaries)

    @property
    def job_id(self) -> str:
        """Name of the job, on all nodes."""
        return self._job_id

    @property
    def nodes(self) -> tuple[str, ...]:
        """Host names of the nodes in node rank order; empty before the start."""
        return tuple(member.facts.host for member in self._members)

    @property
    def dropped(self) -> int:
        """Bytes of output that the nodes could not send in time; their log files have them."""
        return sum(member.dropped for member in self._members)

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to every running worker of every node."""
        if self._attempt is not None:
            self._attempt.signal(number)

    async def _prepare(self) -> None:
        self._given = await read_given(self._options, self._notify)
        handles = await self._placement.open(self._given)
        try:
            await self._plan(handles)
            # Before the run begins: a stop may come in between.
            self._attempt = self._make_attempt()
            self._channels.open_display(self._options.display, self._names(), self._snapshot)
            await self._open_event_log()
        except BaseException:
            waits = Patience(lambda: None)
            with shield():
                await self._give_back(waits)
            waits.settle()
            raise

    async def _plan(self, handles: Sequence[NodeHandle]) -> None:
        shown = self._options.display.ranks
        self._members, self._table = await plan_nodes(
            handles,
            # A job has one name on all nodes.
            replace(self._options, name=self._job_id),
            given=self._given,
            wanted_ranks=None if self._collect is None or shown is None else self._collect | shown,
            notify=self._notify,
        )

    def _make_attempt(self) -> JointAttempt:
        return JointAttempt(
            self._members,
            self._table,
            self._options,
            self._channels,
            again=bool(self._restarts.earlier),
            started=self._tell_started,
            pass_on=self._pass_on,
            note_fault=self._note_fault,
        )

    async def _give_back(self, waits: Patience) -> None:
        try:
            await waits.wait(asyncio.ensure_future(self._placement.close()))
        except Exception as error:
            # How the job ended, or why it did not begin, is known and stays so.
            logger.warning("the nodes could not be given back: %s: %s", type(error).__name__, error)

    async def _run(self, waits: Patience) -> None:
        loop = asyncio.get_running_loop()
        watch = loop.create_task(self._watch_engine(), name="davincirun-engine")
        try:
            while True:
                attempt = self._attempt
                assert attempt is not None
                self._restarts.begin()
                await attempt.run(waits)
                if not await self._may_try_again(waits, attempt):
                    break
        finally:
            watch.cancel()
        if attempt.start_error is not None:
            raise attempt.start_error

    async def _watch_engine(self) -> None:
        """End the job in good time when what all its nodes need is lost."""
        self._engine_lost = await self._placement.until_lost()
        self._say(self._engine_lost)
        self._begin_stop(reason=self._engine_lost, now=False)

    async def _may_try_again(self, waits: Patience, attempt: JointAttempt) -> bool:
        """Plan the next attempt after its delay, if there is to be one; on other nodes if some were lost."""
        if attempt.start_error is not None or self._may_not_go_on():
            return False
        restarts = self._restarts
        result = await self._judge(waits)
        if self._may_not_go_on():
            return False
        renewing = isinstance(attempt.cause, NodeLost) and self._placement.renewal_timeout > 0
        coming = restarts.next(
            result,
            None if renewing else attempt.cause,
            time_left=self._ends_at - time.monotonic(),
            # So long workers of a lost node may still be there, with its devices.
            at_least=self._options.grace_period + LAST_OF_LOST if renewing else 0.0,
        )
        if coming is None:
            if restarts.why:
                self._say(f"no restart: {restarts.why}")
            await self._bring_logs(waits, result, None)
            return False
        restarts.announce(coming, self._channels.emit)
        self._tell_started()
        ends = time.monotonic() + coming.pause
        await self._bring_logs(waits, result, coming.number - 1)
        await restarts.pause(waits, max(0.0, ends - time.monotonic()))
        if renewing and not await self._renew(waits, coming.number):
            self._not_renewed = result
        if self._may_not_go_on():
            restarts.stopped_in_pause, self._not_renewed = True, None
            return False
        if self._not_renewed is not None:
            return False
        plan_anew(self._members, self._options, coming.number)
        self._attempt = self._make_attempt()
        return True

    def _may_not_go_on(self) -> bool:
        return self._stop_wanted or bool(self._engine_lost)

    async def _renew(self, waits: Patience, number: int) -> bool:
        """Have the next attempt on other nodes, or on fewer, in place of those that were lost."""
        before = self._members
        time_left = self._ends_at - time.monotonic()
        work = renew(self._placement, before, self._plan, attempt=number - 1, time_left=time_left)
        try:
            await self._restarts.meanwhile(waits, work)
        except (PlatformError, RankTableError) as error:
            self._say(f"no restart: {error}")
            return False
        finally:
            after, self._members = self._members, before
        if self._may_not_go_on():
            return False
        self._members = after
        of = f" instead of {len(before)}" if len(after) != len(before) else ""
        self._say(f"attempt {number} is on {count(len(after), 'node')}{of}: {some_of(self.nodes)}")
        return True

    async def _bring_logs(self, waits: Patience, result: RunResult, attempt: int | None) -> None:
        """Bring the logs of an attempt that failed, if that was asked for; a stop ends it."""
        if not self._collect_logs or result.state is not JobState.FAILED:
            return
        if self._events_path is None:
            self._say("logs cannot be brought here, for the log folder here cannot be written")
            return
        ranks = [failure.rank for failure in result.failures]
        work = collect_logs(self._members, ranks, proof=self._events_path, attempt=attempt)
        if text := await self._restarts.meanwhile(waits, work):
            self._say(text)

    def _pass_on(self, text: str) -> None:
        """Say at once what a node warns of, such as its full disk, which nobody sees there."""
        self._passed_on += 1
        if self._passed_on <= _MOST_WARNINGS:
            logger.warning("%s", text)
        elif self._passed_on == _MOST_WARNINGS + 1:
            logger.warning("further warnings of nodes are in the events file only")

    def _begin_stop(self, *, now: bool, reason: str) -> None:
        self._restarts.end_pause()
        if self._attempt is not None:
            self._attempt.stop(reason=reason, now=now)

    def _reach_time_limit(self, limit: TimeLimit) -> None:
        if self._attempt is not None:
            self._attempt.reach_limit(limit)

    def _is_stopping(self) -> bool:
        return self._attempt is not None and self._attempt.stopping

    async def _judge(self, waits: Patience) -> RunResult:
        attempt = self._attempt
        assert attempt is not None
        if self._not_renewed is not None:
            return self._not_renewed
        # In a thread: with thousands of workers it would hold up the loop that we are a guest in.
        result = await waits.wait(
            in_thread(
                lambda: judge(
                    self._members,
                    attempt.troubled,
                    job_id=self._job_id,
                    began=self._began,
                    lang=choose_language(self._options.lang),
                    limit=attempt.limit,
                    engine_lost=self._engine_lost,
                    earlier=self._restarts.earlier,
                    stopped=self._restarts.stopped_in_pause and self._stop_wanted,
                )
            )
        )
        return self._restarts.with_attempts(result, attempt.limit)

    def _names(self) -> dict[int, str]:
        names = {-1: "scheduler"}
        for member in self._members:
            names |= {rank: f"node {member.node_rank} rank {rank}" for rank in member.ranks}
        return names

    async def _open_event_log(self) -> None:
        """Open the events file; a driver without a disk for it is no reason to start nothing."""

        def open_file() -> LogFile:
            folder = self._options.default_log_dir
            folder.mkdir(parents=True, exist_ok=True)
            # Not the name that an agent on this host takes for its own part.
            endings, name = ["-nodes-events.jsonl"], self._job_id.replace(os.sep, "_")
            _, (file,) = open_log_files(folder, name, endings, lambda path: LogFile(path, self._notify))
            return file

        try:
            file = await opened(open_file, close=LogFile.close)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            self._notify(f"the events of all nodes cannot be written: {why}; the job goes on without")
            return
        # No process carries it: it tells this job from others of its name.
        about = (("mark", os.urandom(8).hex()), *self._about())
        self._channels.open_event_log(EventLog(file, self._job_id, addresses.host_name(), about))
