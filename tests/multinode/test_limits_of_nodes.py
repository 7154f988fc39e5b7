"""Stall, time limit and restarts of a job on several nodes: agents in this process as nodes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import DistributedRuntimeError, JobTimeoutError
from davincirunsdk.engines.agent import NodeAgent
from davincirunsdk.engines.driver import NodesManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.node import NodeHandle

pytestmark = pytest.mark.usefixtures("job_folder")

SILENT = "import os, time; print('step 1 loss 0.5', os.environ['RANK'], flush=True); time.sleep(600)"
ONE_WORKS = """
import os, time
print("step 1 loss 0.5", flush=True)
if os.environ["RANK"] == "3":
    for step in range(2, 9):
        time.sleep(0.5)
        print(f"step {step} loss 0.5", flush=True)
    os._exit(0)
time.sleep(4.5)
"""


class Here:
    """A placement whose nodes are agents in this process."""

    renewal_timeout = 0.0

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        raise AssertionError("there are no other nodes")

    async def open(self, table: GivenTable | None) -> Sequence[NodeHandle]:
        """Return two nodes."""
        return NodeAgent(), NodeAgent()

    async def until_lost(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """Nothing is to be given back."""


async def test_all_nodes_without_progress_are_a_stall() -> None:
    """Each node says that its ranks are quiet; the driver stops all of them, and says who is where."""
    command = [sys.executable, "-c", SILENT]
    async with NodesManager(Here(), command, nproc_per_node=2, stall_timeout=1.0, grace_period=1) as job:
        with pytest.raises(JobTimeoutError) as caught:
            await job.wait()
    error = caught.value
    assert (error.exit_code, error.report.verdict) == (124, "stalled")
    text = " ".join(str(error).split())
    assert "on node 0" in text
    assert "on node 1" in text
    assert [event.kind async for event in job.events() if event.kind == "stalled"] == ["stalled"]


async def test_one_node_that_works_is_no_stall() -> None:
    """A node whose ranks only wait for another one's is quiet, and the job has not stalled."""
    command = [sys.executable, "-c", ONE_WORKS]
    async with NodesManager(Here(), command, nproc_per_node=2, stall_timeout=1.0) as job:
        result = await job.wait()
    assert result.exit_code == 0
    assert [event.kind async for event in job.events() if event.kind == "stalled"] == []


async def test_the_time_limit_of_all_nodes() -> None:
    """All nodes are stopped together, with 124."""
    command = [sys.executable, "-c", SILENT]
    async with NodesManager(Here(), command, nproc_per_node=2, timeout=2.0, grace_period=1) as job:
        with pytest.raises(JobTimeoutError) as caught:
            await job.wait()
    assert (caught.value.exit_code, caught.value.report.verdict) == (124, "time_limit")
    assert "the time limit of 2 s was reached" in str(caught.value)


START = """
import os, sys, time
from pathlib import Path
count, rank = int(os.environ["DAVINCIRUN_RESTART_COUNT"]), int(os.environ["RANK"])
with open("starts", "a") as file:
    file.write(f"{count} {rank} {os.environ['MASTER_PORT']}\\n")
print(f"step {count + 1} loss 0.5", flush=True)
"""
FAILS_FIRST = (
    START
    + """
while [line[:1] for line in Path("starts").read_text().splitlines()].count(str(count)) < 4: time.sleep(0.01)
if count == 0 and rank == 3: sys.exit(5)
if count == 0: time.sleep(600)
"""
)


def starts() -> list[list[str]]:
    """Every start of a worker: attempt, rank, port."""
    return [line.split() for line in Path("starts").read_text().splitlines()]


async def test_all_nodes_restart_together() -> None:
    """A rank fails on one node: the workers of both start anew, with one number and a new port."""
    command = [sys.executable, "-c", FAILS_FIRST]
    async with NodesManager(
        Here(), command, nproc_per_node=2, max_restarts=2, restart_delay=0.1, grace_period=1
    ) as job:
        result = await job.wait()
    assert result.exit_code == 0
    assert [(attempt.exit_code, attempt.step) for attempt in result.attempts] == [(5, 1), (0, 2)]
    assert sorted((start[0], start[1]) for start in starts()) == [
        (attempt, rank) for attempt in "01" for rank in "0123"
    ]
    assert [len({start[2] for start in starts() if start[0] == attempt}) for attempt in "01"] == [1, 1]
    assert len({start[2] for start in starts()}) == 2
    assert [event.kind async for event in job.events() if event.kind == "restarting"] == ["restarting"]
    # The two nodes share a folder here: only one of them has the plain name.
    assert list(Path("log").glob("*-rank-*-attempt-0.txt"))


async def test_a_stop_during_the_wait_of_all_nodes() -> None:
    """No node starts anew after a stop."""
    command = [sys.executable, "-c", FAILS_FIRST]
    async with NodesManager(
        Here(), command, nproc_per_node=2, max_restarts=2, restart_delay=200, grace_period=1
    ) as job:
        async for event in job.events():
            if event.kind == "restarting":
                break
        await job.stop()
    assert {start[0] for start in starts()} == {"0"}
    assert isinstance(job.error, DistributedRuntimeError)
    assert job.error.report.verdict == "stopped"
    assert [attempt.exit_code for attempt in job.error.result.attempts] == [5]  # type: ignore[union-attr] # set
