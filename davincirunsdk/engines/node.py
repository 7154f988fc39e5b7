"""One node of a job as the driver knows it, and what an engine has to offer for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import LogPiece, NodeFacts, NodePlan, NodeReport, NodeStarted
    from davincirunsdk.types import RunResult, WorkerStatus


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

    async def ranks_ended(self) -> None:
        """See `NodeAgent.ranks_ended`."""

    async def sees_file(self, path: str, beginning: bytes) -> bool:
        """See `NodeAgent.sees_file`."""

    async def read_log(self, rank: int, start: int, size: int) -> LogPiece:
        """See `NodeAgent.read_log`."""

    async def set_logs_aside(self, attempt: int) -> None:
        """See `NodeAgent.set_logs_aside`."""


class Placement(Protocol):
    """What an engine does for the driver: one agent on each of several nodes.

    Attributes:
        renewal_timeout: Seconds within which nodes may be had in place of lost ones; 0 where there are no
            others.
    """

    renewal_timeout: float

    async def open(self, table: GivenTable | None) -> Sequence[NodeHandle]:
        """Place the agents; called once. A cancellation leaves nothing placed.

        Args:
            table: Rank table that says which nodes to take; the handles come in its nodes' order.

        Raises:
            PlatformError: The nodes or their devices cannot be had.
            RankTableError: The engine's nodes are not those of the table.
        """

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        """End the agents, give all nodes back, and place agents anew on as many nodes as are to be had.

        A cancellation leaves what `close` ends.

        Args:
            bound: Seconds to wait for nodes, `renewal_timeout` at most.

        Raises:
            PlatformError: The nodes cannot be had.
            RankTableError: They are not those of the given table any more.
        """

    async def until_lost(self) -> str:
        """Wait until the engine itself is lost and the job has to end, and say what is lost, and why.

        Waits for ever where an engine has no part that all nodes need. Cancelling ends the waiting.
        """

    async def close(self) -> None:
        """End all agents, whatever they do; what they started is ended by their nodes' guardians.

        Takes some seconds at most, whatever has become of the engine.
        """


@dataclass(slots=True, eq=False)
class Member:
    """One node as the driver knows it.

    Attributes:
        handle: The way to its agent.
        facts: What the agent found there.
        ranks: Of its workers, as the plan has it.
        node_rank: Place in the job.
        plan: What it was told to start.
        workers: As last reported.
        auxiliaries: As last reported.
        result: How its part ended, None while it goes on.
        lost: Why it is lost, "" while it is not.
        dropped: Bytes of output that it could not send.
        started: It has said that its workers are started.
        stop_sent: It has been told to stop.
        hurry: It has been told to stop at once.
        stalled: What it says of its ranks while none of them shows progress, else "".
        last_told: It has been told that the workers of all other nodes have ended.
    """

    handle: NodeHandle
    facts: NodeFacts
    ranks: tuple[int, ...] = ()
    node_rank: int = 0
    plan: NodePlan | None = None
    workers: tuple[WorkerStatus, ...] = ()
    auxiliaries: tuple[WorkerStatus, ...] = ()
    result: RunResult | None = None
    lost: str = ""
    dropped: int = 0
    started: bool = False
    stop_sent: bool = field(default=False)
    hurry: bool = False
    stalled: str = ""
    last_told: bool = field(default=False)

    def begin_anew(self, plan: NodePlan) -> None:
        """Forget how its part of an attempt went.

        Args:
            plan: Of the next one.
        """
        self.plan, self.workers, self.auxiliaries, self.result = plan, (), (), None
        self.started = self.stop_sent = self.hurry = self.last_told = False
        self.stalled = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.node_rank} ({self.facts.host})"

    @property
    def ended(self) -> bool:
        """True when nothing more is to be heard of it."""
        return self.result is not None or bool(self.lost)
