"""What several nodes' facts and results make together: one rank table, one result, one report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from davincirunsdk.errors import RankTableError
from davincirunsdk.supervision.cause import TimeLimit
from davincirunsdk.supervision.verdict import choose_exit_code, judge_state
from davincirunsdk.types import JobState, RunResult, Verdict, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.diagnosis.account import Account
    from davincirunsdk.diagnosis.evidence import End, LostNode
    from davincirunsdk.engines.messages import NodeFacts
    from davincirunsdk.rank_table.table import RankTable
    from davincirunsdk.supervision.cause import Stalled, Straggling
    from davincirunsdk.types import AttemptRecord, FailureReport, Leftover, WorkerStatus

_RUNNING = frozenset({WorkerState.PENDING, WorkerState.RUNNING, WorkerState.STOPPING})


def table_of(facts: Sequence[NodeFacts]) -> tuple[str, tuple[int, ...]]:
    """Make the job's rank table and the order of its nodes; blocks shortly.

    Nodes are ordered by the text of their server id, or of their address, as MindSpore expects,
    those of one super pod together, as HCCL wants it; equal ones keep their order.

    Args:
        facts: What the agents found, in any order.

    Returns:
        The checked table as JSON, v1.2 where the nodes know their super pods, else v1.0; "" where a
        node has no NPUs, or where several nodes do not all know their NPUs' addresses, which are
        needed but inside one super pod. And the places of the nodes in `facts`, in node rank order.

    Raises:
        RankTableError: The tables contradict each other.
    """
    tables = {}
    if all(fact.table for fact in facts):
        from davincirunsdk.rank_table import dump, parse
        from davincirunsdk.rank_table.make import merge

        tables = {place: parse(fact.table, path=fact.host) for place, fact in enumerate(facts)}
    names = [
        (_super_pod(tables[place]), tables[place].servers[0].server_id) if tables else ("", fact.address)
        for place, fact in enumerate(facts)
    ]
    order = tuple(sorted(range(len(facts)), key=lambda place: names[place]))
    rows = [row for table in tables.values() for server in table.servers for row in server.rows]
    pods = {pod for pod, _ in names}
    if len(pods) > 1 and "" in pods:
        without = ", ".join(fact.host for fact, (pod, _) in zip(facts, names, strict=True) if not pod)
        raise RankTableError(
            f"found no super pod on {without}, but on other nodes; expected one for all nodes or for none: "
            "look what `npu-smi info -t spod-info` prints there",
            path="(nodes)",
        )
    needs_addresses = len(facts) > 1 and (len(pods) > 1 or "" in pods)
    if not rows or (needs_addresses and any(row.device_ip is None for row in rows)):
        return "", order
    merged = merge([(facts[place].host, tables[place]) for place in order], keep_order=True)
    return dump(merged), order


def _super_pod(table: RankTable) -> str:
    """Name of the super pod of a host's own table, "" where it is in none."""
    listed = table.extra.get("super_pod_list")
    pod = listed[0] if isinstance(listed, list) and listed else None
    return str(pod.get("super_pod_id")) if isinstance(pod, dict) else ""


