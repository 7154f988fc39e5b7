"""The calls on a `NodeAgent`, and its answers, as messages for a wire."""

from __future__ import annotations

from davincirunsdk.engines.messages import (  # noqa: TC001 # the wire reads these annotations
    LogPiece,
    NodeFacts,
    NodePlan,
    NodeReport,
    NodeStarted,
)
from davincirunsdk.engines.wire import Message
from davincirunsdk.errors import DavinciRunError  # noqa: TC001 # as above


class Greeting(Message, frozen=True, kw_only=True):
    """The driver's first message.

    Attributes:
        env: Variables that the agent and its workers get.
        folders: Folders that have to be there.
        nproc_per_node: See `NodeAgent.inspect`.
        lost_after: Seconds without a sign of the driver after which it is gone.
    """

    env: dict[str, str]
    folders: tuple[str, ...]
    nproc_per_node: int | None
    lost_after: float


class Found(Message, frozen=True):
    """The agent's answer to the greeting."""

    facts: NodeFacts


class Refused(Message, frozen=True):
    """Or why this node cannot be used."""

    error: DavinciRunError


class Start(Message, frozen=True, kw_only=True):
    """See `NodeAgent.start`; `call` is repeated by the answer, as in all that follow."""

    call: int
    plan: NodePlan
    table: str


class Started(Message, frozen=True):
    """Answer to `Start`."""

    call: int
    started: NodeStarted


class Report(Message, frozen=True):
    """See `NodeAgent.report`."""

    call: int


class Reported(Message, frozen=True):
    """Answer to `Report`."""

    call: int
    report: NodeReport


class Stop(Message, frozen=True, kw_only=True):
    """See `NodeAgent.stop`."""

    call: int
    now: bool


class Signal(Message, frozen=True, kw_only=True):
    """See `NodeAgent.signal`."""

    call: int
    signal: int


class RanksEnded(Message, frozen=True, kw_only=True):
    """See `NodeAgent.ranks_ended`."""

    call: int


class SeesFile(Message, frozen=True, kw_only=True):
    """See `NodeAgent.sees_file`."""

    call: int
    path: str
    beginning: bytes


class Looked(Message, frozen=True):
    """Answer to `SeesFile`."""

    call: int
    found: bool


class ReadLog(Message, frozen=True, kw_only=True):
    """See `NodeAgent.read_log`."""

    call: int
    rank: int
    start: int
    size: int


class LogRead(Message, frozen=True):
    """Answer to `ReadLog`."""

    call: int
    piece: LogPiece


class SetLogsAside(Message, frozen=True, kw_only=True):
    """See `NodeAgent.set_logs_aside`."""

    call: int
    attempt: int


class Done(Message, frozen=True):
    """Answer to `Stop`, `Signal`, `RanksEnded` and `SetLogsAside`."""

    call: int


class Failed(Message, frozen=True):
    """The agent could not do a call: an error of ours, in words."""

    call: int
    why: str


TO_AGENT = (Greeting, Start, Report, Stop, Signal, RanksEnded, SeesFile, ReadLog, SetLogsAside)
FROM_AGENT = (Found, Refused, Started, Reported, Looked, LogRead, Done, Failed)
