"""What the guardian is told of workers that end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from davincirunsdk import FMKManager
from davincirunsdk.leftovers.guardian import Guardian

if TYPE_CHECKING:
    import pytest

UNTIL_GO = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"


async def test_it_knows_of_each_end_before_the_number_is_free(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would take a stranger that gets the number for the worker, when the supervisor has died."""
    loop, known = asyncio.get_running_loop(), asyncio.Event()
    orders: list[list[str]] = []
    zombies: dict[int, bool] = {}
    tell = Guardian._tell

    def note(guardian: Guardian, *given: list[str], **options: Any) -> None:
        for order in given:
            orders.append(order)
            if order[0] == "exited":
                zombies.update({int(pid): Path(f"/proc/{pid}").exists() for pid in order[3:]})
        if sum(order[0] == "output" for order in orders) == 3:
            loop.call_soon_threadsafe(known.set)
        tell(guardian, *given, **options)

    monkeypatch.setattr(Guardian, "_tell", note)
    async with FMKManager([sys.executable, "-c", UNTIL_GO], nproc_per_node=3) as job:
        await asyncio.wait_for(known.wait(), 20)
        (job_folder / "go").touch()
        await asyncio.wait_for(job.wait(), 20)
        pids = {worker.pid for worker in job.workers}
    assert zombies == dict.fromkeys(pids, True)
    closed = [int(pid) for order in orders if order[0] == "closed" for pid in order[2:]]
    assert sorted(closed) == sorted(pid for pid in pids if pid is not None)
