"""From what the workers of a group did to failures, state and exit code."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from davincirunsdk.types import JobState, RunResult, WorkerFailure, WorkerState

if TYPE_CHECKING:
    from davincirunsdk.cluster import Cluster
    from davincirunsdk.supervision.attempt import WorkerGroup
    from davincirunsdk.supervision.prepare import Launch
    from davincirunsdk.supervision.worker import Worker

_TAIL_LINES = 400
"""Lines of a failed worker's output that are looked at: the first error may stand well before the last."""


def judge(launch: Launch, group: WorkerGroup, cluster: Cluster, began: float) -> tuple[RunResult, str]:
    """Say how a job ended, or that it failed while others go on.

    Args:
        launch: What was started.
        group: The workers.
        cluster: The job's nodes.
        began: Wall-clock second of the job's start.

    Returns:
        The result, and the failure report, which is "" without a failure.
    """
    failures = _find_failures(group, cluster)
    state = _judge_state(group)
    ranks = [worker for worker in group.workers if not worker.spec.auxiliary]
    auxiliaries = [worker for worker in group.workers if worker.spec.auxiliary]
    result = RunResult(
        job_id=launch.job_id,
        state=state,
        exit_code=choose_exit_code(failures, state),
        workers=tuple(worker.status() for worker in ranks),
        auxiliaries=tuple(worker.status() for worker in auxiliaries),
        failures=failures,
        leftovers=group.leftovers,
        lost_log_bytes=sum(worker.pump.file.lost for worker in group.workers),
        started=began,
        ended=time.time(),
        log_dir=launch.log_dir,
    )
    if not failures:
        return result, ""
    from davincirunsdk.diagnosis import failure_report

    report = failure_report(
        failures=failures,
        workers=(*result.workers, *result.auxiliaries),
        job_id=launch.job_id,
        nnodes=len(cluster.nodes),
        log_dir=launch.log_dir,
    )
    return result, report


def _find_failures(group: WorkerGroup, cluster: Cluster) -> tuple[WorkerFailure, ...]:
    """Describe the workers that failed by themselves, root cause first."""
    if not group.failed:
        return ()
    # Loaded where it is needed: most jobs end well.
    from davincirunsdk.diagnosis import explain_exit, may_be_victim, order, was_leaving

    failures = order(
        tuple(_describe(worker, cluster, explain_exit(worker.exit_code)) for worker in group.failed)
    )
    if not may_be_victim(failures[0]):
        return failures
    for worker in sorted(_stopped_after_last_words(group), key=lambda worker: worker.pump.last_output or 0.0):
        reason = "it had raised an exception and was on its way out when the others were stopped"
        leaving = _describe(worker, cluster, reason)
        if was_leaving(leaving):
            worker.state = WorkerState.FAILED
            return (leaving, *failures)
    return failures


def _stopped_after_last_words(group: WorkerGroup) -> list[Worker]:
    """List the workers that we stopped and that wrote nothing after our SIGTERM."""
    return [
        worker
        for worker in group.workers
        if worker.state in (WorkerState.STOPPED, WorkerState.KILLED)
        and group.stop_began is not None
        and (worker.pump.last_output or math.inf) <= group.stop_began
    ]


def _describe(worker: Worker, cluster: Cluster, reason: str) -> WorkerFailure:
    from davincirunsdk.diagnosis import hint

    tail = tuple(worker.pump.tail().decode(errors="replace").removesuffix("\n").split("\n")[-_TAIL_LINES:])
    own_end = worker.state is WorkerState.FAILED or (worker.exit_code or 0) > 0
    return WorkerFailure(
        rank=worker.spec.rank,
        local_rank=worker.spec.local_rank,
        node_rank=cluster.node_rank,
        node=cluster.node.name,
        device_id=worker.spec.device_id,
        npu_id=worker.spec.npu_id,
        pid=worker.pid,
        # A signal of ours says nothing: an exception ends Python with 1.
        exit_code=worker.exit_code if own_end else 1,
        ended=worker.ended or time.time(),
        log_path=worker.spec.log_path,
        tail=tail if tail != ("",) else (),
        reason=reason,
        hint=hint(tail),
        name=worker.spec.name,
    )


def _judge_state(group: WorkerGroup) -> JobState:
    if group.failed:
        return JobState.FAILED
    ranks = [worker for worker in group.workers if not worker.spec.auxiliary]
    if all(worker.state is WorkerState.SUCCEEDED for worker in ranks):
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
