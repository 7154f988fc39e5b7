"""What is known about a job that failed: the frozen input of the judgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path  # noqa: TC003 # accounts are sent to other nodes, which read these annotations
from typing import TYPE_CHECKING

from davincirunsdk.types import WorkerState  # noqa: TC001 # as above

if TYPE_CHECKING:
    from davincirunsdk.diagnosis.account import Account
    from davincirunsdk.types import Leftover, WorkerStatus


class End(Enum):
    """Why the job as a whole ended, as far as its supervisor knows.

    WORKERS: its workers did what they did. STOPPED: somebody asked for it, or signalled us.
    STALLED, TIME_LIMIT: a limit of the user. NODE_LOST, INTERNAL_ERROR: as they say.
    """

    WORKERS = "workers"
    STOPPED = "stopped"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedError:
    """An exception as a script's own recorder has written it down (torch's `@record` or ours).

    Attributes:
        message: The exception, such as `ValueError: boom`.
        traceback: Its traceback, or "".
        time: Wall-clock second, None when it does not say.
    """

    message: str
    traceback: str
    time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """What is known about one worker.

    Attributes:
        rank: Place in the job, -1 for MindSpore's scheduler.
        local_rank: Place on its node.
        node_rank: Place of its node in the job.
        node: Name of its node.
        address: Address of its node, "" when unknown.
        device_id: Number of its NPU as the worker knows it.
        npu_id: Number of the NPU on the host, -1 for none.
        pid: Process id, None when it was never started.
        name: `rank 3` or `scheduler`.
        state: Where it stands.
        exit_code: Negative for a signal; None while it runs, and when nobody could learn it.
        started: Wall-clock second of its start.
        ended: Wall-clock second of its end, None while it runs.
        told: Wall-clock second when we asked it to end, None when we never did.
        last_output: Wall-clock second of its last output.
        log_path: File with its output.
        output: The end of its output.
        times: Pairs of a number of bytes of `output` and the second when so many had come, ascending.
        raised: What the script recorded itself, if it did.
        facts: Further findings about it, each a sentence: memory kills, plog lines.
        plog: Its file of CANN's own log, None when there is none.
        start_error: Why it could not be started, "" when it could.
    """

    rank: int
    local_rank: int
    node_rank: int = 0
    node: str = ""
    address: str = ""
    device_id: int
    npu_id: int = -1
    pid: int | None = None
    name: str
    state: WorkerState
    exit_code: int | None
    started: float | None = None
    ended: float | None = None
    told: float | None = None
    last_output: float | None = None
    log_path: Path
    output: bytes = b""
    times: tuple[tuple[int, float], ...] = ()
    raised: RaisedError | None = None
    facts: tuple[str, ...] = ()
    plog: Path | None = None
    start_error: str = ""

    @classmethod
    def of(
        cls,
        status: WorkerStatus,
        *,
        node_rank: int,
        node: str,
        told: float | None,
        output: bytes,
        address: str = "",
        times: tuple[tuple[int, float], ...] = (),
    ) -> RankEvidence:
        """Make it of how a worker stands.

        Args:
            status: See `WorkerStatus`, whose fields it takes.
            node_rank: See above, as for all others.
            node: See there.
            told: See there.
            output: See there.
            address: See there.
            times: See there.
        """
        return cls(
            rank=status.rank,
            local_rank=status.local_rank,
            node_rank=node_rank,
            node=node,
            address=address,
            device_id=status.device_id,
            npu_id=status.npu_id,
            pid=status.pid,
            name=status.name,
            state=status.state,
            exit_code=status.exit_code,
            started=status.started,
            ended=status.ended,
            told=told,
            last_output=status.last_output,
            log_path=status.log_path,
            output=output,
            times=times,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that nobody hears of any more.

    Attributes:
        node_rank: Its place in the job; -1 for what all nodes need, such as the head of a cluster.
        node: Its name.
        ranks: The ranks that were there.
        reason: What is known, in words.
        time: Wall-clock second when it was noticed.
    """

    node_rank: int
    node: str
    ranks: tuple[int, ...]
    reason: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about a job.

    Attributes:
        job_id: Name of the job.
        log_dir: Folder of its log files.
        nnodes: Nodes of the job.
        ranks: Workers whose output is still to be read.
        accounts: Workers whose output has been read, on other nodes.
        lost: Nodes that were lost, the first one first.
        node_order: Ranks of nodes in the order in which the news of their trouble came: clocks of
            different nodes are not compared.
        end: Why the job ended.
        reason: The same in words, for people.
        odd: Ranks that were found elsewhere than the others when the job had stalled, surest first.
        signal: Name of the stop signal that this program or all workers got from outside, or "".
        leftovers: Processes that outlived their workers and were ended.
        facts: Findings about the machine, each a sentence.
        attempt: Number of the attempt, from 0.
        lang: Language of the report, `en` or `zh`.
    """

    job_id: str
    log_dir: Path
    nnodes: int = 1
    ranks: tuple[RankEvidence, ...] = ()
    accounts: tuple[Account, ...] = ()
    lost: tuple[LostNode, ...] = ()
    node_order: tuple[int, ...] = ()
    end: End = End.WORKERS
    reason: str = ""
    odd: tuple[int, ...] = ()
    signal: str = ""
    leftovers: tuple[Leftover, ...] = ()
    facts: tuple[str, ...] = field(default=())
    attempt: int = 0
    lang: str = "en"
