"""The stop button, the restart of a kernel and its end: nothing of a job outlives them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import is_alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(120)]

WORKER = """
import os, signal, sys, time
if {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"pid{{os.environ['RANK']}}.part", "w") as file: file.write(str(os.getpid()))
os.rename(f"pid{{os.environ['RANK']}}.part", f"pid{{os.environ['RANK']}}")
time.sleep(600)
"""
CELL = """
import sys
from davincirunsdk import *
start_and_wait_distributed_train([sys.executable, "worker.py"], nproc_per_node=4, grace_period={grace})
"""


class Kernel:
    """A kernel that runs a job of four sleeping workers in a cell."""

    def __init__(self, folder: Path, *, deaf: bool, grace: float) -> None:
        from jupyter_client.manager import start_new_kernel

        self.folder = folder
        (folder / "worker.py").write_text(WORKER.format(deaf=deaf))
        self.manager, self.client = start_new_kernel(cwd=str(folder))
        self.cell = self.client.execute(CELL.format(grace=grace))
        paths = [folder / f"pid{rank}" for rank in range(4)]
        wait_until(lambda: all(path.exists() for path in paths), what="four workers")
        self.pids = [int(path.read_text()) for path in paths]

    def reply(self, cell: str) -> dict[str, Any]:
        """Wait for a cell's end."""
        while True:
            message = self.client.get_shell_msg(timeout=30)
            if message["parent_header"].get("msg_id") == cell:
                content: dict[str, Any] = message["content"]
                return content

    def living(self) -> list[int]:
        return [pid for pid in self.pids if is_alive(pid)]

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kernel]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    made = Kernel(tmp_path, **getattr(request, "param", {"deaf": False, "grace": 15}))
    yield made
    made.close()


def test_the_stop_button_ends_the_job(kernel: Kernel) -> None:
    """An interrupt shows KeyboardInterrupt in the cell, ends all workers, and the next cell runs at once."""
    kernel.manager.interrupt_kernel()
    assert kernel.reply(kernel.cell)["ename"] == "KeyboardInterrupt"
    assert kernel.living() == []
    assert kernel.reply(kernel.client.execute("1 + 1"))["status"] == "ok"


@pytest.mark.parametrize("kernel", [{"deaf": True, "grace": 600}], indirect=True)
def test_an_impatient_second_press_kills_at_once(kernel: Kernel) -> None:
    """Two interrupts do not wait for the grace period of workers that are deaf."""
    began = time.monotonic()
    kernel.manager.interrupt_kernel()
    log = next((kernel.folder / "log").glob("*-events.jsonl"))
    wait_until(lambda: "stopping" in log.read_text(), what="the stop has begun")
    # Wrappers deliver one wish twice: a further press counts one second after the first.
    wait_until(lambda: time.monotonic() > began + 1.5, what="the moment from which a press counts")
    kernel.manager.interrupt_kernel()
    assert kernel.reply(kernel.cell)["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - began < 30
    assert kernel.living() == []


@pytest.mark.parametrize(
    ("kernel", "end"),
    [
        ({"deaf": True, "grace": 600}, "restart"),
        ({"deaf": True, "grace": 600}, "shutdown"),
        # A kernel that is killed cannot hurry anybody: its workers keep their grace period.
        ({"deaf": True, "grace": 2}, "restart now"),
        ({"deaf": True, "grace": 2}, "shutdown now"),
    ],
    indirect=["kernel"],
)
def test_the_end_of_the_kernel_ends_the_job(kernel: Kernel, end: str) -> None:
    """Restart and shutdown of the kernel leave no worker, not even deaf ones."""
    if end.startswith("restart"):
        kernel.manager.restart_kernel(now=end.endswith("now"))
    else:
        kernel.manager.shutdown_kernel(now=end.endswith("now"))
    wait_until(lambda: not kernel.living(), timeout=10, what="no worker left")
