"""Evidence for tests of the judgement: ranks with what they printed, when, and how they ended."""

from __future__ import annotations

from pathlib import Path

from davincirunsdk.diagnosis.evidence import End, Evidence, RankEvidence
from davincirunsdk.diagnosis.judge import judge
from davincirunsdk.types import FailureReport, WorkerState

LOGS = Path("/data/log")
NOON = 1_741_089_600.0

STEPS = "step 1 loss 0.5\nstep 2 loss 0.4\n"
OWN = (
    STEPS
    + 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    g()\nValueError: boom-42\n'
)
LOST_PEER = (
    STEPS + 'Traceback (most recent call last):\n  File "train.py", line 9, in step\n    dist.all_reduce(x)\n'
    "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:5678\n"
)
TIMED_OUT = (
    STEPS + "EI0006: Getting socket times out. Reason: the other side did not send in time\n"
    "        Possible Cause: 1. NPU out of memory on the peer\n"
)


def told(
    rank: int,
    text: str = "",
    code: int | None = None,
    *,
    at: float = 10.0,
    ended: float | None = None,
    state: WorkerState | None = None,
    stop: float | None = None,
    node: int = 0,
) -> RankEvidence:
    """One rank that printed `text` at second `at` and ended with `code`; `stop` is when we told it to end."""
    if state is None:
        if code is None:
            state = WorkerState.RUNNING
        elif stop is not None:
            state = WorkerState.STOPPED
        else:
            state = WorkerState.SUCCEEDED if code == 0 else WorkerState.FAILED
    output = text.encode()
    end = (ended if ended is not None else (stop or at) + 0.1) if code is not None else None
    return RankEvidence(
        rank=rank,
        local_rank=rank % 8,
        node_rank=node,
        node=f"worker-{node}",
        address=f"10.0.0.{node + 1}",
        device_id=rank % 8,
        pid=4000 + rank,
        name=f"rank {rank}" if rank >= 0 else "scheduler",
        state=state,
        exit_code=code,
        started=NOON,
        ended=NOON + end if end is not None else None,
        told=NOON + stop if stop is not None else None,
        last_output=NOON + at if text else None,
        log_path=LOGS / f"job-proc-rank-{rank}-device-{rank % 8}.txt",
        output=output,
        times=((len(output), NOON + at),) if output else (),
    )


def judged(*ranks: RankEvidence, lang: str = "en", end: End = End.WORKERS, reason: str = "") -> FailureReport:
    """The report on these ranks."""
    nodes = {one.node_rank for one in ranks}
    return judge(
        Evidence(
            job_id="job", log_dir=LOGS, ranks=ranks, nnodes=len(nodes), lang=lang, end=end, reason=reason
        )
    )
