"""From what was seen of an attempt to result, report and exit code: a pure function."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.steps.drift import lagging
from davincirunsdk.supervision.cause import (
    InternalError,
    NodeLost,
    Stalled,
    StopWanted,
    Straggling,
    TimeLimit,
    WorkerFailed,
)
from davincirunsdk.types import (
    FailureReport,
    JobState,
    RunResult,
    Verdict,
    WorkerFailure,
    WorkerState,
    signal_name,
)

if TYPE_CHECKING:
    from davincirunsdk.cluster import Cluster
    from davincirunsdk.diagnosis.evidence import End, Evidence, RankEvidence
    from davincirunsdk.supervision.seen import Seen, WorkerSeen
    from davincirunsdk.types import AttemptRecord, WorkerStatus

INTERNAL_ERROR = 70
"""Exit code of an error of our own, EX_SOFTWARE of sysexits.h."""

_STOPPED = 143
"""Exit code of a job that was asked to end, as after SIGTERM."""

_SAME_MOMENT = 1.0
"""Seconds between the end of a worker by a stop signal and the wish for a stop that belong together."""

_BY_STOP_SIGNAL = frozenset(
    code
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    for code in (-number, 128 + number)
)
"""Exit codes of such workers, also behind a shell."""

_OF_WORKERS = frozenset({Verdict.ROOT_CAUSE, Verdict.FAILED_ALIKE, Verdict.SUSPECTS, Verdict.UNCLEAR})
"""Verdicts about the workers' own ends."""

_TOLD = frozenset({WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.KILLED})


def judge(
    seen: Seen,
    *,
    job_id: str,
    log_dir: Path,
    cluster: Cluster,
    began: float,
    ended: float,
    lang: str = "en",
    earlier: tuple[AttemptRecord, ...] = (),
    look: bool = False,
    kills_before: int | None = None,
    first_counts: bool = False,
) -> RunResult:
    """Say how a job ended, or that it failed while others go on.

    Args:
        seen: What was seen of its workers here.
        job_id: Name of the job.
        log_dir: Folder of the log files.
        cluster: The job's nodes.
        began: Wall-clock second of the job's start.
        ended: Of its end, or of now.
        lang: Language of the report, `en` or `zh`.
        earlier: The attempts before this one.
        look: Look also at what files of CANN, the kernel and the machine say, for 2 s at most.
        first_counts: The exit code is that of the rank that failed first, whichever is the cause.
        kills_before: The kernel's count of kills for memory here before the start, None if unknown.

    Returns:
        The result, with the report unless all went well.
    """
    seen = _without_stops(seen)
    ranks = tuple(worker.status for worker in seen.workers if not worker.auxiliary)
    well = all(status.state is WorkerState.SUCCEEDED for status in ranks) and not seen.failed
    report: FailureReport | None = None
    accounts = b""
    if isinstance(seen.cause, InternalError) or not well:
        try:
            report, accounts = _report(
                seen, job_id, log_dir, cluster, lang, earlier, look=look, kills_before=kills_before
            )
        except (ImportError, OSError) as error:
            # The package was moved or upgraded while the job ran, before it was loaded as a whole.
            report = _plain_report(seen, cluster, str(error))
        if first_counts and seen.failed and report.verdict in _OF_WORKERS:
            report = replace(report, exit_code=_plain_code(seen.failed[0]))
        ranks = tuple(_as_judged(status, report) for status in ranks)
    state = judge_state(report, failed=bool(seen.failed))
    return RunResult(
        job_id=job_id,
        state=state,
        exit_code=choose_exit_code(report, state),
        workers=ranks,
        auxiliaries=tuple(worker.status for worker in seen.workers if worker.auxiliary),
        failures=report.failures if report is not None and state is JobState.FAILED else (),
        leftovers=seen.leftovers,
        lost_log_bytes=sum(worker.status.lost_bytes for worker in seen.workers),
        started=began,
        ended=ended,
        log_dir=log_dir,
        report=report,
        accounts=accounts,
    )


def _without_stops(seen: Seen) -> Seen:
    """Take those for stopped that a stop signal ended just when somebody asked us for the end.

    A batch system and a person at the terminal signal our workers as well as us; whose end is noticed
    first is chance.
    """
    wanted = seen.stop_wanted
    if wanted is None or not all(
        worker.status.exit_code in _BY_STOP_SIGNAL
        and abs((worker.status.ended or math.inf) - wanted) <= _SAME_MOMENT
        for worker in seen.failed
    ):
        return seen
    return replace(
        seen,
        failed=(),
        cause=StopWanted() if isinstance(seen.cause, WorkerFailed) else seen.cause,
        workers=tuple(
            replace(worker, status=replace(worker.status, state=WorkerState.STOPPED))
            if worker in seen.failed
            else worker
            for worker in seen.workers
        ),
    )


def _report(
    seen: Seen,
    job_id: str,
    log_dir: Path,
    cluster: Cluster,
    lang: str,
    earlier: tuple[AttemptRecord, ...],
    *,
    look: bool,
    kills_before: int | None,
) -> tuple[FailureReport, bytes]:
    # Loaded where it is needed: most jobs end well.
    from davincirunsdk.diagnosis.judge import read_accounts, report_on

    slow = lagging(worker.status for worker in seen.workers)[:2]
    evidence = replace(
        _evidence(seen, job_id, log_dir, cluster, lang),
        attempt=len(earlier),
        facts=(
            *(f"{one.name} was {steps} steps behind the others." for one, steps in slow),
            *(f"{attempt}." for attempt in earlier[-4:]),
        ),
    )
    if look and seen.failed:
        from davincirunsdk.diagnosis.surroundings import look_around

        roots = {worker.status.rank: Path(worker.plog_root) for worker in seen.workers if worker.plog_root}
        evidence = look_around(evidence, kills_before=kills_before, plog_roots=roots)
    read = read_accounts(evidence)
    accounts = b""
    if len(cluster.nodes) > 1:
        from davincirunsdk.diagnosis.parcel import pack

        accounts = pack(read)
    return report_on(evidence, read), accounts


