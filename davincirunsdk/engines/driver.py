"""The driver of a job on several nodes: one plan, one result, and no node left running when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from davincirunsdk.cluster import file_name
from davincirunsdk.concurrency import Patience, in_thread, resolve, shield
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.engines.given_table import read_given
from davincirunsdk.engines.joint import judge, ranks_of, refuse_other_versions, table_of
from davincirunsdk.engines.messages import NodePlan
from davincirunsdk.engines.node import Member, NodeLostError
from davincirunsdk.errors import DavinciRunError, PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.job import JobBody
from davincirunsdk.logs.events_file import EventLog
from davincirunsdk.logs.file import LogFile, open_log_files
from davincirunsdk.options import (
    Display,
    JobKeywords,
    JobOptions,
    parse_ranks,
    refuse_unknown,
    spelled_out,
)
from davincirunsdk.supervision.cause import NodeLost, Stalled, Straggling
from davincirunsdk.supervision.restarts import Restarts, requeued
from davincirunsdk.types import Event, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import NodeFacts, NodeReport
    from davincirunsdk.engines.node import NodeHandle, Placement
    from davincirunsdk.supervision.cause import TimeLimit
    from davincirunsdk.types import RunResult, WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

_OUTPUT_BYTES = 64 << 20
"""Output of all nodes together that may be under way to the driver, shared evenly among them."""

_LEAST_OUTPUT = 64 << 10
_MOST_OUTPUT = 1 << 20

_MOST_WARNINGS = 32
"""Warnings of nodes that are said: what one of a thousand nodes warns of, all others may, too."""

_OTHERS = 2.0
"""Seconds for the answers of all nodes when one of them is lost before the start."""

_SLACK = 15.0
"""Seconds after the grace period in which a node has to say that its workers are gone."""


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
        self._troubled: list[Member] = []
        self._failed_start: DavinciRunError | None = None
        self._unstarted = 0
        self._stopping = False
        self._limit: TimeLimit | Stalled | Straggling | None = None
        self._straggler_timer: asyncio.TimerHandle | None = None
        self._engine_lost = ""
        self._passed_on = 0
        self._restarts = Restarts(self._options, nnodes=1, requeued=requeued(os.environ))
        self._pausing: asyncio.Future[None] | None = None
        self._stopped_in_pause = False
        self._overdue: asyncio.Future[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()

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
        """Name of the job; log files are named by each node's own."""
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
        for member in self._living():
            self._errand(partial(member.handle.signal, number))

    async def _prepare(self) -> None:
        # Before the run begins: a stop may come in between.
        self._overdue = asyncio.get_running_loop().create_future()
        self._given = await read_given(self._options, self._notify)
        handles = await self._placement.open(self._given)
        try:
            await self._plan(handles)
            self._channels.open_display(self._options.display, self._names(), self._snapshot)
            await self._open_event_log()
        except BaseException:
            waits = Patience(lambda: None)
            with shield():
                await self._give_back(waits)
            waits.settle()
            raise

    async def _give_back(self, waits: Patience) -> None:
        try:
            await waits.wait(asyncio.ensure_future(self._placement.close()))
        except Exception as error:
            # How the job ended, or why it did not begin, is known and stays so.
            logger.warning("the nodes could not be given back: %s: %s", type(error).__name__, error)

    async def _plan(self, handles: Sequence[NodeHandle]) -> None:
        """Ask all nodes what they have, and settle who is which node and where they meet."""
        facts = await self._inspect(handles)
        refuse_other_versions(facts)
        given = self._given
        if given is not None:
            await in_thread(given.check_devices, facts)
            self._table, order = given.text, tuple(range(len(facts)))
            ranks = [tuple(row.rank for row in node.rows) for node in given.nodes]
        else:
            self._table, order = await in_thread(table_of, facts)
            ranks = ranks_of(facts, self._options.nproc_per_node)
        members = [
            Member(handle=handles[place], facts=facts[place], ranks=own)
            for place, own in zip(order, ranks, strict=True)
        ]
        wanted = self._wanted_ranks()
        held = min(_MOST_OUTPUT, max(_LEAST_OUTPUT, _OUTPUT_BYTES // len(members)))
        for node_rank, member in enumerate(members):
            member.node_rank = node_rank
            member.plan = NodePlan(
                options=replace(
                    self._options,
                    nproc_per_node=len(member.ranks),
                    rank_table=None,
                    nnodes=len(members),
                    node_rank=node_rank,
                    master_addr=members[0].facts.address,
                    master_port=self._options.master_port or members[0].facts.port,
                    # The engine counts its nodes by itself, whatever started it counts otherwise.
                    ignore_platform=True,
                    display=Display(),
                    report=None,
                    html=None,
                    metrics=None,
                    on_end=None,
                    sample_usage=self._options.html is not None,
                    timeout=None,
                    driven_attempt=0,
                ),
                wanted_ranks=wanted,
                held_bytes=held,
            )
        self._members = members
        if any(member.facts.devices for member in members) and not self._table and len(members) > 1:
            self._notify(
                "no addresses of NPUs were found: without a rank table workers meet at node 0's address"
            )

    async def _inspect(self, handles: Sequence[NodeHandle]) -> list[NodeFacts]:
        """Ask all nodes what they have.

        Raises:
            PlatformError: Some are lost, or have not what was asked for; says which.
        """
        # A table may name any of a node's devices.
        count = self._options.nproc_per_node if self._given is None else None
        calls = [asyncio.ensure_future(one.inspect(count)) for one in handles]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.done() and call.exception() is not None for call in calls):
                # What is wrong with one node is often wrong with others.
                await asyncio.wait(calls, timeout=_OTHERS)
            errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
            lost = [error for error in errors if isinstance(error, NodeLostError)]
            if lost and len(lost) == len(errors):
                listed = "; ".join(dict.fromkeys(map(str, lost)))
                raise PlatformError(f"{len(lost)} of {len(calls)} nodes cannot take part: {listed}")
            if errors:
                raise next(error for error in errors if error not in lost)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def _wanted_ranks(self) -> frozenset[int] | None:
        """Tell whose output the nodes have to send; None means all."""
        shown = self._options.display.ranks
        return None if self._collect is None or shown is None else self._collect | shown

    async def _run(self, waits: Patience) -> None:
        loop = asyncio.get_running_loop()
        watch = loop.create_task(self._watch_engine(), name="davincirun-engine")
        try:
            while True:
                self._restarts.begin()
                await self._start_all(waits)
                if not await self._may_try_again(waits):
                    break
        finally:
            watch.cancel()
        if self._failed_start is not None:
            raise self._failed_start

    async def _watch_engine(self) -> None:
        """End the job in good time when what all its nodes need is lost."""
        self._engine_lost = await self._placement.until_lost()
        logger.warning("%s", self._engine_lost)
        self._emit(Event(kind="warning", time=time.time(), detail=self._engine_lost))
        self._begin_stop(reason=self._engine_lost)

    async def _start_all(self, waits: Patience) -> None:
        """Start the workers of all nodes and see them to their end; another run would be another call."""
        loop = asyncio.get_running_loop()
        assert self._overdue is not None
        self._unstarted = len(self._members)
        tasks = {
            loop.create_task(self._see_through(member), name=f"davincirun-{member.name}"): member
            for member in self._members
        }
        while pending := [task for task in tasks if not task.done()]:
            await waits.until_any(self._overdue, *pending)
            if self._overdue.done():
                for task in pending:
                    self._lose(tasks[task], "it did not say in time that its workers are gone")
                    task.cancel()
                await asyncio.wait(pending)
                break
        self._forget_stragglers()
        for errand in tuple(self._errands):
            errand.cancel()

    async def _may_try_again(self, waits: Patience) -> bool:
        """Plan the next attempt on the same nodes after its delay, if there is to be one."""
        if self._failed_start is not None or self._stop_wanted or self._engine_lost:
            return False
        result = await self._judge(waits)
        pause = self._restarts.next(
            result, self._limit or self._lost(), time_left=self._ends_at - time.monotonic()
        )
        if pause is None:
            if self._restarts.why:
                self._say(f"no restart: {self._restarts.why}")
            return False
        number = len(self._restarts.earlier)
        most = self._options.max_restarts
        text = f"{self._restarts.earlier[-1]}; restart {number} of at most {most} in {pause:g} s"
        logger.warning("%s", text)
        self._emit(Event(kind="restarting", time=time.time(), detail=text))
        self._tell_started()
        self._pausing = asyncio.get_running_loop().create_future()
        await waits.within(pause, self._pausing)
        if self._stop_wanted:
            self._stopped_in_pause, self._troubled = True, []
            return False
        if self._engine_lost:
            self._stopped_in_pause = True
            return False
        # The port of the attempt before may still be held.
        facts = self._members[0].facts
        ports = (facts.port, *facts.more_ports)
        for member in self._members:
            assert member.plan is not None
            options = replace(
                member.plan.options,
                master_port=self._options.master_port or ports[number % len(ports)],
                driven_attempt=number,
            )
            member.begin_anew(replace(member.plan, options=options))
        self._stopping, self._limit, self._troubled = False, None, []
        self._forget_stragglers()
        self._overdue = asyncio.get_running_loop().create_future()
        return not self._stop_wanted

    def _lost(self) -> NodeLost | None:
        return next((NodeLost(node=member.name) for member in self._members if member.lost), None)

    def _say(self, text: str) -> None:
        logger.warning("%s", text)
        self._emit(Event(kind="warning", time=time.time(), detail=text))

    async def _see_through(self, member: Member) -> None:
        """Start one node's workers and take its reports until its part of the job has ended."""
        assert member.plan is not None
        if self._stopping:
            return
        try:
            answer = await member.handle.start(member.plan, self._table)
            member.workers, member.auxiliaries = answer.workers, answer.auxiliaries
            if answer.error is not None:
                self._fail_start(member, answer.error)
                return
            member.started = True
            self._unstarted -= 1
            if not self._unstarted:
                self._tell_started()
            if member.stop_sent:
                # A stop that overtook the start found nothing to stop.
                await member.handle.stop(member.hurry)
            while not member.ended:
                self._take(member, await member.handle.report())
        except NodeLostError as error:
            self._lose(member, str(error))
        except Exception as error:
            # A fault of ours on one node must not leave the others alone.
            self._note_fault(error)
            self._lose(member, f"{type(error).__name__}: {error}")

    def _take(self, member: Member, report: NodeReport) -> None:
        if report.workers:
            member.workers, member.auxiliaries = report.workers, report.auxiliaries
        member.dropped = report.dropped
        for event in report.events:
            if event.kind in ("stalled", "resumed"):
                member.stalled = event.detail if event.kind == "stalled" else ""
                self._look_for_stall()
                continue
            if event.kind == "stopping" and not member.stop_sent:
                self._fail_fast(member, f"{event.detail} on {member.name}")
            if event.kind == "exited" and event.exit_code == 0 and event.rank is not None:
                self._give_stragglers_time(event.rank)
            if event.kind == "warning" and event.rank is None:
                self._pass_on(f"{member.name}: {event.detail}")
            if event.kind != "finished":
                about = event.detail if event.rank is not None else f"{member.name}: {event.detail}"
                self._emit(replace(event, detail=about), member)
        for block in report.blocks:
            self._channels.hub.publish(block)
        member.result = report.result
        self._look_at_end(member)
        if report.departing:
            self._lose(member, report.departing)
        self._tell_the_last()

    def _look_at_end(self, member: Member) -> None:
        """Stop the other nodes for one whose last workers failed: with none left it stops nobody itself."""
        result = member.result
        if result is not None and result.failures and not member.stop_sent and member not in self._troubled:
            if self._options.keep_going:
                self._troubled.append(member)
            else:
                self._fail_fast(member, f"a worker failed on {member.name}")

    def _pass_on(self, text: str) -> None:
        """Say at once what a node warns of, such as its full disk, which nobody sees there."""
        self._passed_on += 1
        if self._passed_on <= _MOST_WARNINGS:
            logger.warning("%s", text)
        elif self._passed_on == _MOST_WARNINGS + 1:
            logger.warning("further warnings of nodes are in the events file only")

    def _look_for_stall(self) -> None:
        """The job has stalled when the ranks of no node show progress."""
        quiet = [member for member in self._living() if member.stalled]
        if self._stopping or len(quiet) < len(self._living()):
            return
        detail = "; ".join(f"on {member.name}, {member.stalled}" for member in quiet[:8])
        cause = Stalled(seconds=self._options.stall_timeout or 0.0, detail=detail)
        logger.warning("%s", cause.words)
        self._emit(Event(kind="stalled", time=time.time(), detail=cause.words))
        if self._options.on_stall != "warn":
            self._limit = cause
            self._begin_stop(reason=cause.words)

    def _give_stragglers_time(self, first: int) -> None:
        """Give the others their time after a good end, the first of all nodes."""
        seconds = self._options.straggler_timeout
        if seconds is not None and first >= 0 and self._straggler_timer is None and not self._stopping:
            loop = asyncio.get_running_loop()
            self._straggler_timer = loop.call_later(seconds, self._stop_stragglers, seconds, first)

    def _stop_stragglers(self, seconds: float, first: int) -> None:
        running = tuple(
            worker.rank
            for member in self._living()
            for worker in member.workers
            if worker.state is WorkerState.RUNNING
        )
        if running and not self._stopping:
            self._limit = Straggling(seconds=seconds, first=first, ranks=running)
            self._begin_stop(reason=self._limit.words)

    def _forget_stragglers(self) -> None:
        if self._straggler_timer is not None:
            self._straggler_timer.cancel()
            self._straggler_timer = None

    def _reach_time_limit(self, limit: TimeLimit) -> None:
        if not self._stopping:
            self._limit = limit
            self._begin_stop(reason=limit.words)

    def _tell_the_last(self) -> None:
        """Let the node that has MindSpore's scheduler know when only its own workers are left."""
        living = self._living()
        if len(living) == 1 and living[0].auxiliaries and not living[0].last_told:
            living[0].last_told = True
            self._errand(living[0].handle.ranks_ended)

    def _fail_start(self, member: Member, error: DavinciRunError) -> None:
        member.lost = "its workers could not be started"
        if self._failed_start is None:
            error.args = (f"{member.name}: {error.args[0]}", *error.args[1:])
            self._failed_start = error
        self._fail_fast(member, f"workers could not be started on {member.name}")

    def _lose(self, member: Member, why: str) -> None:
        if member.result is not None:
            return
        member.lost = why
        text = f"{member.name} was lost: {why}"
        self._emit(Event(kind="warning", time=time.time(), detail=text), member)
        if not member.started and self._failed_start is None and self._fault is None:
            # Without workers of its own in the report, and maybe of none, it would be a report on nothing.
            self._failed_start = PlatformError(
                f"{member.name} was lost while its workers were started: {why}; look at that host, "
                "then start the job again"
            )
        self._fail_fast(member, f"{member.name} was lost")

    def _fail_fast(self, member: Member, reason: str) -> None:
        self._troubled.append(member)
        if not self._stopping:
            self._begin_stop(reason=reason, but=member)

    def _begin_stop(self, *, reason: str, now: bool = False, but: Member | None = None) -> None:
        if self._pausing is not None:
            resolve(self._pausing, None)
        if not self._stopping:
            self._stopping = True
            self._emit(Event(kind="stopping", time=time.time(), detail=reason))
            loop = asyncio.get_running_loop()
            assert self._overdue is not None
            loop.call_later(self._options.grace_period + _SLACK, resolve, self._overdue, None)
        for member in self._living():
            if (now or not member.stop_sent) and member is not but:
                member.stop_sent, member.hurry = True, now
                self._errand(partial(member.handle.stop, now))

    def _living(self) -> list[Member]:
        return [member for member in self._members if not member.ended]

    def _errand(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have a message sent; whoever does not get it is lost, which its reports tell."""

        async def run() -> None:
            with contextlib.suppress(NodeLostError):
                await call()

        task = asyncio.ensure_future(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _is_stopping(self) -> bool:
        return self._stopping

    async def _judge(self, waits: Patience) -> RunResult:
        # In a thread: with thousands of workers it would hold up the loop that we are a guest in.
        result = await waits.wait(
            in_thread(
                lambda: judge(
                    self._members,
                    self._troubled,
                    job_id=self._job_id,
                    began=self._began,
                    lang=choose_language(self._options.lang),
                    limit=self._limit,
                    engine_lost=self._engine_lost,
                    earlier=self._restarts.earlier,
                )
            )
        )
        if self._stopped_in_pause:
            return replace(result, attempts=self._restarts.earlier)
        return self._restarts.with_attempts(result, self._limit)

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
            file = await in_thread(open_file)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            self._notify(f"the events of all nodes cannot be written: {why}; the job goes on without")
            return
        self._channels.open_event_log(EventLog(file, self._job_id, addresses.host_name(), self._about()))

    def _emit(self, event: Event, member: Member | None = None) -> None:
        self._channels.emit(event, member.facts.host if member is not None else "")
