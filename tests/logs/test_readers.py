"""Readers of a job that share a stream or come to an end with it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import (
    Event,
    FMKManager,
    WorkerSpawnError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PY = sys.executable
COMMAND = [PY, "-m", "davincirunsdk", "--log-dir", "log"]
PIDS = Path("/sys/fs/cgroup/pids")

pytestmark = pytest.mark.usefixtures("job_folder")


@pytest.mark.parametrize("stream", ["logs", "log_blocks", "events"])
async def test_two_readers_share_a_stream(stream: str) -> None:
    """Whoever reads one stream from two tasks gets each item once, and both tasks come to their end."""
    async with FMKManager(["sh", "-c", "sleep 0.2; echo a"], nproc_per_node=2) as job:
        alone, shared = getattr(job, stream)(), getattr(job, stream)()

        async def read(items: AsyncIterator[object]) -> list[object]:
            return [item async for item in items]

        whole, first, second = await asyncio.wait_for(
            asyncio.gather(read(alone), read(shared), read(shared)), 20
        )
    assert len(first) + len(second) == len(whole) > 1


@pytest.mark.parametrize("command", [["no-such-program"], ["./no-shebang"]])
async def test_readers_of_a_job_that_cannot_be_started_come_to_an_end(
    command: list[str], job_folder: Path
) -> None:
    """Streams taken before the start or after it end when it fails, and state and last event say so."""
    (job_folder / "no-shebang").write_text("exit 0\n")
    (job_folder / "no-shebang").chmod(0o755)
    job = FMKManager(command, nproc_per_node=2)
    logs, events = job.logs(), job.events()
    with pytest.raises(WorkerSpawnError) as caught:
        await job.__aenter__()

    async def read(items: AsyncIterator[Event]) -> list[Event]:
        return [item async for item in items]

    async def read_all() -> list[Event]:
        assert [line async for line in logs] == [line async for line in job.logs()] == []
        seen = await read(events)
        assert await read(job.events()) == seen
        return seen

    seen = await asyncio.wait_for(read_all(), 20)
    if seen:
        assert job.state == "FAILED"
        assert seen[-1].kind == "finished"
        assert seen[-1].exit_code == caught.value.exit_code == 126
        assert "FAILED: rank 0 cannot be started" in seen[-1].detail
