"""The driver of a job on several nodes: one plan, one result, and no node left running when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from davincirunsdk import __version__
from davincirunsdk.cluster import file_name
from davincirunsdk.concurrency import Patience, in_thread, resolve, shield
from davincirunsdk.engines.joint import judge, table_of
from davincirunsdk.engines.messages import NodePlan
from davincirunsdk.errors import DavinciRunError, DistributedRuntimeError, PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.logs.events_file import EVENTS_PATIENCE, EventLog
from davincirunsdk.logs.file import LogFile, open_log_files
from davincirunsdk.logs.streams import BlockStream, Feed, LineStream, LogHub
from davincirunsdk.options import Display, JobKeywords, JobOptions, parse_ranks, refuse_unknown, spelled_out
from davincirunsdk.supervision.verdict import must_raise
from davincirunsdk.types import Event, JobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Unpack

    from davincirunsdk.engines.messages import NodeFacts, NodeReport, NodeStarted
    from davincirunsdk.output import Sink, Snapshot
    from davincirunsdk.types import RunResult, WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

_STREAM_BYTES = 4 << 20
"""What a stream holds for a slow reader."""

_OUTPUT_BYTES = 64 << 20
"""Output of all nodes together that may be under way to the driver, shared evenly among them."""

_LEAST_OUTPUT = 64 << 10
_MOST_OUTPUT = 1 << 20

_SLACK = 15.0
"""Seconds after the grace period in which a node has to say that its workers are gone."""

_DISPLAY_PATIENCE = 2.0
"""Seconds without progress after which a stuck display is given up at the end of a job."""


class NodeLostError(Exception):
    """The engine has given up a node, or the agent on it; the text says what is known."""


class NodeHandle(Protocol):
    """The driver's end of one `NodeAgent`, which says what each call does.

    Every call raises `NodeLostError` as soon as the engine knows that no answer will come.
    """

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        """See `NodeAgent.inspect`."""

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        """See `NodeAgent.start`."""

    async def report(self) -> NodeReport:
        """See `NodeAgent.report`."""

    async def stop(self, now: bool) -> None:
        """See `NodeAgent.stop`."""

    async def signal(self, number: int) -> None:
        """See `NodeAgent.signal`."""


class Placement(Protocol):
    """What an engine does for the driver: one agent on each of several nodes."""

    async def open(self) -> Sequence[NodeHandle]:
        """Place the agents; called once. A cancellation leaves nothing placed.

        Raises:
            PlatformError: The nodes or their devices cannot be had.
        """

    async def close(self) -> None:
        """End all agents, whatever they do; what they started is ended by their nodes' guardians."""


@dataclass(slots=True, eq=False)
class Member:
    """One node as the driver knows it.

    Attributes:
        handle: The way to its agent.
        facts: What the agent found there.
        node_rank: Place in the job.
        plan: What it was told to start.
        workers: As last reported.
        auxiliaries: As last reported.
        result: How its part ended, None while it goes on.
        lost: Why it is lost, "" while it is not.
        dropped: Bytes of output that it could not send.
    """

    handle: NodeHandle
    facts: NodeFacts
    node_rank: int = 0
    plan: NodePlan | None = None
    workers: tuple[WorkerStatus, ...] = ()
    auxiliaries: tuple[WorkerStatus, ...] = ()
    result: RunResult | None = None
    lost: str = ""
    dropped: int = 0
    stop_sent: bool = field(default=False)

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.node_rank} ({self.facts.host})"

    @property
    def ended(self) -> bool:
        """True when nothing more is to be heard of it."""
        return self.result is not None or bool(self.lost)


