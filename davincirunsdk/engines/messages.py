"""What the driver of a job and the agents on its nodes tell each other: frozen data.

Ray pickles it, ssh and meetings send it as MessagePack (`wire`), which reads the annotations below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from davincirunsdk.errors import DavinciRunError  # noqa: TC001 # the wire reads these annotations
from davincirunsdk.options import JobOptions  # noqa: TC001 # as above
from davincirunsdk.types import Event, LogBlock, RunResult, WorkerStatus  # noqa: TC001 # as above


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What an agent finds on its node.

    Attributes:
        host: Name of the host.
        address: Where other nodes reach it.
        port: A port that was free for the rendezvous.
        devices: Number of NPUs that the agent may use; 0 where there are none.
        table: The host's own rank table with these NPUs, "" where there are none.
        version: Of this package.
        more_ports: Further ones that were free, for further attempts.
    """

    host: str
    address: str
    port: int
    devices: int
    table: str
    version: str
    more_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What an agent is to start.

    Attributes:
        options: What the user asked for, with the place of this node in it.
        wanted_ranks: Ranks whose output is to be sent, None for all.
        held_bytes: Output that may wait to be sent; the rest is left out and counted.
    """

    options: JobOptions
    wanted_ranks: frozenset[int] | None
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStarted:
    """An agent's answer to a plan: its workers as they stand, or why they could not be started."""

    workers: tuple[WorkerStatus, ...] = ()
    auxiliaries: tuple[WorkerStatus, ...] = ()
    error: DavinciRunError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What happened on a node since its last report.

    Attributes:
        workers: As they stand now, in rank order.
        auxiliaries: As they stand now.
        events: In order.
        blocks: Output, in order per rank.
        dropped: Bytes of output that were left out so far.
        result: How the node's part of the job ended; None while it goes on. Nothing comes after it.
        departing: Why the node leaves the job, "" while it stays.
    """

    workers: tuple[WorkerStatus, ...] = ()
    auxiliaries: tuple[WorkerStatus, ...] = ()
    events: tuple[Event, ...] = ()
    blocks: tuple[LogBlock, ...] = ()
    dropped: int = 0
    result: RunResult | None = None
    departing: str = field(default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece:
    """A part of a worker's log file.

    Attributes:
        size: Bytes of the whole file.
        data: Those that were asked for, fewer at its end.
    """

    size: int
    data: bytes
