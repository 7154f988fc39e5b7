"""The words and columns of the tables that show a job's workers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.output.text import clean, readable_size
from davincirunsdk.steps.drift import lagging
from davincirunsdk.types import JobState, readable_time, signal_name

if TYPE_CHECKING:
    from davincirunsdk.output.types import Snapshot
    from davincirunsdk.types import WorkerStatus

UNFINISHED = (JobState.PENDING, JobState.RUNNING, JobState.STOPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One worker in words.

    Attributes:
        rank: Place in the job, -1 for an auxiliary process.
        name: Such as `rank 3`.
        state: Such as `RUNNING`.
        pid: Process id, "" before the start.
        uptime: Such as `1:02:03`, "" before the start.
        exit: Exit code or signal name, "" while it runs.
        progress: Such as `430/1000, loss 0.81, 0:02:52 left`, "" while nothing tells.
        log: Size of the log file.
        last_line: The last line of output, without what would act on a terminal.
    """

    rank: int
    name: str
    state: str
    pid: str
    uptime: str
    exit: str
    progress: str
    log: str
    last_line: str


def table_rows(snapshot: Snapshot) -> list[TableRow]:
    """Write a job's workers as rows, in the snapshot's order."""
    now = time.time()
    behind = {worker.rank: steps for worker, steps in lagging(snapshot.workers)}
    return [
        TableRow(
            rank=worker.rank,
            name=worker.name,
            state=str(worker.state),
            pid="" if worker.pid is None else str(worker.pid),
            uptime=_uptime(worker, now),
            exit=_exit(worker),
            progress=_progress(worker, behind.get(worker.rank)),
            log=readable_size(worker.log_bytes),
            last_line=clean(worker.last_line, colour=False),
        )
        for worker in snapshot.workers
    ]


def headline(snapshot: Snapshot) -> str:
    """Say in one line how the job stands."""
    count = sum(worker.rank >= 0 for worker in snapshot.workers)
    workers = "1 worker" if count == 1 else f"{count} workers"
    slowest = ""
    if snapshot.state in UNFINISHED:
        slowest = "".join(f", {worker.name} is slowest" for worker, _ in lagging(snapshot.workers)[:1])
    state = f"{snapshot.state}, {workers} on this node{slowest}"
    return f"job {snapshot.job_id}: {state}, logs in {snapshot.log_dir}"


def _progress(worker: WorkerStatus, behind: int | None) -> str:
    progress = worker.progress
    if progress is None:
        return ""
    if progress.total is None and progress.epoch_total is not None:
        words = [f"epoch {progress.epoch}: {progress.epoch_step}/{progress.epoch_total}"]
        if progress.epoch is None:
            words = [f"{progress.step}"]
    else:
        words = [f"{progress.step}" if progress.total is None else f"{progress.step}/{progress.total}"]
    if behind is not None:
        words[0] += f" ({behind} behind)"
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.4g}")
    if progress.eta is not None and worker.ended is None:
        words.append(f"{readable_time(progress.eta)} left")
    return ", ".join(words)


def _uptime(worker: WorkerStatus, now: float) -> str:
    if worker.started is None:
        return ""
    seconds = max(0, int((worker.ended or now) - worker.started))
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _exit(worker: WorkerStatus) -> str:
    if worker.exit_code is None:
        return "" if worker.ended is None else "?"
    return signal_name(worker.exit_code) or str(worker.exit_code)
