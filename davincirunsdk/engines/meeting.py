"""Launchers that start apart meet at node 0, so that a job on several nodes ends as one.

What passes is what an agent tells its driver, as the same messages: who fails or wants to stop, and
how each node's part ended. Node 0 says when all have to stop, and judges for all. Nothing waits for a
meeting, and where there is none, each node's launcher does what it does alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread, in_thread_or_here
from davincirunsdk.engines.joint import judge
from davincirunsdk.engines.messages import NodeFacts, NodeReport
from davincirunsdk.engines.wire import Message
from davincirunsdk.errors import PlatformError
from davincirunsdk.types import JobState, RunResult  # the wire reads this annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from davincirunsdk.engines.admission import Identity
    from davincirunsdk.types import WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

BEAT = 1.0
"""Seconds between two signs of life."""

REMINDER = 60.0
"""Seconds between two lines about who has not come yet."""

NOT_MET = "the nodes of the job have not all met"

MOST_BYTES = 16 << 20
"""Size of a message of a node that is in: its result, with the last lines of every rank that failed."""


class Told(Message, frozen=True):
    """A node tells node 0 what happened there; see `NodeAgent.report`, whose words these are."""

    report: NodeReport


class Halt(Message, frozen=True):
    """Node 0 tells a node to stop its workers."""

    reason: str


class Again(Message, frozen=True, kw_only=True):
    """Node 0 has all nodes start their workers once more, together.

    Attributes:
        number: Of the attempt, from 1.
        pause: Seconds until then.
        port: For the rendezvous, 0 for the one before.
    """

    number: int
    pause: float
    port: int


class Verdict(Message, frozen=True):
    """How the job ended, the same for all; the last that node 0 says."""

    result: RunResult


@dataclass(slots=True, eq=False, kw_only=True)
class Part:
    """One node of the job, as far as it is known here; `joint.judge` takes it as it does a `Member`."""

    node_rank: int
    facts: NodeFacts
    workers: tuple[WorkerStatus, ...] = ()
    auxiliaries: tuple[WorkerStatus, ...] = ()
    result: RunResult | None = None
    lost: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.node_rank} ({self.facts.host})"

    @property
    def ended(self) -> bool:
        """True when nothing more is to be heard of it."""
        return self.result is not None or bool(self.lost)


def part(node_rank: int, host: str) -> Part:
    """Make the part of a node of which no more is known than its place and its host's name."""
    facts = NodeFacts(host=host, address="", port=0, devices=0, table="", version="")
    return Part(node_rank=node_rank, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a meeting goes by.

    Attributes:
        identity: Who this launcher is.
        places: Addresses or names of node 0, the likeliest first.
        port: Where it listens.
        names: Names of all nodes' hosts, as far as they are known.
        known: Addresses that nodes may come from, None if they are not all known.
        required: The job must not run without a meeting.
        timeout: Seconds to wait for all nodes.
        lost_after: Seconds of silence after which a node is lost.
        grace_period: Seconds that workers have from SIGTERM to SIGKILL.
        leave_after: Seconds that a healthy node stays after a job that failed elsewhere.
        keep_going: A worker that fails stops nobody.
        keeps_port: The user gave the port for the rendezvous, so that it stays the same.
        lang: Language of the report, `en` or `zh`; node 0's is that of all.
    """

    identity: Identity
    places: tuple[str, ...]
    port: int
    names: tuple[str, ...]
    known: frozenset[str] | None
    required: bool
    timeout: float
    lost_after: float
    grace_period: float
    leave_after: float
    keeps_port: bool = False
    keep_going: bool = False
    lang: str = "en"


class Meeting(ABC):
    """This launcher's side of a meeting. All methods belong to the loop's thread.

    Args:
        terms: What it goes by.
        stop: Called with the reason when the workers here have to stop.
        say: Takes a line for people.
        workers: Gives the workers here as they stand.
        others_ended: Called on node 0 when the workers of all other nodes have ended well.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        stop: Callable[[str], None],
        say: Callable[[str], None],
        workers: Callable[[], tuple[WorkerStatus, ...]],
        others_ended: Callable[[], None],
    ) -> None:
        self._terms = terms
        self._stop = stop
        self._say = say
        self._workers = workers
        self._others_ended = others_ended
        self._own = part(terms.identity.node_rank, terms.identity.host)
        self._result: RunResult | None = None
        self._began = time.time()
        self._error: PlatformError | None = None
        self._told_alone = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.joined: bool = False

    @abstractmethod
    async def open(self) -> None:
        """Begin; returns without waiting for anybody.

        Raises:
            PlatformError: There can be no meeting, and it is required.
        """

    @abstractmethod
    def note_started(self) -> None:
        """Hear that the workers here run."""

    @abstractmethod
    def note_stop(self, reason: str, exit_code: int | None = None) -> None:
        """Hear that the workers here are stopped: told in the moment in which it is known.

        Args:
            reason: Why, in words.
            exit_code: Where somebody wanted it so: what all launchers are to end with.
        """

    @abstractmethod
    def note_wish(self, reason: str, exit_code: int) -> None:
        """Hear that somebody wants the job to end, whatever else happens; as `note_stop` otherwise."""

    async def end_attempt(
        self, result: RunResult, decide: Callable[[RunResult, str], float | None]
    ) -> Again | None:
        """Say how an attempt ended here, and hear whether all nodes are to try again.

        Args:
            result: Of this node alone.
            decide: Says on node 0, from the result of all nodes, how many seconds there are to be until
                the next attempt, None where there is to be none; its second argument says why there
                cannot be one, or "".

        Returns:
            The next attempt; None where this was the last, and `conclude` says how the job ended.
        """
        self._take_own(result, "")
        return await self._end_attempt(decide)

    async def conclude(self, result: RunResult, *, fault: str = "") -> RunResult:
        """Say how this node's part ended, and wait for the verdict over all nodes.

        Args:
            result: Of this node alone.
            fault: Why the workers here could not be started, "" if they could.

        Returns:
            The result, with state, failures, exit code and report of the whole job; what was given where
            there was no meeting.

        Raises:
            PlatformError: This node does not fit into the job, or there was no meeting and one is
                required.
        """
        self._take_own(result, fault)
        joint = await self._conclude()
        self.joined = joint is not None
        if self._error is not None:
            raise self._error
        if joint is None:
            return result
        if joint.failures and not result.failures and self._terms.leave_after:
            self._say(
                "the job failed on another node; this launcher stays "
                f"{self._terms.leave_after:g} s, so that not all nodes fail at once (--leave-after)"
            )
            await self._within(self._terms.leave_after, self._wished)
        return replace(
            result,
            state=joint.state,
            exit_code=joint.exit_code,
            failures=joint.failures,
            report=joint.report,
        )

    def hurry(self) -> None:
        """Wait for nobody any more."""
        if not self._hurry.done():
            self._hurry.set_result(None)

    async def close(self) -> None:
        """End all that belongs to the meeting; nothing is sent any more."""
        self.hurry()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @abstractmethod
    async def _conclude(self) -> RunResult | None:
        """Bring about the verdict, None where there was no meeting."""

    @abstractmethod
    async def _end_attempt(self, decide: Callable[[RunResult, str], float | None]) -> Again | None:
        """See `end_attempt`."""

    def _take_own(self, result: RunResult, fault: str) -> None:
        self._result = result
        # Workers that could not be started are the node's fault, not its result.
        self._own.result, self._own.lost = (None, fault) if fault else (result, "")
        self._own.workers, self._own.auxiliaries = result.workers, result.auxiliaries

    def _begin(self, work: asyncio.Task[None]) -> None:
        self._tasks.add(work)
        work.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The job itself needs no meeting.
            logger.error("the meeting of the nodes has an error of its own", exc_info=error)

    async def _within(self, seconds: float, *futures: asyncio.Future[None]) -> None:
        """Wait for one of the futures, unless there is a hurry."""
        await asyncio.wait({self._hurry, *futures}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _obey(self, reason: str) -> None:
        """Stop the workers here for what happened elsewhere."""
        self._say(f"stopping: {reason}")
        self._stop(reason)

    def _fail(self, error: PlatformError) -> None:
        """End the job here for a reason that is not the workers'."""
        if self._error is None:
            self._error = error
            self._stop(str(error))

    def _do_without(self, why: str) -> None:
        """Say that there is no meeting, or end the job where it needs one."""
        self._told_alone = True
        if self._terms.required:
            self._fail(PlatformError(f"no meeting of the nodes, which --meet (meet) requires: {why}"))
        else:
            self._say(f"no meeting of the nodes: {why}; each node's launcher ends by itself")

    def _note_unknown(self, whom: str, result: RunResult | None) -> None:
        """Say with a failure that it was judged without other nodes."""
        if result is not None and result.state is JobState.FAILED and not self._told_alone:
            self._say(f"no meeting with {whom}: what happened there is not known here")

    async def _judge(
        self, parts: Sequence[Part], troubled: Sequence[Part], stop_code: int | None = None
    ) -> RunResult:
        own = self._result
        assert own is not None
        joint = await in_thread_or_here(
            lambda: judge(
                parts,
                troubled,
                job_id=own.job_id,
                began=self._began,
                lang=self._terms.lang,
                earlier=own.attempts[:-1],
            )
        )
        if joint.state is JobState.STOPPED and stop_code is not None:
            report = joint.report and replace(joint.report, exit_code=stop_code)
            joint = replace(joint, exit_code=stop_code, report=report)
        return joint


def preferred(found: Iterable[str]) -> str:
    """Choose the one of node 0's addresses at which it listens and is looked for: IPv4 comes first."""
    return min(found, key=lambda one: (":" in one, one))


async def resolved(names: Sequence[str]) -> frozenset[str]:
    """Look up the addresses of hosts; those that cannot be looked up have none."""
    import socket

    def look_up() -> frozenset[str]:
        found: set[str] = set()
        for name in names:
            with contextlib.suppress(OSError, UnicodeError):
                found |= {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        return frozenset(found)

    return await in_thread(look_up)
