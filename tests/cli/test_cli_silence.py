"""What the command says about silent ranks when somebody stops a job that hangs."""

from __future__ import annotations

from pathlib import Path

from davincirunsdk.cli.run import _silent_ranks
from davincirunsdk.types import WorkerState, WorkerStatus


def status(
    rank: int, last_output: float | None, last_line: str = "", state: WorkerState = WorkerState.STOPPED
) -> WorkerStatus:
    return WorkerStatus(
        rank=rank, local_rank=rank, device_id=rank, pid=7, state=state, exit_code=-15, started=1000.0,
        ended=1100.0, log_path=Path("x.txt"), log_bytes=0, last_output=last_output, last_line=last_line,
        lost_bytes=0, name=f"rank {rank}",
    )  # fmt: skip


def test_silent_ranks_are_named_the_longest_silent_first() -> None:
    """Each rank that was silent for long gets a line with its last words; the busy and the done get none."""
    assert _silent_ranks(
        [
            status(0, 1099.0, "step 7"),
            status(1, 1040.0, "enter all_reduce"),
            status(2, None),
            status(3, 1001.0, "done", WorkerState.SUCCEEDED),
            status(4, 1020.0, "load batch", WorkerState.KILLED),
        ]
    ) == [
        "rank 2 was silent for 0:01:40, no output at all",
        "rank 4 was silent for 0:01:20: load batch",
        "rank 1 was silent for 0:01:00: enter all_reduce",
    ]


def test_many_silent_ranks_take_few_lines() -> None:
    """A thousand ranks that hang do not flood the terminal."""
    lines = _silent_ranks([status(rank, 1000.0 + rank / 100) for rank in range(1000)])
    assert len(lines) == 11
    assert lines[0].startswith("rank 0 ")
    assert lines[-1] == "and 990 more"