class NodePart(Protocol):
    """One node's part of a job, as far as a verdict needs it: a driver's `Member`, or a node of a meeting."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def node_rank(self) -> int:
        """Place in the job."""

    @property
    def facts(self) -> NodeFacts:
        """What is known of the node."""

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """As last reported."""

    @property
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """As last reported."""

    @property
    def result(self) -> RunResult | None:
        """How it ended, None while it goes on."""

    @property
    def lost(self) -> str:
        """Why it is lost, "" while it is not."""


def judge(
    members: Sequence[NodePart],
    troubled: Sequence[NodePart],
    *,
    job_id: str,
    began: float,
    lang: str = "en",
    limit: TimeLimit | Stalled | Straggling | None = None,
    engine_lost: str = "",
    earlier: Sequence[AttemptRecord] = (),
    stopped: bool = False,
) -> RunResult:
    """Join the nodes' results, and judge all ranks by the rules that hold on one node.

    Clocks of different nodes are not compared: the node whose trouble was heard of first comes first.

    Args:
        members: All nodes in node rank order.
        troubled: Those with a failure, in the order in which the news came.
        job_id: Name of the job.
        began: Wall-clock second of the job's start.
        lang: Language of the report, `en` or `zh`.
        limit: Why all nodes were told to stop, where that was a limit of the user's.
        engine_lost: How the engine itself was lost, "" while it was not.
        earlier: The attempts before this one.
        stopped: What failed was about to be tried again when a stop was asked for: nobody is blamed.

    Returns:
        The result, with the report unless all went well. Workers of a lost node that had not ended are
        KILLED without an exit code: nobody saw their end.
    """
    workers = tuple(
        sorted((worker for member in members for worker in _workers(member)), key=lambda worker: worker.rank)
    )
    results = [member.result for member in members if member.result is not None]
    well = len(results) == len(members) and all(one.state is JobState.SUCCEEDED for one in results)
    leftovers = tuple(leftover for result in results for leftover in result.leftovers)
    log_dir = results[0].log_dir if results else Path("log")
    now = time.time()
    order = tuple(dict.fromkeys([*troubled, *members]))
    # Whoever failed before the engine was lost is the cause still.
    engine = [_engine(members, engine_lost, now)] if engine_lost else []
    report = (
        None
        if well
        else _report(
            members,
            () if stopped else troubled,
            () if stopped else [member for member in order if member.lost and member.result is None],
            job_id,
            log_dir,
            leftovers,
            now,
            lang,
            limit,
            engine,
            earlier,
        )
    )
    state = judge_state(report, failed=any(result.failures for result in results))
    return RunResult(
        job_id=job_id,
        state=state,
        exit_code=choose_exit_code(report, state),
        workers=workers,
        auxiliaries=tuple(worker for member in members for worker in member.auxiliaries),
        failures=report.failures if report is not None and state is JobState.FAILED else (),
        leftovers=leftovers,
        lost_log_bytes=sum(result.lost_log_bytes for result in results),
        started=began,
        ended=now,
        log_dir=log_dir,
        report=report,
    )


def _report(
    members: Sequence[NodePart],
    troubled: Sequence[NodePart],
    lost: Sequence[NodePart],
    job_id: str,
    log_dir: Path,
    leftovers: tuple[Leftover, ...],
    now: float,
    lang: str,
    limit: TimeLimit | Stalled | Straggling | None,
    engine: list[LostNode],
    earlier: Sequence[AttemptRecord],
) -> FailureReport:
    from davincirunsdk.diagnosis.evidence import Evidence
    from davincirunsdk.diagnosis.evidence import LostNode as Lost
    from davincirunsdk.diagnosis.judge import judge as judge_evidence

    order = tuple(dict.fromkeys([*troubled, *members]))
    end, reason = _end(troubled, limit, bad=bool(lost or engine))
    return judge_evidence(
        Evidence(
            job_id=job_id,
            log_dir=log_dir,
            nnodes=len(members),
            # What became of a lost node's workers nobody saw, so the report counts them nowhere.
            accounts=tuple(account for member in members if not member.lost for account in _accounts(member)),
            lost=(
                *engine,
                *(
                    Lost(
                        node_rank=member.node_rank,
                        node=member.facts.host,
                        ranks=tuple(worker.rank for worker in member.workers),
                        reason=member.lost,
                        time=now,
                    )
                    for member in lost
                ),
            ),
            node_order=tuple(member.node_rank for member in order),
            end=end,
            reason=reason,
            attempt=len(earlier),
            facts=tuple(f"{attempt}." for attempt in earlier[-4:]),
            leftovers=leftovers,
            lang=lang,
        )
    )


def _end(
    troubled: Sequence[NodePart], limit: TimeLimit | Stalled | Straggling | None, *, bad: bool
) -> tuple[End, str]:
    """Say why the job ended, and in what words."""
    from davincirunsdk.diagnosis.evidence import End

    if limit is not None:
        return End.TIME_LIMIT if isinstance(limit, TimeLimit) else End.STALLED, limit.words
    if not troubled and not bad:
        return End.STOPPED, "stop was asked for"
    if troubled and (told := _first_report(troubled)) is not None:
        # What the supervisor of that node knows no worker's account says.
        ends = {
            Verdict.STALLED: End.STALLED,
            Verdict.TIME_LIMIT: End.TIME_LIMIT,
            Verdict.INTERNAL_ERROR: End.INTERNAL_ERROR,
        }
        if told.verdict in ends:
            return ends[told.verdict], told.why
    return End.WORKERS, ""


def _engine(members: Sequence[NodePart], why: str, now: float) -> LostNode:
    from davincirunsdk.diagnosis.evidence import LostNode

    ranks = tuple(worker.rank for member in members for worker in member.workers)
    return LostNode(node_rank=-1, node="the cluster", ranks=ranks, reason=why, time=now)


def _first_report(troubled: Sequence[NodePart]) -> FailureReport | None:
    """The report of the node that was in trouble first, None where it has none of its own."""
    result = troubled[0].result
    return result.report if result is not None else None


def _accounts(member: NodePart) -> list[Account]:
    from davincirunsdk.diagnosis.account import read_rank
    from davincirunsdk.diagnosis.evidence import RankEvidence
    from davincirunsdk.diagnosis.parcel import unpack

    facts = member.facts
    if member.result is not None and member.result.accounts:
        # A node calls itself by its own host's name, which Ray or Slurm need not know.
        return [
            replace(one, of=replace(one.of, node=facts.host, address=facts.address))
            for one in unpack(member.result.accounts)
        ]
    return [
        read_rank(
            RankEvidence.of(
                status,
                node_rank=member.node_rank,
                node=facts.host,
                address=facts.address,
                told=status.ended if status.state in (WorkerState.STOPPED, WorkerState.KILLED) else None,
                output=status.last_line.encode(errors="replace"),
            )
        )
        for status in (*_workers(member), *member.auxiliaries)
    ]


def _workers(member: NodePart) -> tuple[WorkerStatus, ...]:
    if member.result is not None:
        return member.result.workers
    return tuple(
        replace(worker, state=WorkerState.KILLED) if worker.state in _RUNNING else worker
        for worker in member.workers
    )