def _plain_report(seen: Seen, cluster: Cluster, why: str) -> FailureReport:
    """Say what is known without any diagnosis: who ended badly first, and how."""
    failures = tuple(_plain_failure(worker, cluster) for worker in seen.failed)
    nobody = replace(_plain_failure(seen.workers[0], cluster), rank=-1, name="", reason="stopped")
    first = failures[0] if failures else nobody
    text = f"{first.name} failed first: {first.reason}; log: {first.log_path}" if failures else "stopped"
    return FailureReport(
        verdict=Verdict.ROOT_CAUSE if failures else Verdict.STOPPED,
        ranks=tuple(failure.rank for failure in failures[:1]),
        why=f"The diagnosis could not be loaded: {why}",
        text=f"{text}\n(no more is known, for the diagnosis could not be loaded: {why})",
        exit_code=_plain_code(seen.failed[0]) if failures else _STOPPED,
        failures=failures,
        root_cause=first,
        stopped_ranks=tuple(worker.status.rank for worker in seen.workers if worker.status.state in _TOLD),
    )


def _plain_code(worker: WorkerSeen) -> int:
    code = worker.status.exit_code or 1
    return code if code > 0 else 128 - code


def _plain_failure(worker: WorkerSeen, cluster: Cluster) -> WorkerFailure:
    status = worker.status
    name = signal_name(status.exit_code)
    return WorkerFailure(
        rank=status.rank,
        local_rank=status.local_rank,
        node_rank=cluster.node_rank,
        node=cluster.node.name,
        device_id=status.device_id,
        npu_id=status.npu_id,
        pid=status.pid,
        exit_code=status.exit_code,
        ended=status.ended or 0.0,
        log_path=status.log_path,
        tail=tuple(worker.tail.decode(errors="replace").splitlines()[-20:]),
        reason=f"ended by {name}" if name else f"exit code {status.exit_code}",
        name=status.name,
    )


def _as_judged(status: WorkerStatus, report: FailureReport) -> WorkerStatus:
    """A worker that was stopped, but had been failing before, counts as failed."""
    failing = any(failure.rank == status.rank for failure in report.failures)
    return replace(status, state=WorkerState.FAILED) if failing and status.state in _TOLD else status


def must_raise(report: FailureReport) -> bool:
    """Tell whether whoever waits for the job has to hear of it as an error.

    That is so for every failure, and also when workers were ended from outside without our being
    asked: nobody here knows of it otherwise.
    """
    return report.verdict is not Verdict.SUCCEEDED and (
        bool(report.failures)
        or report.verdict in (Verdict.NODE_LOST, Verdict.AUXILIARY, Verdict.STALLED, Verdict.TIME_LIMIT)
    )


def judge_state(report: FailureReport | None, *, failed: bool) -> JobState:
    """Say how the job as a whole stands, in the same sense as its report.

    Args:
        report: Why it ended, None when all ended well.
        failed: Whether a worker ended badly by itself.
    """
    if report is None or report.verdict is Verdict.SUCCEEDED:
        return JobState.SUCCEEDED
    if report.verdict is Verdict.STOPPED:
        return JobState.STOPPED
    if report.verdict is Verdict.UNCLEAR and not failed and not report.failures:
        return JobState.STOPPED
    return JobState.FAILED


def choose_exit_code(report: FailureReport | None, state: JobState) -> int:
    """Say what a command line should exit with."""
    if report is None or state is JobState.SUCCEEDED:
        return 0
    if state is JobState.STOPPED and not report.failures:
        return _STOPPED
    return report.exit_code


def _evidence(seen: Seen, job_id: str, log_dir: Path, cluster: Cluster, lang: str) -> Evidence:
    from davincirunsdk.diagnosis.evidence import Evidence

    end, reason = _why(seen)
    return Evidence(
        job_id=job_id,
        log_dir=log_dir,
        nnodes=len(cluster.nodes),
        ranks=tuple(_rank(worker, seen, cluster) for worker in seen.workers),
        end=end,
        reason=reason,
        odd=seen.cause.ranks if isinstance(seen.cause, Stalled | Straggling) else (),
        leftovers=seen.leftovers,
        lang=lang,
    )


def _why(seen: Seen) -> tuple[End, str]:
    from davincirunsdk.diagnosis.evidence import End

    cause = seen.cause
    if isinstance(cause, InternalError):
        return End.INTERNAL_ERROR, cause.words
    if isinstance(cause, Stalled | Straggling):
        return End.STALLED, cause.words
    if isinstance(cause, TimeLimit):
        return End.TIME_LIMIT, cause.words
    if isinstance(cause, StopWanted | NodeLost) and not seen.failed:
        return End.STOPPED, cause.words
    return End.WORKERS, ""


def _rank(worker: WorkerSeen, seen: Seen, cluster: Cluster) -> RankEvidence:
    from davincirunsdk.diagnosis.evidence import RankEvidence

    return RankEvidence.of(
        worker.status,
        node_rank=cluster.node_rank,
        node=cluster.node.name,
        told=seen.stop_began if worker.status.state in _TOLD else None,
        output=worker.tail,
        times=worker.times,
    )
