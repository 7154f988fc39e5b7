"""A real hang in a collective of torch: one of four ranks does not join."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import FMKManager, JobTimeoutError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
def load_batch():
    if kind == "sleeps": time.sleep(600)
    while True: pass
def train():
    for step in range(1, 6):
        if rank == 2 and step == 4: load_batch()
        value = torch.ones(4) * rank
        dist.all_reduce(value)
        print(f"step {step}/100 loss {1 / step:.3f}", flush=True)
train()
"""


@pytest.mark.parametrize("kind", ["sleeps", "spins"])
async def test_one_rank_never_joins(job_folder: Path, kind: str) -> None:
    """Its peers wait in all_reduce, it is elsewhere: named in the verdict, with both places."""
    command = [sys.executable, "-c", TRAIN, kind]
    async with FMKManager(command, nproc_per_node=4, stall_timeout=4.0, grace_period=1.0) as manager:
        with pytest.raises(JobTimeoutError) as caught:
            await manager.wait()
    assert caught.value.exit_code == 124
    assert caught.value.root_cause.rank == 2
    text = " ".join(str(caught.value).split())
    assert "rank 2 is in load_batch " in text
    assert "ranks 0-1, 3 are in all_reduce " in text
    steps = [worker.progress.step for worker in manager.workers if worker.progress is not None]
    assert steps == [3, 3, 3, 3]
