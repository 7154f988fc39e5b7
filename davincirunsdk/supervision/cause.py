"""Why an attempt ends before its workers do."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TypeAlias

from davincirunsdk.types import join_ranks


# One dataclass for both: to make one costs a third of a millisecond of every start.
@dataclass(frozen=True, slots=True, kw_only=True)
class _OfProcess:
    name: str


class WorkerFailed(_OfProcess):
    """A rank ended badly by itself, and the others are stopped for it."""

    __slots__ = ()

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return f"{self.name} failed"


class AuxiliaryEnded(_OfProcess):
    """A process that serves the ranks, such as MindSpore's scheduler, ended while they run."""

    __slots__ = ()

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return f"the {self.name} ended while workers still ran"


class RanksEnded:
    """All ranks are through: what only served them is stopped."""

    __slots__ = ()

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return "the workers have ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWanted:
    """Somebody asked for it: a call, a cancellation, a signal.

    Attributes:
        reason: In words.
    """

    reason: str = "stop was asked for"

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """No rank showed a sign of progress for too long.

    Attributes:
        seconds: How long.
        detail: What is known about it, or "".
        ranks: Those that are not where the others are, surest first.
    """

    seconds: float
    detail: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        more = f": {self.detail}" if self.detail else ""
        return f"no rank showed progress for {self.seconds:g} s{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """Ranks still run too long after the first has ended well.

    Attributes:
        seconds: How long they may.
        first: Who has ended well first.
        ranks: Those that still run.
    """

    seconds: float
    first: int
    ranks: tuple[int, ...]

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return f"{join_ranks(self.ranks)} still ran {self.seconds:g} s after rank {self.first} had ended well"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The job ran longer than it may.

    Attributes:
        seconds: The limit.
    """

    seconds: float

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return f"the time limit of {self.seconds:g} s was reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Another node of the job is gone.

    Attributes:
        node: Its name.
    """

    node: str

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return f"node {self.node} was lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """A process of the job could not be started.

    Attributes:
        reason: The error's own words.
    """

    reason: str

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalError:
    """An error of this package's own.

    Attributes:
        summary: Its last line.
        traceback: The whole of it.
    """

    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> InternalError:
        """Describe an exception."""
        lines = traceback.format_exception(error)
        return cls(summary=lines[-1].strip(), traceback="".join(lines).rstrip())

    @property
    def words(self) -> str:
        """One clause for events and reports."""
        return f"internal error of davincirunsdk: {self.summary}"


Cause: TypeAlias = (
    WorkerFailed
    | AuxiliaryEnded
    | RanksEnded
    | StopWanted
    | Stalled
    | Straggling
    | TimeLimit
    | NodeLost
    | StartFailed
    | InternalError
)
"""Whatever has an attempt stopped."""
