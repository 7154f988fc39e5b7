"""Stacks of real workers that wait for one that does not come."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import wait_until

from davincirunsdk import FMKManager, WorkerState
from davincirunsdk.diagnosis.stacks import Target, take_stacks

COLLECTIVE = Path(__file__).parents[1] / "workers" / "collective.py"
CALM = ("S", "T")


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which py-spy is not installed; the folder is first on its search path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    others = [part for part in os.environ["PATH"].split(":") if not (Path(part) / "py-spy").exists()]
    monkeypatch.setenv("PATH", ":".join([str(folder), *others]))
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return folder


async def settle(manager: FMKManager) -> None:
    """Wait until one rank has gone astray and the others wait for it in the kernel."""
    await asyncio.to_thread(wait_until, Path("astray").exists)
    waiting = [psutil.Process(worker.pid) for worker in manager.workers[:-1] if worker.pid is not None]

    def calm() -> bool:
        return all(Path(f"/proc/{process.pid}/wchan").read_text() not in ("0", "") for process in waiting)

    await asyncio.to_thread(wait_until, calm)
    # Until they are past the look at the file: then they are in the socket for good.
    seen = [process.num_ctx_switches() for process in waiting]
    for _ in range(500):
        await asyncio.sleep(0.05)
        now = [process.num_ctx_switches() for process in waiting]
        if now == seen:
            return
        seen = now
    raise AssertionError("the ranks do not come to rest")


@pytest.mark.parametrize("kind", ["sleeps", "spins", "helper"])
async def test_the_odd_one_is_seen(job_folder: Path, kind: str) -> None:
    """Ranks that wait at the same place stand together; the one that is elsewhere stands alone."""
    command = [sys.executable, str(COLLECTIVE), kind]
    async with FMKManager(command, nproc_per_node=4, grace_period=1) as manager:
        await settle(manager)
        stacks = await manager.stacks()
        assert all(worker.state is WorkerState.RUNNING for worker in manager.workers)
    assert [worker.source for worker in stacks.workers] == ["py-spy"] * 4
    alone = [worker.rank for worker in stacks.groups[-1]]
    assert alone == [3]
    (odd,) = stacks.groups[-1]
    place = {"sleeps": "sleeps (", "spins": "spins (", "helper": "waits_for_helper ("}[kind]
    assert any(frame.startswith(place) for frame in odd.frames)
    assert any("all_reduce (" in frame for frame in stacks.workers[1].frames)
    assert stacks.path == job_folder / "log" / f"{manager.job_id}-stacks-1.txt"
    text = stacks.path.read_text()
    assert str(stacks) in text
    assert "rank 3 is " in text
    assert "ranks 1-2 are sleeping" in text


async def test_a_stopped_rank_is_seen(job_folder: Path) -> None:
    """A rank that is stopped shows its frames and that it is stopped, and stays stopped."""
    async with FMKManager(
        [sys.executable, str(COLLECTIVE), "stops"], nproc_per_node=2, grace_period=1
    ) as manager:
        await settle(manager)
        pid = manager.workers[1].pid
        assert pid is not None
        await asyncio.to_thread(wait_until, lambda: psutil.Process(pid).status() == "stopped")
        stacks = await manager.stacks()
        assert psutil.Process(pid).status() == "stopped"
    assert stacks.workers[1].state == "stopped by a signal"
    assert any(frame.startswith("stops (") for frame in stacks.workers[1].frames)


async def test_without_py_spy_the_kernel_is_asked(job_folder: Path, without_py_spy: Path) -> None:
    """No worker gets a signal; what the kernel knows sets a busy rank apart from those that wait."""
    command = [sys.executable, str(COLLECTIVE), "spins"]
    async with FMKManager(command, nproc_per_node=3, grace_period=1) as manager:
        await settle(manager)
        stacks = await manager.stacks()
        assert all(worker.exit_code is None for worker in manager.workers)
    assert [worker.source for worker in stacks.workers] == ["kernel"] * 3
    assert stacks.workers[2].state == "running"
    assert stacks.workers[1].state.startswith("sleeping in ")
    assert "pip install davincirunsdk[stacks]" in stacks.workers[0].text
    assert [worker.rank for worker in stacks.groups[-1]] == [2]


async def test_a_script_may_register(job_folder: Path, without_py_spy: Path) -> None:
    """One that called `register_stacks` answers by itself, each time anew, also from within C code."""
    python = sys.executable
    command = [python, str(COLLECTIVE), "spins", "0", "--register"]
    async with FMKManager(command, nproc_per_node=2, grace_period=1) as manager:
        await settle(manager)
        for _ in range(2):
            stacks = await manager.stacks()
            assert [worker.source for worker in stacks.workers] == ["faulthandler"] * 2
            assert stacks.workers[0].frames[0].startswith("receive (")
            assert stacks.workers[1].frames[0].startswith("spins (")
        assert all(worker.exit_code is None for worker in manager.workers)


async def test_py_spy_may_not_look(job_folder: Path, without_py_spy: Path) -> None:
    """Where ptrace is forbidden the reason is told, and the kernel is asked."""
    fake = without_py_spy / "py-spy"
    fake.write_text(
        "#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    python = sys.executable
    async with FMKManager([python, str(COLLECTIVE), "sleeps"], nproc_per_node=2, grace_period=1) as manager:
        await settle(manager)
        stacks = await manager.stacks()
    assert [worker.source for worker in stacks.workers] == ["kernel"] * 2
    assert "Permission Denied" in stacks.workers[0].text


def test_signals_without_a_meaning_for_us_are_not_sent(without_py_spy: Path) -> None:
    """A handler of the user's own on the same signal is left alone: only the memory says it is ours."""
    words = (
        "import signal, sys, time\n"
        "from davincirunsdk.script.stacks import SIGNAL\n"
        "signal.signal(SIGNAL, lambda *_: print('hit', flush=True))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    python = sys.executable
    with subprocess.Popen([python, "-c", words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (stack,) = take_stacks([Target(rank=0, name="rank 0", pid=process.pid)])
        assert stack.source == "kernel"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b""


def test_the_python_below_a_shell_is_looked_at() -> None:
    """A shell, and a Python that only waits for another, are not the training."""
    inner = "import time\ndef trains():\n    time.sleep(600)\ntrains()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen(["sh", "-c", 'python -c "$0"; true', outer], start_new_session=True) as process:
        try:

            def trains() -> bool:
                (stack,) = take_stacks([Target(rank=0, name="rank 0", pid=process.pid)])
                return bool(stack.frames) and stack.frames[0].startswith("trains (")

            wait_until(trains)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_one_that_has_ended() -> None:
    """A worker that ends meanwhile is no error."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    began = time.monotonic()
    (stack,) = take_stacks([Target(rank=0, name="rank 0", pid=process.pid)])
    assert stack.state == "ended"
    assert time.monotonic() - began < 10