class NodesManager:
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
        **keywords: See `JobOptions`, which documents every option once.

    Raises:
        TypeError: `command` is one string.
        ValueError: `command` is empty, or another argument has no sense.
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
        **keywords: Unpack[JobKeywords],
    ) -> None:
        refuse_unknown(keywords, JobKeywords.__annotations__)
        self._set_up(placement, JobOptions.of(command, work_dir, log_dir, **keywords), collect, notify)

    @classmethod
    def from_options(
        cls,
        placement: Placement,
        options: JobOptions,
        *,
        collect: str = "all",
        notify: Callable[[str], None] | None = None,
    ) -> NodesManager:
        """Make a manager of options that have been checked before.

        Args:
            placement: The engine's nodes.
            options: What to run.
            collect: Ranks whose output is brought here for `logs`.
            notify: Takes progress lines while the job is not started yet.
        """
        manager = cls.__new__(cls)
        manager._set_up(placement, options, collect, notify)
        return manager

    def _set_up(
        self,
        placement: Placement,
        options: JobOptions,
        collect: str,
        notify: Callable[[str], None] | None,
    ) -> None:
        from davincirunsdk.platforms import job_id

        self._placement = placement
        self._options = options
        self._job_id = options.name or file_name(job_id(os.environ))
        self._collect = parse_ranks(collect)
        self._notify = notify or (lambda text: logger.warning("%s", text))

        self._members: list[Member] = []
        self._table = ""
        self._troubled: list[Member] = []
        self._start_error: DavinciRunError | None = None
        self._unstarted = 0
        self._stopping = False
        self._overdue: asyncio.Future[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._hub = LogHub(None)
        self._sink: Sink | None = None
        self._events: list[Event] = []
        self._feeds: list[Feed[Event]] = []
        self._event_log: EventLog | None = None
        self._events_written: asyncio.Future[None] | None = None
        self._began = time.time()
        self._result: RunResult | None = None
        self._error: DavinciRunError | None = None
        self._told = False

    async def __aenter__(self) -> NodesManager:
        """Place an agent on every node and start all workers.

        Returns:
            The manager, when the workers of all nodes have been started.

        Raises:
            PlatformError: The nodes, their devices or a folder cannot be had.
            RankTableError: The nodes' devices make no rank table.
            WorkerSpawnError: The command or a worker cannot be started on one of the nodes; nothing
                of it is left on any.
        """
        if self._task is not None:
            raise RuntimeError("this manager was entered before; make a new one for another run")
        loop = asyncio.get_running_loop()
        handles = await self._placement.open()
        try:
            await self._plan(handles)
            self._open_display()
            await self._open_event_log()
        except BaseException:
            await self._to_the_end(self._placement.close())
            raise
        self._started, self._overdue = loop.create_future(), loop.create_future()
        self._task = loop.create_task(self._supervise(), name="davincirun-driver")
        waits = Patience(self._request_stop)
        with shield():
            await waits.until_any(self._started, self._task)
            if self._task.done() or waits.cancelled:
                await waits.until_any(self._task)
        waits.settle()
        if self._start_error is not None:
            raise self._start_error
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
        """Wait for the end of the job on all nodes.

        Cancelling cancels the waiting, not the job.

        Returns:
            The result of a job that succeeded or was stopped: workers of all nodes in rank order,
            paths as they are on the nodes.

        Raises:
            DistributedRuntimeError: A worker failed by itself, or a node was lost.
        """
        if self._task is None:
            raise RuntimeError("this manager was not started: use `async with`")
        await asyncio.wait({self._task})
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self, *, now: bool = False) -> Awaitable[None]:
        """Stop the job on all nodes: SIGTERM, and SIGKILL when the grace period is over.

        The stop begins with the call; awaiting what it returns waits until nothing is left.
        Cancelling that cancels the waiting, not the stop.

        Args:
            now: SIGKILL at once.
        """
        self._request_stop(now=now)
        return asyncio.ensure_future(self._gone())

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        if self._result is not None:
            return self._result.state
        if self._error is not None:
            return JobState.FAILED
        if self._started is None or not self._started.done():
            return JobState.PENDING
        return JobState.STOPPING if self._stopping else JobState.RUNNING

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The workers of all nodes as last reported, in rank order."""
        found = [worker for member in self._members for worker in member.workers]
        return tuple(sorted(found, key=lambda worker: worker.rank))

    @property
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """Processes that serve the workers and are no rank, such as MindSpore's scheduler."""
        return tuple(worker for member in self._members for worker in member.auxiliaries)

    @property
    def error(self) -> DavinciRunError | None:
        """What `wait` raises, None while there is no failure."""
        return self._error

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

    def logs(self, ranks: Iterable[int] | None = None) -> LineStream:
        """Stream output as lines, in order per rank; see `FMKManager.logs`."""
        return LineStream(self.log_blocks(ranks))

    def log_blocks(self, ranks: Iterable[int] | None = None) -> BlockStream:
        """Stream output as `LogBlock`s of bytes; see `FMKManager.log_blocks`."""
        return self._hub.subscribe(None if ranks is None else frozenset(ranks), _STREAM_BYTES)

    def events(self) -> Feed[Event]:
        """Stream the events of all nodes, from the first on, until the job has ended.

        Times are those of the nodes' own clocks: the order holds within a node only.
        """
        feed: Feed[Event] = Feed()
        for event in self._events:
            feed.offer(event)
        if self._task is not None and self._task.done():
            feed.close()
        else:
            self._feeds.append(feed)
        return feed

    async def _plan(self, handles: Sequence[NodeHandle]) -> None:
        """Ask all nodes what they have, and settle who is which node and where they meet."""
        try:
            facts = await asyncio.gather(
                *(handle.inspect(self._options.nproc_per_node) for handle in handles)
            )
        except NodeLostError as error:
            raise PlatformError(f"a node was lost before the job began: {error}; start it again") from None
        self._table, order = await in_thread(table_of, facts)
        members = [Member(handle=handles[place], facts=facts[place]) for place in order]
        per_node = _workers_per_node([member.facts for member in members], self._options.nproc_per_node)
        wanted = self._wanted_ranks()
        held = min(_MOST_OUTPUT, max(_LEAST_OUTPUT, _OUTPUT_BYTES // len(members)))
        for node_rank, member in enumerate(members):
            member.node_rank = node_rank
            member.plan = NodePlan(
                options=replace(
                    self._options,
                    nproc_per_node=per_node,
                    nnodes=len(members),
                    node_rank=node_rank,
                    master_addr=members[0].facts.address,
                    master_port=self._options.master_port or members[0].facts.port,
                    # The engine counts its nodes by itself, whatever started it counts otherwise.
                    ignore_platform=True,
                    display=Display(),
                ),
                wanted_ranks=wanted,
                held_bytes=held,
            )
        self._members = members
        if any(member.facts.devices for member in members) and not self._table and len(members) > 1:
            self._notify(
                "no addresses of NPUs were found: without a rank table workers meet at node 0's address"
            )

    def _wanted_ranks(self) -> frozenset[int] | None:
        """Tell whose output the nodes have to send; None means all."""
        shown = self._options.display.ranks
        return None if self._collect is None or shown is None else self._collect | shown

    async def _supervise(self) -> None:
        waits = Patience(self._request_stop)
        try:
            await self._start_all(waits)
        finally:
            await waits.wait(asyncio.ensure_future(self._placement.close()))
            await self._judge(waits)
            if self._sink is not None:
                await waits.wait(in_thread(self._sink.close, _DISPLAY_PATIENCE))
            if self._event_log is not None and self._events_written is not None:
                self._event_log.close()
                await waits.within(EVENTS_PATIENCE, self._events_written)
            self._hub.close()
            for feed in self._feeds:
                feed.close()
        waits.settle()

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
        for errand in tuple(self._errands):
            errand.cancel()

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
            self._unstarted -= 1
            if not self._unstarted:
                assert self._started is not None
                resolve(self._started, None)
            if member.stop_sent:
                # A stop that overtook the start found nothing to stop.
                await member.handle.stop(False)
            while not member.ended:
                self._take(member, await member.handle.report())
        except NodeLostError as error:
            self._lose(member, str(error))
        except Exception as error:
            # A fault of ours on one node must not leave the others alone.
            logger.exception("the agent on %s failed", member.name)
            self._lose(member, f"{type(error).__name__}: {error}")

    def _take(self, member: Member, report: NodeReport) -> None:
        if report.workers:
            member.workers, member.auxiliaries = report.workers, report.auxiliaries
        member.dropped = report.dropped
        for event in report.events:
            if event.kind == "stopping" and not member.stop_sent:
                self._fail_fast(member, f"{event.detail} on {member.name}")
            if event.kind != "finished":
                about = event.detail if event.rank is not None else f"{member.name}: {event.detail}"
                self._emit(replace(event, detail=about), member)
        for block in report.blocks:
            self._hub.publish(block)
        member.result = report.result
        if report.departing:
            self._lose(member, report.departing)

    def _fail_start(self, member: Member, error: DavinciRunError) -> None:
        member.lost = "its workers could not be started"
        if self._start_error is None:
            error.args = (f"{member.name}: {error.args[0]}", *error.args[1:])
            self._start_error = error
        self._fail_fast(member, f"workers could not be started on {member.name}")

    def _lose(self, member: Member, why: str) -> None:
        if member.result is not None:
            return
        member.lost = why
        text = f"{member.name} was lost: {why}"
        self._emit(Event(kind="warning", time=time.time(), detail=text), member)
        self._fail_fast(member, f"{member.name} was lost")

    def _fail_fast(self, member: Member, reason: str) -> None:
        self._troubled.append(member)
        if not self._stopping:
            self._begin_stop(reason=reason, but=member)

    def _request_stop(self, *, now: bool = False) -> None:
        if self._task is not None and not self._task.done():
            self._begin_stop(reason="stop was asked for", now=now)

    def _begin_stop(self, *, reason: str, now: bool = False, but: Member | None = None) -> None:
        if not self._stopping:
            self._stopping = True
            self._emit(Event(kind="stopping", time=time.time(), detail=reason))
            loop = asyncio.get_running_loop()
            assert self._overdue is not None
            loop.call_later(self._options.grace_period + _SLACK, resolve, self._overdue, None)
        for member in self._living():
            if (now or not member.stop_sent) and member is not but:
                member.stop_sent = True
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

    async def _judge(self, waits: Patience) -> None:
        # In a thread: with thousands of workers it would hold up the loop that we are a guest in.
        result = await waits.wait(
            in_thread(lambda: judge(self._members, self._troubled, job_id=self._job_id, began=self._began))
        )
        self._result = result
        report = result.report
        if report is not None and must_raise(report) and self._start_error is None:
            self._error = DistributedRuntimeError(report.text, report=report, result=result)
        self._emit(
            Event(kind="finished", time=result.ended, exit_code=result.exit_code, detail=result.state.value)
        )

    def _open_display(self) -> None:
        display = self._options.display
        if not display.on_stream:
            return
        from davincirunsdk.output import choose_sink, parse_prefix

        names = {-1: "scheduler"}
        for member in self._members:
            assert member.plan is not None
            per_node = member.plan.options.nproc_per_node or 0
            for rank in range(member.node_rank * per_node, (member.node_rank + 1) * per_node):
                names[rank] = f"node {member.node_rank} rank {rank}"
        self._sink = choose_sink(
            names=names,
            snapshot=self._snapshot,
            echo=display.ranks,
            stream=sys.stdout,
            live=display.live,
            prefix=parse_prefix(display.prefix),
            colour=display.color,
        )
        if self._sink is not None:
            self._hub.show = self._sink.write

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
        self._event_log = EventLog(file, self._job_id, addresses.host_name())
        self._events_written = self._event_log.start()

    def _snapshot(self) -> Snapshot:
        from davincirunsdk.output import Snapshot

        return Snapshot(
            job_id=self.job_id,
            state=self.state,
            workers=(*self.workers, *self.auxiliaries),
            log_dir=self._options.default_log_dir,
            report=str(self._error) if self._error is not None else "",
        )

    def _emit(self, event: Event, member: Member | None = None) -> None:
        self._events.append(event)
        for feed in self._feeds:
            feed.offer(event)
        if self._event_log is not None:
            self._event_log.put(event, member.facts.host if member is not None else "")

    async def _gone(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    @staticmethod
    async def _to_the_end(call: Awaitable[None]) -> None:
        waits = Patience(lambda: None)
        with shield():
            await waits.wait(asyncio.ensure_future(call))
        waits.settle()


def _workers_per_node(facts: Sequence[NodeFacts], wanted: int | None) -> int:
    """Settle the number of workers per node, and refuse nodes that do not fit together."""
    versions = sorted({fact.version for fact in facts} - {__version__})
    if versions:
        raise PlatformError(
            f"found davincirunsdk {', '.join(versions)} on some nodes and {__version__} here; expected one "
            "version: install the same on all nodes"
        )
    counts = {fact.devices for fact in facts}
    if len(counts) > 1:
        listed = ", ".join(f"{fact.devices} on {fact.host}" for fact in facts[:8])
        raise PlatformError(f"found different numbers of NPUs: {listed}; expected the same on all nodes")
    count = wanted or counts.pop()
    if not count:
        raise PlatformError(
            "found no NPU on any node; expected to learn how many workers to start: give nproc_per_node "
            "(--nproc-per-node), or look why the nodes have no device files such as /dev/davinci0"
        )
    return count
