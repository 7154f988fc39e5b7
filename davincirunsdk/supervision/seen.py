"""What was seen of an attempt, as data: all that a verdict needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from davincirunsdk.supervision.cause import Cause
    from davincirunsdk.types import Leftover, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """One worker.

    Attributes:
        status: How it stands or ended.
        auxiliary: True for a process that serves the ranks and is none itself.
        tail: Its last output, some 64 KiB.
        times: Pairs of a number of bytes of the tail and the wall-clock second when so many had come.
        plog_root: Folder of CANN's own logs of it, "" for the usual one.
    """

    status: WorkerStatus
    auxiliary: bool
    tail: bytes
    times: tuple[tuple[int, float], ...]
    plog_root: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One attempt, so far or as a whole.

    Attributes:
        workers: All of this node, auxiliary ones too, in the order of their start.
        failed: Those that ended badly by themselves, in the order in which their ends were seen.
        cause: Why it was stopped, None while it goes on by itself.
        stop_wanted: Wall-clock second in which somebody first asked for the end, None before.
        stop_began: Wall-clock second of the first stop signal, None before.
        leftovers: Processes that outlived their workers.
    """

    workers: tuple[WorkerSeen, ...]
    failed: tuple[WorkerSeen, ...]
    cause: Cause | None
    stop_began: float | None
    stop_wanted: float | None = None
    leftovers: tuple[Leftover, ...]
