"""From what was seen of an attempt to failures, state and exit code: a pure function."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk.supervision.cause import InternalError
from davincirunsdk.types import JobState, RunResult, WorkerFailure, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from davincirunsdk.cluster import Cluster
    from davincirunsdk.supervision.seen import Seen, WorkerSeen

_TAIL_LINES = 400
"""Lines of a failed worker's output that are looked at: the first error may stand well before the last."""

INTERNAL_ERROR = 70
"""Exit code of an error of our own, EX_SOFTWARE of sysexits.h."""


def judge(
    seen: Seen, *, job_id: str, log_dir: Path, cluster: Cluster, began: float, ended: float
) -> tuple[RunResult, str]:
    """Say how a job ended, or that it failed while others go on.

    Args:
        seen: What was seen of its workers here.
        job_id: Name of the job.
        log_dir: Folder of the log files.
        cluster: The job's nodes.
        began: Wall-clock second of the job's start.
        ended: Of its end, or of now.

    Returns:
        The result, and the failure report, which is "" without a failure.
    """
    failures, leaving = _find_failures(seen, cluster)
    workers = [_as_judged(worker, leaving) for worker in seen.workers]
    ranks = tuple(worker.status for worker in workers if not worker.auxiliary)
    auxiliaries = tuple(worker.status for worker in workers if worker.auxiliary)
    state = _judge_state(seen, [status.state for status in ranks], failures)
    result = RunResult(
        job_id=job_id,
        state=state,
        exit_code=(
            INTERNAL_ERROR if isinstance(seen.cause, InternalError) else choose_exit_code(failures, state)
        ),
        workers=ranks,
        auxiliaries=auxiliaries,
        failures=failures,
        leftovers=seen.leftovers,
        lost_log_bytes=sum(worker.status.lost_bytes for worker in workers),
        started=began,
        ended=ended,
        log_dir=log_dir,
    )
    if not failures:
        return result, ""
    from davincirunsdk.diagnosis import failure_report

    report = failure_report(
        failures=failures,
        workers=(*ranks, *auxiliaries),
        job_id=job_id,
        nnodes=len(cluster.nodes),
        log_dir=log_dir,
    )
    return result, report


def _as_judged(worker: WorkerSeen, leaving: WorkerSeen | None) -> WorkerSeen:
    if worker is not leaving:
        return worker
    return replace(worker, status=replace(worker.status, state=WorkerState.FAILED))


def _find_failures(seen: Seen, cluster: Cluster) -> tuple[tuple[WorkerFailure, ...], WorkerSeen | None]:
    """Describe the workers that failed by themselves, root cause first.

    Returns:
        The failures, and the worker among them that counted as stopped by us before, if there is one.
    """
    if not seen.failed:
        return (), None
    # Loaded where it is needed: most jobs end well.
    from davincirunsdk.diagnosis import explain_exit, may_be_victim, order, was_leaving

    failures = order(
        tuple(_describe(worker, cluster, explain_exit(worker.status.exit_code)) for worker in seen.failed)
    )
    if not may_be_victim(failures[0]):
        return failures, None
    for worker in _stopped_after_last_words(seen):
        reason = "it had raised an exception and was on its way out when the others were stopped"
        described = _describe(worker, cluster, reason)
        if was_leaving(described):
            return (described, *failures), worker
    return failures, None


def _stopped_after_last_words(seen: Seen) -> list[WorkerSeen]:
    """List the workers that we stopped and that wrote nothing after our SIGTERM, by their last words."""
    began = seen.stop_began
    if began is None:
        return []
    silent = [
        (last, place)
        for place, worker in enumerate(seen.workers)
        if worker.status.state in (WorkerState.STOPPED, WorkerState.KILLED)
        and (last := worker.status.last_output) is not None
        and last <= began
    ]
    return [seen.workers[place] for _, place in sorted(silent)]


def _describe(worker: WorkerSeen, cluster: Cluster, reason: str) -> WorkerFailure:
    from davincirunsdk.diagnosis import hint

    status = worker.status
    tail = tuple(worker.tail.decode(errors="replace").removesuffix("\n").split("\n")[-_TAIL_LINES:])
    own_end = status.state is WorkerState.FAILED or (status.exit_code or 0) > 0
    return WorkerFailure(
        rank=status.rank,
        local_rank=status.local_rank,
        node_rank=cluster.node_rank,
        node=cluster.node.name,
        device_id=status.device_id,
        npu_id=status.npu_id,
        pid=status.pid,
        # A signal of ours says nothing: an exception ends Python with 1.
        exit_code=status.exit_code if own_end else 1,
        ended=status.ended or time.time(),
        log_path=status.log_path,
        tail=tail if tail != ("",) else (),
        reason=reason,
        hint=hint(tail),
        name=status.name,
    )


def _judge_state(seen: Seen, ranks: Sequence[WorkerState], failures: tuple[WorkerFailure, ...]) -> JobState:
    if failures or isinstance(seen.cause, InternalError):
        return JobState.FAILED
    if all(state is WorkerState.SUCCEEDED for state in ranks):
        return JobState.SUCCEEDED
    return JobState.STOPPED


def choose_exit_code(failures: tuple[WorkerFailure, ...], state: JobState) -> int:
    """Say what a command line should exit with: the root cause's own code, 128 + n for signal n."""
    if failures:
        code = failures[0].exit_code
        if code is None or code == 0:
            return 1
        return code if code > 0 else 128 - code
    return 0 if state is JobState.SUCCEEDED else 143
