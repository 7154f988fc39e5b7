"""The frozen data that a job hands to its user: states, statuses, failures, events, the result."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path  # noqa: TC003 # engines send these classes, and read their annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
class Progress:
    """How far a worker's training is, from its output or from its own calls of `progress`.

    Attributes:
        step: Steps so far; grows over epochs, also where what is printed begins anew in each.
        total: Steps in all, None where only those of one epoch are known, or none.
        time: Wall-clock seconds at which this step was seen.
        epoch: Epoch as printed, None where none is.
        epochs: Epochs in all.
        epoch_step: Step within the epoch as printed, where steps are counted per epoch.
        epoch_total: Steps of one epoch.
        loss: The last loss; may be nan or inf.
        step_seconds: Seconds per step.
        eta: Seconds left until `total`.
        stride: Steps between the last two reports.
        values: What else the script gave, in its order.
    """

    step: int
    total: int | None
    time: float
    epoch: int | None = None
    epochs: int | None = None
    epoch_step: int | None = None
    epoch_total: int | None = None
    loss: float | None = None
    step_seconds: float | None = None
    eta: float | None = None
    stride: int = 1
    values: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        """Such as `step 430/1000, loss 0.81, 0.303 s/step, 0:02:52 left`."""
        words = [f"step {self.step}" if self.total is None else f"step {self.step}/{self.total}"]
        if self.epoch is not None:
            epoch = f"epoch {self.epoch}" if self.epochs is None else f"epoch {self.epoch}/{self.epochs}"
            if self.total is None and self.epoch_total is not None:
                epoch += f" ({self.epoch_step}/{self.epoch_total})"
            words.append(epoch)
        if self.loss is not None:
            words.append(f"loss {self.loss:.4g}")
        if self.step_seconds is not None:
            words.append(f"{self.step_seconds:.3g} s/step")
        if self.eta is not None:
            words.append(f"{readable_time(self.eta)} left")
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as it stands at the moment of asking.

    Attributes:
        rank: Place in the job, or -1 for an auxiliary process such as MindSpore's scheduler.
        local_rank: Place on this node.
        device_id: Number of the NPU as the worker knows it: its DEVICE_ID.
        npu_id: Number of the NPU on the host, as in a rank table, -1 for none.
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
        progress: How far its training is, None while nothing tells.
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
    npu_id: int = -1
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """A worker that failed by itself.

    Attributes:
        rank: Place in the job, or -1 for an auxiliary process.
        local_rank: Place on its node.
        node_rank: Place of its node in the job.
        node: Name of its node.
        device_id: Number of its NPU as the worker knew it: its DEVICE_ID.
        npu_id: Number of the NPU on the host, as in a rank table, -1 for none.
        pid: Process id, None when it could not be started.
        exit_code: Negative for a signal; None when nobody could learn it.
        ended: Wall-clock seconds of the end.
        log_path: File with its output.
        tail: Its last lines, decoded.
        reason: What happened, in words.
        hint: What a known error in its output means and what to do, or "".
        name: `rank 3` or `scheduler`.
        first_error: Wall-clock seconds of its first error line, None when that is not known.
        code: Code of the known error, such as `EI0006`, or "".
        meaning: What that error means, or "".
        remedy: What to do about it, or "".
        role: `primary` (its own fault), `secondary` (the effect of another rank's), or `unknown`.
        excerpt: The lines of its output that tell most, fit to be printed.
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
    first_error: float | None = None
    code: str = ""
    meaning: str = ""
    remedy: str = ""
    role: str = "unknown"
    excerpt: tuple[str, ...] = ()
    npu_id: int = -1

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, such as `SIGKILL`, or None."""
        return signal_name(self.exit_code)


class Verdict(_Word):
    """What a failure report concludes; its value is the word in the report's JSON form."""

    ROOT_CAUSE = "root_cause"
    FAILED_ALIKE = "failed_alike"
    SUSPECTS = "suspects"
    STOPPED = "stopped"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    LINK = "link"
    AUXILIARY = "auxiliary"
    INTERNAL_ERROR = "internal_error"
    UNCLEAR = "unclear"
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Why a job ended: for people as text, for programs as data.

    Attributes:
        verdict: See `Verdict`.
        ranks: The ranks that the verdict names, surest first; empty when it names nobody.
        why: How sure the verdict is and why, in one sentence.
        text: The report as it is printed, without colour and without a line end at its end.
        exit_code: What a command line should exit with.
        failures: Workers that ended badly by themselves, the most telling first.
        root_cause: Who is to blame, or the best suspect; its rank is -1 when that is a node, the
            scheduler or nobody. How sure it is, the verdict says.
        stopped_ranks: Ranks that ended because we ended them.
        attempt: Number of the attempt, from 0.
    """

    verdict: Verdict
    ranks: tuple[int, ...]
    why: str
    text: str
    exit_code: int
    failures: tuple[WorkerFailure, ...]
    root_cause: WorkerFailure
    stopped_ranks: tuple[int, ...]
    attempt: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return what `to_json` writes, as plain values."""
        return {
            "schema": 1,
            "verdict": self.verdict.value,
            "ranks": list(self.ranks),
            "why": self.why,
            "text": self.text,
            "exit_code": self.exit_code,
            "failures": [_failure_to_dict(failure) for failure in self.failures],
            "stopped_ranks": list(self.stopped_ranks),
            "attempt": self.attempt,
        }

    def to_json(self) -> str:
        """Write the report as one JSON object in one line; unknown values are null."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def __str__(self) -> str:
        return self.text


def _failure_to_dict(failure: WorkerFailure) -> dict[str, object]:
    return {
        "rank": failure.rank,
        "node": failure.node or None,
        "device": failure.device_id if failure.device_id >= 0 else None,
        "pid": failure.pid,
        "exit_code": failure.exit_code,
        "signal": failure.signal_name,
        "first_error_time": _iso(failure.first_error),
        "end_time": _iso(failure.ended),
        "code": failure.code or None,
        "meaning": failure.meaning or None,
        "remedy": failure.remedy or None,
        "role": failure.role,
        # A path may hold bytes that are not UTF-8, which JSON cannot.
        "log_path": os.fsencode(failure.log_path).decode(errors="backslashreplace"),
        "excerpt": list(failure.excerpt),
    }


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStack:
    """Where one worker is.

    Attributes:
        rank: Place in the job.
        name: Such as `rank 3`.
        pid: The process that was looked at: the worker's, or the Python below a shell.
        state: What the kernel has it do, such as `sleeping in futex_do_wait`.
        source: `py-spy`, `faulthandler`, or `kernel`, which knows no frames; "" where nothing answered.
        frames: Frames of the main thread, innermost first, such as `step (train.py:12)`.
        text: All threads.
    """

    rank: int
    name: str
    pid: int
    state: str
    source: str
    frames: tuple[str, ...]
    text: str

    @property
    def place(self) -> tuple[str, ...]:
        """What two workers that are at the same place have in common."""
        stopped = ("stopped",) if self.state.startswith("stopped") else ()
        return (*stopped, *(self.frames or (self.state,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Where the workers of this node are.

    Attributes:
        time: Wall-clock seconds.
        workers: In rank order.
        path: The file that holds all of it, None where it could not be written.
    """

    time: float
    workers: tuple[WorkerStack, ...]
    path: Path | None = None

    @property
    def groups(self) -> tuple[tuple[WorkerStack, ...], ...]:
        """Workers at the same place together, most first: those who are alone stand out at the end."""
        places: dict[tuple[str, ...], list[WorkerStack]] = {}
        for worker in self.workers:
            places.setdefault(worker.place, []).append(worker)
        return tuple(tuple(group) for group in sorted(places.values(), key=len, reverse=True))

    def __str__(self) -> str:
        """Say who is where, in a few lines for each group."""
        lines = []
        for group in self.groups:
            first = group[0]
            verb = "are" if len(group) > 1 else "is"
            lines.append(f"{join_ranks(worker.rank for worker in group)} {verb} {_common_state(group)}")
            lines += [f"    {frame}" for frame in first.frames[:_FRAMES_SHOWN]]
            if len(first.frames) > _FRAMES_SHOWN:
                lines.append(f"    ... and {len(first.frames) - _FRAMES_SHOWN} more")
        return "\n".join(lines)


_FRAMES_SHOWN = 8


def _common_state(group: Sequence[WorkerStack]) -> str:
    states = sorted({worker.state for worker in group})
    return " or ".join(states[:3])


def join_ranks(ranks: Iterable[int]) -> str:
    """Write ranks such as `rank 3` or `ranks 0-2, 5`."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process of the job that outlived its worker and was ended by us."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt of a job that has ended.

    Attributes:
        number: From 0.
        started: Wall-clock seconds.
        ended: Wall-clock seconds.
        exit_code: What a command line would have exited with.
        reason: Why it ended, in one clause; "" for success.
        step: The furthest step of any rank, None where none was told.
    """

    number: int
    started: float
    ended: float
    exit_code: int
    reason: str
    step: int | None = None

    def __str__(self) -> str:
        """Such as `attempt 0 ended after 0:12:01 at step 430: rank 1, killed by SIGKILL`."""
        took = self.ended - self.started
        length = f"{took:.1f} s" if took < 60 else readable_time(took)
        step = "" if self.step is None else f" at step {self.step}"
        how = "succeeded" if not self.exit_code else "ended"
        reason = f": {self.reason}" if self.reason else ""
        return f"attempt {self.number} {how} after {length}{step}{reason}"


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
        report: Why it ended so; None when all ended well.
        accounts: What the judgement of several nodes needs from this one, packed; b"" on one node.
        attempts: Every attempt of this node's group, the last one being this result's.
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
    report: FailureReport | None = None
    accounts: bytes = field(default=b"", repr=False)
    attempts: tuple[AttemptRecord, ...] = ()

    def __repr__(self) -> str:
        """What a person wants to know first; all else is in the attributes."""
        blamed = f", root cause {self.failures[0].name}" if self.failures else ""
        took = f"{self.ended - self.started:.1f} s"
        return (
            f"<RunResult {self.job_id}: {self.state}, exit code {self.exit_code}{blamed}, "
            f"{len(self.workers)} worker{'s' * (len(self.workers) != 1)}, {took}, logs in {self.log_dir}>"
        )


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
class NpuUsage:
    """What npu-smi last said of a worker's NPU; None for what it did not say.

    Attributes:
        npu: Number of the NPU on its host, as in a rank table.
        use: Percent of its AI cores.
        memory: Percent of its HBM, or of its DDR where it has no HBM.
        temperature: Degrees Celsius.
    """

    npu: int
    use: float | None = None
    memory: float | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a worker and its helpers use just now.

    Attributes:
        cpu: Processor cores, since the last look.
        memory: Resident bytes.
        output: Bytes of output so far.
        npu: Of its NPU, None where npu-smi is not there or does not answer.
    """

    cpu: float
    memory: int
    output: int
    npu: NpuUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the job; never holds a value of an environment variable.

    Attributes:
        kind: `started`, `progress` (at most one a second and rank), `exited`, `stopping`, `killing`,
            `leftover`, `warning` or `finished`.
        time: Wall-clock seconds.
        rank: The worker it is about, None for the whole job.
        pid: The process it is about.
        exit_code: With `exited` and `finished`.
        detail: In words.
        progress: With `progress`.
        usage: With `usage`, which comes every few seconds where a run report is asked for.
        report: With `finished`, why the job ended so; None when all ended well.
    """

    kind: str
    time: float
    rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    detail: str = field(default="")
    progress: Progress | None = None
    usage: Usage | None = None
    report: FailureReport | None = None


def readable_time(seconds: float) -> str:
    """Write a length of time, such as `1:02:03` or `2 d 1:02:03`."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock


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
