"""The judgement of a job, from what was seen to a report: one pure function."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.account import Account, read_rank
from davincirunsdk.diagnosis.conclusion import conclude
from davincirunsdk.diagnosis.evidence import End
from davincirunsdk.diagnosis.exits import explain_exit
from davincirunsdk.diagnosis.knowledge import Role
from davincirunsdk.diagnosis.report import write_report
from davincirunsdk.phrases import compact
from davincirunsdk.types import FailureReport, Verdict, WorkerFailure, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.diagnosis.conclusion import Conclusion
    from davincirunsdk.diagnosis.evidence import Evidence, LostNode

_TIMED_OUT = 124
_INTERNAL = 70
_OURS = frozenset({WorkerState.STOPPED, WorkerState.KILLED, WorkerState.STOPPING})


def read_accounts(evidence: Evidence) -> tuple[Account, ...]:
    """Read the output of every worker of the evidence; takes some milliseconds per worker."""
    return (*evidence.accounts, *(read_rank(one) for one in evidence.ranks))


def judge(evidence: Evidence) -> FailureReport:
    """Say why a job ended. A pure function: the same evidence gives the same report.

    Args:
        evidence: What is known, live or after the end, of one node or of all.

    Returns:
        The report, its text included.
    """
    return report_on(evidence, read_accounts(evidence))


def report_on(evidence: Evidence, accounts: Sequence[Account]) -> FailureReport:
    """Say why a job ended whose workers' output has been read."""
    conclusion = conclude(evidence, accounts)
    lead = conclusion.named[:1] or conclusion.failed[:1]
    ordered = [one for one in lead if one.failed]
    first = {one.rank for one in ordered}
    ordered += [one for one in conclusion.failed if one.rank not in first]
    failures = tuple(describe(one, evidence.lang) for one in ordered)
    root_cause = _root_cause(evidence, conclusion, failures)
    if conclusion.verdict is Verdict.NODE_LOST:
        failures = (root_cause, *failures)
    return FailureReport(
        verdict=conclusion.verdict,
        ranks=tuple(one.rank for one in conclusion.named if one.rank >= 0),
        why=conclusion.why.text(evidence.lang),
        text=write_report(evidence, accounts, conclusion),
        exit_code=_exit_code(evidence, conclusion),
        failures=failures,
        root_cause=root_cause,
        stopped_ranks=tuple(
            sorted(
                one.rank
                for one in accounts
                if one.rank >= 0 and not one.failed and one.of.told is not None and one.of.state in _OURS
            )
        ),
        attempt=evidence.attempt,
    )


def describe(one: Account, lang: str = "en") -> WorkerFailure:
    """Make the public description of a worker from its account."""
    of, finding = one.of, one.finding
    known = finding.known if finding is not None else None
    return WorkerFailure(
        rank=of.rank,
        local_rank=of.local_rank,
        node_rank=of.node_rank,
        node=of.node,
        device_id=of.device_id,
        npu_id=of.npu_id,
        pid=of.pid,
        exit_code=of.exit_code,
        ended=next((at for at in (of.ended, of.told, of.last_output, of.started) if at is not None), 0.0),
        log_path=of.log_path,
        tail=one.tail,
        reason=of.start_error or explain_exit(of.exit_code, lang),
        hint=_hint(one, lang),
        name=of.name,
        first_error=finding.time if finding is not None else None,
        code=finding.code if finding is not None else "",
        meaning=known.meaning.text(lang) if known is not None else "",
        remedy=known.remedy.text(lang) if known is not None else "",
        role=one.role.value,
        excerpt=one.excerpt,
    )


def _hint(one: Account, lang: str) -> str:
    known = one.finding.known if one.finding is not None else None
    if known is None:
        return ""
    if lang == "zh":
        return f"{known.label}：{known.meaning.zh}。处理建议：{known.remedy.zh}。"
    said = f"{known.label}: {known.meaning.en}"
    if known.role is Role.SECONDARY:
        said += ". Another rank is the likelier cause"
    elif known.role is Role.UNKNOWN and not known.vague:
        said += ". Cause, or effect of another rank's end"
    return f"{said}. To do: {known.remedy.en}."


def _root_cause(
    evidence: Evidence, conclusion: Conclusion, failures: tuple[WorkerFailure, ...]
) -> WorkerFailure:
    if conclusion.named:
        return describe(conclusion.named[0], evidence.lang)
    if conclusion.verdict is Verdict.UNCLEAR and failures:
        return failures[0]
    lost = evidence.lost[0] if conclusion.verdict is Verdict.NODE_LOST else None
    return WorkerFailure(
        rank=-1,
        local_rank=-1,
        node_rank=lost.node_rank if lost is not None else -1,
        node=lost.node if lost is not None else "",
        device_id=-1,
        pid=None,
        exit_code=None,
        ended=lost.time if lost is not None else 0.0,
        log_path=evidence.log_dir,
        tail=(),
        reason=_loss(lost) if lost is not None else conclusion.why.text(evidence.lang),
        name=_name(lost),
    )


def _name(lost: LostNode | None) -> str:
    if lost is None:
        return "nobody"
    return f"node {lost.node_rank}" if lost.node_rank >= 0 else lost.node


def _loss(lost: LostNode) -> str:
    if not lost.ranks or lost.node_rank < 0:
        return lost.reason
    several = len(lost.ranks) > 1
    were = f"rank{'s' * several} {compact(lost.ranks)} {'were' if several else 'was'} there"
    return f"{were}: {lost.reason}"


def _exit_code(evidence: Evidence, conclusion: Conclusion) -> int:
    verdict = conclusion.verdict
    if verdict is Verdict.SUCCEEDED:
        return 0
    if verdict is Verdict.INTERNAL_ERROR:
        return _INTERNAL
    if evidence.end in (End.STALLED, End.TIME_LIMIT):
        return _TIMED_OUT
    if evidence.end is End.STOPPED:
        number = getattr(signal, evidence.signal, signal.SIGTERM) if evidence.signal else signal.SIGTERM
        return 128 + int(number)
    sure = verdict in (Verdict.ROOT_CAUSE, Verdict.FAILED_ALIKE, Verdict.AUXILIARY)
    blamed = conclusion.named[:1] if sure else conclusion.failed[:1]
    if not blamed:
        return 1
    code, told = blamed[0].of.exit_code, blamed[0].of.told is not None
    # A signal of ours says nothing: an exception ends Python with 1.
    if not code or (told and code in (-15, -9, -2, 143, 137, 130) and blamed[0].by_signal is None):
        return 1
    return code if code > 0 else 128 - code
