"""A worker that SIGKILL does not end, as one that hangs in a driver, holds nobody for ever."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import FMKManager, WorkerSpawnError, WorkerState
from davincirunsdk.supervision import attempt

if TYPE_CHECKING:
    from collections.abc import Iterator

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group that freezes processes: they do not die before they are thawed."""
    assert (FREEZER / "cgroup.procs").exists(), (
        "this test needs root and the freezer of control groups, version 1"
    )
    group = FREEZER / f"davincirun-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "freezer.state").write_text("THAWED")
    while (group / "cgroup.procs").read_text():
        pass
    group.rmdir()


@pytest.mark.usefixtures("job_folder")
async def test_a_stuck_worker_is_given_up_and_named(
    freezer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stop returns after its limit, says which process is stuck, and the other worker is gone."""
    monkeypatch.setattr(attempt, "_UNKILLABLE_AFTER", 0.5)
    monkeypatch.setattr("davincirunsdk.leftovers.ending._UNKILLABLE_AFTER", 0.5)
    command = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"]
    async with FMKManager(command, nproc_per_node=2, grace_period=0.2) as manager:
        ready = 0
        async for _ in manager.logs():
            ready += 1
            if ready == 2:
                break
        (freezer / "cgroup.procs").write_text(str(manager.workers[0].pid))
        (freezer / "freezer.state").write_text("FROZEN")
        await manager.stop()
    assert [worker.state for worker in manager.workers] == [WorkerState.KILLED, WorkerState.STOPPED]
    assert f"rank 0, pid {manager.workers[0].pid}, does not end after SIGKILL" in caplog.text
    (freezer / "freezer.state").write_text("THAWED")
    os.waitpid(manager.workers[0].pid or 0, 0)  # noqa: ASYNC222 - the job has given it up


@pytest.mark.usefixtures("job_folder")
async def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no further thread can be started, at whatever moment, the start fails and leaves nothing."""
    start = threading.Thread.start
    for allowed in range(3, 16):
        left = allowed

        def limited(thread: threading.Thread) -> None:
            nonlocal left
            left -= thread.name.startswith("davincirun-")
            # What ends a job needs threads too: only those of a start are refused.
            if left < 0 and thread.name in {"davincirun-_carry", "davincirun-_spawn"}:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(WorkerSpawnError, match="cannot be started"):
            async with FMKManager(["sleep", "600"], nproc_per_node=8):
                pass
