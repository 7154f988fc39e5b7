"""The workers of all nodes together, once: started, heard of, and stopped everywhere when one fails.

It is to a job of several nodes what `supervision.attempt` is to each of them: another attempt is another
one of these, on the same nodes or on others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from davincirunsdk.concurrency import resolve
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.errors import PlatformError
from davincirunsdk.supervision.cause import NodeLost, Stalled, Straggling
from davincirunsdk.types import Event, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from davincirunsdk.channels import Channels
    from davincirunsdk.concurrency import Patience
    from davincirunsdk.engines.messages import NodeReport
    from davincirunsdk.engines.node import Member
    from davincirunsdk.errors import DavinciRunError
    from davincirunsdk.options import JobOptions
    from davincirunsdk.supervision.cause import TimeLimit

logger: logging.Logger = logging.getLogger("davincirunsdk")

_SLACK = 15.0
"""Seconds after the grace period in which a node has to say that its workers are gone."""


class JointAttempt:
    """Starts the workers of all nodes and takes the nodes' reports. All methods belong to the loop's thread.

    Args:
        members: The nodes, planned, in node rank order.
        table: The job's rank table, "" without one.
        options: Of the whole job.
        again: There was an attempt before: a node that is lost at the start is a lost node like any other.
        channels: Take events and output.
        started: Called when the workers of all nodes run.
        pass_on: Takes what a node warns of.
        note_fault: Takes an error of our own, which ends the job.

    Attributes:
        troubled: Nodes with a failure, in the order in which the news came.
        start_error: Why the workers of a node could not be started, None while they could.
        stopping: All nodes have been told to stop.
        limit: Why they were, where that was a limit of the user's.
    """

    def __init__(
        self,
        members: Sequence[Member],
        table: str,
        options: JobOptions,
        channels: Channels,
        *,
        again: bool,
        started: Callable[[], None],
        pass_on: Callable[[str], None],
        note_fault: Callable[[Exception], None],
    ) -> None:
        self.troubled: list[Member] = []
        self.start_error: DavinciRunError | None = None
        self.stopping: bool = False
        self.limit: TimeLimit | Stalled | Straggling | None = None
        self._members = members
        self._table = table
        self._options = options
        self._channels = channels
        self._again = again
        self._started = started
        self._pass_on = pass_on
        self._note_fault = note_fault
        self._has_fault = False
        self._unstarted = len(members)
        self._straggler_timer: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def cause(self) -> TimeLimit | Stalled | Straggling | NodeLost | None:
        """What ended it, where that was no worker's failure and no wish."""
        return self.limit or next(
            (NodeLost(node=member.name) for member in self._members if member.lost), None
        )

    async def run(self, waits: Patience) -> None:
        """Start the workers of all nodes and see them to their end.

        Args:
            waits: Of the job.
        """
        loop = asyncio.get_running_loop()
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
        if self._straggler_timer is not None:
            self._straggler_timer.cancel()
        for errand in tuple(self._errands):
            errand.cancel()

    def signal(self, number: int) -> None:
        """Pass a signal on to every running worker of every node."""
        for member in self._living():
            self._errand(partial(member.handle.signal, number))

    def reach_limit(self, limit: TimeLimit | Stalled | Straggling) -> None:
        """Stop all nodes for a limit of the user's, if they are not stopping already.

        Args:
            limit: Which.
        """
        if not self.stopping:
            self.limit = limit
            self.stop(reason=limit.words)

    def stop(self, *, reason: str, now: bool = False, but: Member | None = None) -> None:
        """Tell all nodes to stop, or to hasten that; never blocks.

        Args:
            reason: Why.
            now: SIGKILL at once.
            but: One that stops by itself.
        """
        if not self.stopping:
            self.stopping = True
            self._emit(Event(kind="stopping", time=time.time(), detail=reason))
            loop = asyncio.get_running_loop()
            loop.call_later(self._options.grace_period + _SLACK, resolve, self._overdue, None)
        for member in self._living():
            if (now or not member.stop_sent) and member is not but:
                member.stop_sent, member.hurry = True, now
                self._errand(partial(member.handle.stop, now))

    # What a node says.

    async def _see_through(self, member: Member) -> None:
        """Start one node's workers and take its reports until its part of the job has ended."""
        assert member.plan is not None
        if self.stopping:
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
                self._started()
            if member.stop_sent:
                # A stop that overtook the start found nothing to stop.
                await member.handle.stop(member.hurry)
            while not member.ended:
                self._take(member, await member.handle.report())
        except NodeLostError as error:
            self._lose(member, str(error))
        except Exception as error:
            # A fault of ours on one node must not leave the others alone.
            self._has_fault = True
            self._note_fault(error)
            self._lose(member, f"{type(error).__name__}: {error}")

    def _take(self, member: Member, report: NodeReport) -> None:
        if report.workers:
            member.workers, member.auxiliaries = report.workers, report.auxiliaries
        member.dropped = report.dropped
        for event in report.events:
            self._take_event(member, event)
        for block in report.blocks:
            self._channels.hub.publish(block)
        member.result = report.result
        self._look_at_end(member)
        if report.departing:
            self._lose(member, report.departing)
        self._tell_the_last()

    def _take_event(self, member: Member, event: Event) -> None:
        if event.kind in ("stalled", "resumed"):
            member.stalled = event.detail if event.kind == "stalled" else ""
            self._look_for_stall()
            return
        if event.kind == "stopping" and not member.stop_sent:
            self._fail_fast(member, f"{event.detail} on {member.name}")
        if event.kind == "exited" and event.exit_code == 0 and event.rank is not None:
            self._give_stragglers_time(event.rank)
        if event.kind == "warning" and event.rank is None:
            self._pass_on(f"{member.name}: {event.detail}")
        if event.kind != "finished":
            about = event.detail if event.rank is not None else f"{member.name}: {event.detail}"
            self._emit(replace(event, detail=about), member)

    def _look_at_end(self, member: Member) -> None:
        """Stop the other nodes for one whose last workers failed: with none left it stops nobody itself."""
        result = member.result
        if result is not None and result.failures and not member.stop_sent and member not in self.troubled:
            if self._options.keep_going:
                self.troubled.append(member)
            else:
                self._fail_fast(member, f"a worker failed on {member.name}")

    def _tell_the_last(self) -> None:
        """Let the node that has MindSpore's scheduler know when only its own workers are left."""
        living = self._living()
        if len(living) == 1 and living[0].auxiliaries and not living[0].last_told:
            living[0].last_told = True
            self._errand(living[0].handle.ranks_ended)

    # Whether the workers of all nodes together get on.

    def _look_for_stall(self) -> None:
        """The job has stalled when the ranks of no node show progress."""
        quiet = [member for member in self._living() if member.stalled]
        if self.stopping or len(quiet) < len(self._living()):
            return
        detail = "; ".join(f"on {member.name}, {member.stalled}" for member in quiet[:8])
        cause = Stalled(seconds=self._options.stall_timeout or 0.0, detail=detail)
        logger.warning("%s", cause.words)
        self._emit(Event(kind="stalled", time=time.time(), detail=cause.words))
        if self._options.on_stall != "warn":
            self.reach_limit(cause)

    def _give_stragglers_time(self, first: int) -> None:
        """Give the others their time after a good end, the first of all nodes."""
        seconds = self._options.straggler_timeout
        if seconds is not None and first >= 0 and self._straggler_timer is None and not self.stopping:
            loop = asyncio.get_running_loop()
            self._straggler_timer = loop.call_later(seconds, self._stop_stragglers, seconds, first)

    def _stop_stragglers(self, seconds: float, first: int) -> None:
        running = tuple(
            worker.rank
            for member in self._living()
            for worker in member.workers
            if worker.state is WorkerState.RUNNING
        )
        if running:
            self.reach_limit(Straggling(seconds=seconds, first=first, ranks=running))

    # How a node fails.

    def _fail_start(self, member: Member, error: DavinciRunError) -> None:
        member.lost = "its workers could not be started"
        if self.start_error is None:
            error.args = (f"{member.name}: {error.args[0]}", *error.args[1:])
            self.start_error = error
        self._fail_fast(member, f"workers could not be started on {member.name}")

    def _lose(self, member: Member, why: str) -> None:
        if member.result is not None:
            return
        member.lost = why
        text = f"{member.name} was lost: {why}"
        self._emit(Event(kind="warning", time=time.time(), detail=text), member)
        if not (member.started or self._again or self._has_fault) and self.start_error is None:
            # Without workers of its own in the report, and maybe of none, it would be a report on nothing.
            self.start_error = PlatformError(
                f"{member.name} was lost while its workers were started: {why}; look at that host, "
                "then start the job again"
            )
        self._fail_fast(member, f"{member.name} was lost")

    def _fail_fast(self, member: Member, reason: str) -> None:
        self.troubled.append(member)
        if not self.stopping:
            self.stop(reason=reason, but=member)

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

    def _emit(self, event: Event, member: Member | None = None) -> None:
        self._channels.emit(event, member.facts.host if member is not None else "")
