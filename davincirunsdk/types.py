"""The frozen data that a job hands to its user: states, statuses, failures, events, the result."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class _Word(str, Enum):
    """A state that compares equal to its own name and prints as it."""

    def __str__(self) -> str:
        return str.__str__(self)


class JobState(_Word):
    """Where a job stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class WorkerState(_Word):
    """Where a worker stands, and whose doing its end was.

    SUCCEEDED and FAILED are the worker's own doing; STOPPED ended after our SIGTERM within the
    grace period; KILLED got our SIGKILL.
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    KILLED = "KILLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as it stands at the moment of asking.

    Attributes:
        rank: Place in the job, or -1 for an auxiliary process such as MindSpore's scheduler.
        local_rank: Place on this node.
        device_id: Number of the NPU on the node.
        pid: Process id, None before the start.
        state: See `WorkerState`.
        exit_code: None while it runs or when the host program took the exit status away;
            negative for a signal, as in `subprocess`.
        started: Wall-clock seconds of the start.
        ended: Wall-clock seconds of the end.
        log_path: File with the worker's output, byte for byte.
        log_bytes: Bytes in that file so far.
        last_output: Wall-clock seconds of the last output.
        last_line: The last line of output, decoded, at most 200 characters.
        lost_bytes: Bytes that could not be written to the log file.
        name: `rank 3` or `scheduler`.
    """

    rank: int
    local_rank: int
    device_id: int
    pid: int | None
    state: WorkerState
    exit_code: int | None
    started: float | None
    ended: float | None
    log_path: Path
    log_bytes: int
    last_output: float | None
    last_line: str
    lost_bytes: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """A worker that failed by itself.

    Attributes:
        rank: Place in the job, or -1 for an auxiliary process.
        local_rank: Place on its node.
        node_rank: Place of its node in the job.
        node: Name of its node.
        device_id: Number of its NPU on the node.
        pid: Process id, None when it could not be started.
        exit_code: Negative for a signal; None when nobody could learn it.
        ended: Wall-clock seconds of the end.
        log_path: File with its output.
        tail: Its last lines, decoded.
        reason: What happened, in words.
        hint: What a known error in its output means and what to do, or "".
        name: `rank 3` or `scheduler`.
    """

    rank: int
    local_rank: int
    node_rank: int
    node: str
    device_id: int
    pid: int | None
    exit_code: int | None
    ended: float
    log_path: Path
    tail: tuple[str, ...]
    reason: str
    hint: str = ""
    name: str = ""

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, such as `SIGKILL`, or None."""
        return signal_name(self.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process of the job that outlived its worker and was ended by us."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a job ended.

    Attributes:
        job_id: Name of the job, as in its log files.
        state: SUCCEEDED, FAILED or STOPPED.
        exit_code: 0 on success; otherwise what a command line should exit with.
        workers: One status per worker of this node, in rank order.
        auxiliaries: One status per auxiliary process, such as MindSpore's scheduler.
        failures: Workers that failed by themselves, root cause first.
        leftovers: Processes that were still there after the last worker's end.
        lost_log_bytes: Output that could not be written to log files.
        started: Wall-clock seconds.
        ended: Wall-clock seconds.
        log_dir: Folder of the log files.
    """

    job_id: str
    state: JobState
    exit_code: int
    workers: tuple[WorkerStatus, ...]
    auxiliaries: tuple[WorkerStatus, ...]
    failures: tuple[WorkerFailure, ...]
    leftovers: tuple[Leftover, ...]
    lost_log_bytes: int
    started: float
    ended: float
    log_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a worker's output: decoded, without its line end; `time` in wall-clock seconds."""

    rank: int
    text: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBlock:
    """Output of one worker as it was read: bytes in the order written, ending anywhere."""

    rank: int
    data: bytes
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the job; never holds a value of an environment variable.

    Attributes:
        kind: `started`, `exited`, `stopping`, `killing`, `leftover`, `warning` or `finished`.
        time: Wall-clock seconds.
        rank: The worker it is about, None for the whole job.
        pid: The process it is about.
        exit_code: With `exited` and `finished`.
        detail: In words.
    """

    kind: str
    time: float
    rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    detail: str = field(default="")


def signal_name(exit_code: int | None) -> str | None:
    """Name the signal behind a negative exit code.

    Args:
        exit_code: As in `subprocess`.

    Returns:
        A name such as `SIGKILL`, or None when no signal ended the process.
    """
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
