"""Stall and time limit of a job on several nodes: agents in this process as nodes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import JobTimeoutError
from davincirunsdk.engines.agent import NodeAgent
from davincirunsdk.engines.driver import NodesManager

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    async def open(self) -> Sequence[NodeHandle]:
        """Return two nodes."""
        return NodeAgent(), NodeAgent()

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
