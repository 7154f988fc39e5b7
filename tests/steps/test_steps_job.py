"""Steps of real workers: what they print, and what their scripts say themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import FMKManager

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk import Event

PRINTS = """
import os, sys
rank = int(os.environ["RANK"])
for step in range(1, 31):
    if rank == 0:
        print(f" iteration {step}/ 30 | elapsed time per iteration (ms): 5.0 | lm loss: {1 / step:.3E} |")
    else:
        sys.stderr.write(f"\\r{step}/30 ")
        sys.stderr.write(f"\\r  3%|#  | {step}/30 [00:01<00:01,  2.00it/s]")
        sys.stderr.flush()
"""

SAYS = """
import os, time, davincirunsdk
rank = int(os.environ["RANK"])
for step in range(1, 101):
    davincirunsdk.progress(step, 100, loss=1 / step, lr=float("nan"), name="x")
davincirunsdk.progress(100 - rank, 100, loss=0.5, lr=float("nan"))
"""


async def run(command: list[str], **keywords: object) -> tuple[FMKManager, list[Event]]:
    """Run a job of two workers to its end and return its events."""
    async with FMKManager(command, nproc_per_node=2, **keywords) as manager:  # type: ignore[arg-type] # as given
        await manager.wait()
    return manager, [event async for event in manager.events()]


async def test_what_workers_print(job_folder: Path) -> None:
    """A framework's lines on one rank, a bar on the other."""
    manager, events = await run([sys.executable, "-c", PRINTS])
    first, second = (worker.progress for worker in manager.workers)
    assert first is not None
    assert second is not None
    assert (first.step, first.total, first.step_seconds) == (30, 30, 0.005)
    assert first.loss == pytest.approx(1 / 30, rel=1e-3)
    assert (second.step, second.total, second.step_seconds) == (30, 30, 0.5)
    last = {event.rank: event.progress for event in events if event.kind == "progress"}
    assert last == {0: first, 1: second}
    (file,) = (job_folder / "log").glob("*-events.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    figures = [line["progress"] for line in lines if line["kind"] == "progress" and line["rank"] == 0]
    assert figures[-1]["step"] == 30
    assert figures[-1]["total"] == 30


async def test_what_a_script_says(job_folder: Path) -> None:
    """A script that prints nothing is followed too, to its last word."""
    manager, events = await run([sys.executable, "-c", SAYS])
    for rank, worker in enumerate(manager.workers):
        progress = worker.progress
        assert progress is not None
        assert (progress.step, progress.total, progress.loss) == (100 - rank, 100, 0.5)
        assert [name for name, _ in progress.values] == ["lr"]
    assert {event.rank for event in events if event.kind == "progress"} == {0, 1}


async def test_a_script_is_followed_while_it_runs(job_folder: Path) -> None:
    """An event comes though the worker prints nothing and goes on."""
    words = "import davincirunsdk, time; davincirunsdk.progress(7, 9); time.sleep(600)"
    async with FMKManager([sys.executable, "-c", words], nproc_per_node=1) as manager:
        async for event in manager.events():
            if event.kind == "progress":
                assert event.progress is not None
                assert (event.progress.step, event.progress.total) == (7, 9)
                break
        assert manager.workers[0].progress == event.progress


async def test_own_pattern(job_folder: Path) -> None:
    """Lines of the user's own shape."""
    manager, _ = await run(
        [sys.executable, "-c", "print('done<3|8>')"], progress_pattern=r"done<(?P<step>\d+)\|(?P<total>\d+)>"
    )
    progress = manager.workers[0].progress
    assert progress is not None
    assert (progress.step, progress.total) == (3, 8)


async def test_events_are_few(job_folder: Path) -> None:
    """At most one a second and rank, however many steps there are, and the last one."""
    words = "for step in range(1, 20001): print(f'step {step} loss 0.5')"
    began = time.monotonic()
    _, events = await run([sys.executable, "-c", words])
    seconds = time.monotonic() - began
    told = [event for event in events if event.kind == "progress"]
    assert len([event for event in told if event.rank == 0]) <= seconds + 2
    assert {event.progress.step for event in told if event.progress} == {20000}


@pytest.mark.parametrize("value", [None, "", "x", "1:2:3", "1:0:1:0", "999999:3:4:0", ":::", "{pid}:0:0:0"])
def test_outside_a_job_nothing_happens(value: str | None, tmp_path: Path) -> None:
    """No job, no launcher, or a number that belongs to another process by now."""
    words = "import davincirunsdk\nfor step in range(100): davincirunsdk.progress(step, None, loss=0.5)"
    environment = {} if value is None else {"DAVINCIRUN_PROGRESS": value.format(pid="self")}
    with (tmp_path / "other").open("w+b") as other:
        subprocess.run([sys.executable, "-c", words], env=environment, stdin=other, check=True, timeout=30)
        assert not other.read()


async def test_a_call_is_cheap(job_folder: Path) -> None:
    """Below 20 microseconds in a job: the worker counts."""
    words = (
        "import time, davincirunsdk\n"
        "best = 1.0\n"
        "for _ in range(5):\n"
        "    began = time.process_time()\n"
        "    for step in range(20000): davincirunsdk.progress(step, 20000, loss=0.5, lr=1e-4)\n"
        "    best = min(best, (time.process_time() - began) / 20000)\n"
        "assert best < 20e-6, best\n"
    )
    manager, _ = await run([sys.executable, "-c", words])
    progress = manager.workers[0].progress
    assert progress is not None
    assert progress.step == 19999
