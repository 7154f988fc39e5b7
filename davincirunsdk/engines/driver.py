"""The driver of a job on several nodes: one plan, one result, and no node left running when one fails."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk.cluster import file_name
from davincirunsdk.concurrency import Patience, in_thread, shield
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.engines.given_table import read_given
from davincirunsdk.engines.joint import judge
from davincirunsdk.engines.joint_attempt import JointAttempt
from davincirunsdk.engines.planning import plan_anew, plan_nodes
from davincirunsdk.host import addresses
from davincirunsdk.job import JobBody
from davincirunsdk.logs.events_file import EventLog
from davincirunsdk.logs.file import LogFile, open_log_files
from davincirunsdk.options import (
    JobKeywords,
    JobOptions,
    parse_ranks,
    refuse_unknown,
    spelled_out,
)
from davincirunsdk.supervision.restarts import Restarts, requeued

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.node import Member, Placement
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
        notify: Callable[[str], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
        **keywords: Unpack[JobKeywords],
    ) -> None:
        refuse_unknown(keywords, JobKeywords.__annotations__)
        self._set_up(JobOptions.of(command, work_dir, log_dir, **keywords), notify, on_event)
        self._set_up_nodes(placement, collect)

    @classmethod
    def from_options(
        cls,
        placement: Placement,
        options: JobOptions,
        *,
        collect: str = "all",
        notify: Callable[[str], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> NodesManager:
        """Make a manager of options that have been checked before.

        Args:
            placement: The engine's nodes.
            options: What to run.
            collect: Ranks whose output is brought here for `logs`.
            notify: Takes progress lines while the job is not started yet.
            on_event: Called with every event of all nodes, in the job's loop.
        """
        manager = cls.__new__(cls)
        manager._set_up(options, notify, on_event)
        manager._set_up_nodes(placement, collect)
        return manager

    def _set_up_nodes(self, placement: Placement, collect: str) -> None:
        from davincirunsdk.platforms import job_id

        self._placement = placement
        self._job_id = self._options.name or file_name(job_id(os.environ))
        self._collect = parse_ranks(collect)
        self._members: list[Member] = []
        self._given: GivenTable | None = None
        self._table = ""
        self._attempt: JointAttempt | None = None
        self._engine_lost = ""
        self._passed_on = 0
        self._restarts = Restarts(self._options, nnodes=1, requeued=requeued(os.environ))

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
        given = self._given = await read_given(self._options, self._notify)
        handles = await self._placement.open(given)
        try:
            shown = self._options.display.ranks
            self._members, self._table = await plan_nodes(
                handles,
                # A job has one name on all nodes.
                replace(self._options, name=self._job_id),
                given=given,
                wanted_ranks=None if self._collect is None or shown is None else self._collect | shown,
                notify=self._notify,
            )
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

    def _make_attempt(self) -> JointAttempt:
        return JointAttempt(
            self._members,
            self._table,
            self._options,
            self._channels,
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
        """Plan the next attempt on the same nodes after its delay, if there is to be one."""
        if attempt.start_error is not None or self._stop_wanted or self._engine_lost:
            return False
        restarts = self._restarts
        result = await self._judge(waits)
        coming = restarts.next(result, attempt.cause, time_left=self._ends_at - time.monotonic())
        if coming is None:
            if restarts.why:
                self._say(f"no restart: {restarts.why}")
            return False
        restarts.announce(coming, self._channels.emit)
        self._tell_started()
        await restarts.pause(waits, coming.pause)
        if self._stop_wanted:
            restarts.stopped_in_pause = True
            attempt.troubled.clear()
            return False
        if self._engine_lost:
            restarts.stopped_in_pause = True
            return False
        plan_anew(self._members, self._options, coming.number)
        self._attempt = self._make_attempt()
        return True

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
            file = await in_thread(open_file, unwanted=LogFile.close)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            self._notify(f"the events of all nodes cannot be written: {why}; the job goes on without")
            return
        self._channels.open_event_log(EventLog(file, self._job_id, addresses.host_name(), self._about()))
