"""From what the workers of a group did to failures, state and exit code."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from davincirunsdk.records import JobState, RunResult, WorkerFailure, WorkerState

if TYPE_CHECKING:
    from davincirunsdk.cluster import Cluster
    from davincirunsdk.launch import Launch
    from davincirunsdk.worker_group import WorkerGroup

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
    from davincirunsdk.diagnosis import explain_exit, hint, order

    failures = []
    for worker in group.failed:
        tail = tuple(
            worker.pump.tail().decode(errors="replace").removesuffix("\n").split("\n")[-_TAIL_LINES:]
        )
        failures.append(
            WorkerFailure(
                rank=worker.spec.rank,
                local_rank=worker.spec.local_rank,
                node_rank=cluster.node_rank,
                node=cluster.node.name,
                device_id=worker.spec.device_id,
                pid=worker.pid,
                exit_code=worker.exit_code,
                ended=worker.ended or time.time(),
                log_path=worker.spec.log_path,
                tail=tail if tail != ("",) else (),
                reason=explain_exit(worker.exit_code),
                hint=hint(tail),
                name=worker.spec.name,
            )
        )
    return order(tuple(failures))


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
