"""On every way to a stop a rank saves, however it is wrapped, and its last words are in its log."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from processes import marked_processes, wait_until
from recorded import PY, WORKERS, in_time

from davincirunsdk import DistributedRuntimeError, FMKManager

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("job_folder")

GRACE = 6.0
KINDS = (
    "fork",
    "spawn",
    "tee",
    "slow-filter",
    "substitution",
    "gzip",
    "shell",
    "dash",
    "shells",
    "exec",
    "trap",
    "deaf-shell",
    "forwards",
    "python-wrapper",
    "timeout",
    "nested",
)


class Savers:
    """A job of one rank per kind."""

    def __init__(self, folder: Path, kinds: tuple[str, ...] = KINDS) -> None:
        self.folder = folder / "saved"
        self.folder.mkdir()
        self.logs = folder / "log"
        self.kinds = kinds
        self.began = 0.0

    @property
    def command(self) -> list[str]:
        """The worker command."""
        return [PY, "-S", "-E", str(WORKERS / "saver.py"), str(self.folder), ",".join(self.kinds)]

    def manager(self) -> FMKManager:
        """Make the job."""
        return FMKManager(self.command, log_dir=self.logs, nproc_per_node=len(self.kinds), grace_period=GRACE)

    def ready(self) -> bool:
        """Tell whether every rank waits for its end."""
        return len(list(self.folder.glob("ready.*"))) == len(self.kinds)

    async def until_ready(self) -> None:
        """Wait for that in a loop."""
        await asyncio.to_thread(wait_until, self.ready, 60.0, "all ranks run")
        self.ends_now()

    def ends_now(self) -> None:
        """Note when the end begins."""
        self.began = time.monotonic()

    def assert_saved(self) -> None:
        """Every rank was told once, has saved, and its last words are where they belong."""
        missing = [kind for kind in self.kinds if not (self.folder / f"saved.{kind}").exists()]
        assert not missing, f"no checkpoint of {missing}"
        for place, kind in enumerate(self.kinds):
            told = int((self.folder / f"saved.{kind}").read_text())
            # timeout signals its child and then its group.
            assert told == 1 or (kind == "timeout" and told == 2), f"{kind} was told {told} times"
            (log,) = self.logs.glob(f"*-proc-rank-{place}-device-{place}.txt")
            words = log.read_text()
            for number in range(5):
                assert f"last words {number} of {kind}" in words, f"{kind}: {words}"
        for name in {"tee", "substitution"} & set(self.kinds):
            assert f"last words 4 of {name}" in (self.folder / f"copy.{name}").read_text()
        if "gzip" in self.kinds:
            assert b"last words 4" in gzip.decompress((self.folder / "copy.gzip.gz").read_bytes())


async def stop(savers: Savers) -> None:
    async with savers.manager() as manager:
        await savers.until_ready()
        await manager.stop()


async def leaving_the_block(savers: Savers) -> None:
    async with savers.manager():
        await savers.until_ready()


async def task_cancelled(savers: Savers) -> None:
    task = asyncio.create_task(leaving_the_block(savers))
    await savers.until_ready()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", [stop, leaving_the_block, task_cancelled])
async def test_in_a_loop(way: Callable[[Savers], Awaitable[None]], job_folder: Path) -> None:
    """Stop, the end of the block and a cancellation let every rank save, and return in time."""
    savers = Savers(job_folder)
    await way(savers)
    took = time.monotonic() - savers.began
    savers.assert_saved()
    assert took < in_time(GRACE)


async def sibling_failure(savers: Savers) -> None:
    async with savers.manager() as manager:
        await savers.until_ready()
        failing = manager.workers[-1]
        assert failing.pid is not None
        os.kill(failing.pid, signal.SIGSEGV)
        await manager.wait()


async def test_a_sibling_fails(job_folder: Path) -> None:
    """The ranks that are stopped for another one's failure save."""
    savers = Savers(job_folder, (*KINDS, "fails"))
    with pytest.raises(DistributedRuntimeError) as caught:
        await sibling_failure(savers)
    assert caught.value.root_cause.rank == len(KINDS)
    savers.kinds = KINDS
    savers.assert_saved()
    assert time.monotonic() - savers.began < in_time(GRACE)


def command(savers: Savers) -> subprocess.Popen[bytes]:
    """Start the command with the job."""
    options = ["--nproc-per-node", str(len(savers.kinds)), "--grace-period", str(GRACE), "--echo", "none"]
    words = [sys.executable, "-m", "davincirunsdk", *options, "--log-dir", str(savers.logs), *savers.command]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(savers.ready, 60.0, "all ranks run")
    savers.ends_now()
    return process


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGINT], [signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]],
    ids=["TERM", "INT", "KILL", "TERM, KILL"],
)
def test_the_command(numbers: list[int], job_folder: Path) -> None:
    """Signals to the command let every rank save; so does SIGKILL; nobody is told twice."""
    savers = Savers(job_folder)
    process = command(savers)
    try:
        number = numbers[-1]
        for each in numbers:
            process.send_signal(each)
            # Until the ranks know of it, as those do who are told by the guardian.
            time.sleep(0.1)
        assert process.wait(in_time(GRACE + 2)) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
    # Until the guardian has left, too, where that had to do it.
    limit = in_time(GRACE + 3.0)
    mark = os.environ["PYTEST_OF_DAVINCIRUN"]
    wait_until(lambda: not marked_processes("PYTEST_OF_DAVINCIRUN", mark), limit, "nothing is left")
    savers.assert_saved()


SAVES = """
import signal, sys, time
def save(*_): print('saved', flush=True); sys.exit()
signal.signal(15, save); print('ready', flush=True)
while True: time.sleep(60)
"""


@pytest.mark.parametrize("words", ["{}; true", "{} | cat"])
async def test_a_shell_that_dies_at_once_leaves_its_child_to_be_told_at_once(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its child is a part of the stop, not a stray that is left alone for a while and then told of."""
    monkeypatch.setattr("davincirunsdk.leftovers.ending._SETTLING", 30.0)
    (tmp_path / "child.py").write_text(SAVES)
    command = ["sh", "-c", words.format(f"{sys.executable} {tmp_path}/child.py")]
    async with FMKManager(command, log_dir=tmp_path, nproc_per_node=1, grace_period=60.0) as manager:
        async with manager.logs() as lines:
            async for line in lines:
                assert line.text == "ready"
                break
        await asyncio.wait_for(manager.stop(), 20)
    assert "saved" in manager.workers[0].log_path.read_text()
    assert "outlived" not in caplog.text


async def test_what_a_trap_runs_may_finish(tmp_path: Path) -> None:
    """A shell that saves in its trap gets the time for it."""
    script = "trap 'sleep 0.6 && echo copied; exit' TERM; echo ready; sleep 60 & wait"
    async with FMKManager(["bash", "-c", script], log_dir=tmp_path, nproc_per_node=1) as manager:
        async with manager.logs() as lines:
            async for line in lines:
                assert line.text == "ready"
                break
        await manager.stop()
    assert "copied" in manager.workers[0].log_path.read_text()
