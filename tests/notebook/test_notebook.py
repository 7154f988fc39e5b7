"""Jobs in real notebook kernels; `pytest -m notebook` where ipykernel and nbclient are installed."""

from __future__ import annotations

import os
import queue
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(120)]

IMPORTS = """
import sys, time
from davincirunsdk import *
from davincirunsdk import aio
begin = "import os, sys, time; rank = int(os.environ['RANK'])\\n"
def worker(source): return [sys.executable, "-c", begin + source]
"""
TWENTY = "for i in range(20): print(f'rank {rank} says {i}', flush=True); time.sleep(0.02)"


class Output(Protocol):
    """One output of a cell."""

    output_type: str
    text: str
    ename: str
    data: Mapping[str, str]


class Cell(Protocol):
    """One executed cell."""

    outputs: list[Output]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def run(
    folder: Path, *sources: str, allow_errors: bool = False, kernel_arguments: tuple[str, ...] = ()
) -> list[Cell]:
    """Execute a notebook of some cells, as papermill does, and return them without the imports."""
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in (IMPORTS, *sources)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        allow_errors=allow_errors,
        extra_arguments=list(kernel_arguments),
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    nbformat.validate(notebook)
    done: list[Cell] = notebook.cells[1:]
    return done


def panels(cell: Cell) -> list[Mapping[str, str]]:
    """Return the panels in a cell."""
    return [
        output.data
        for output in cell.outputs
        if "job" in getattr(output, "data", {}).get("text/plain", "")[:4]
    ]


def text_of(cell: Cell) -> str:
    """Return all that a front end without HTML shows of a cell."""
    parts = [
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
    ]
    return "\n".join(parts)


def said(text: str, rank: int) -> list[str]:
    """Return what a rank says in a text, without its mark."""
    return re.findall(rf"^\[rank {rank}\] (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("capture", [True, False])
def test_lines_are_in_the_cell_once(tmp_path: Path, capfd: pytest.CaptureFixture[str], capture: bool) -> None:
    """All lines are in the cell once, in order, with rank marks; the server's terminal gets none of them."""
    (cell,) = run(
        tmp_path,
        f"start_and_wait_distributed_train(worker({TWENTY!r}), nproc_per_node=2, output_notebook=True)",
        kernel_arguments=(f"--IPKernelApp.capture_fd_output={capture}",),
    )
    text = text_of(cell)
    for rank in (0, 1):
        assert said(text, rank) == [f"rank {rank} says {number}" for number in range(20)]
        assert text.count(f"rank {rank} says 7") == 1
    assert "says" not in "".join(capfd.readouterr())
    assert "SUCCEEDED" in panels(cell)[0]["text/plain"]
    assert "says 19" in panels(cell)[0]["text/html"]


def test_waiting_in_another_cell(tmp_path: Path) -> None:
    """The panel moves to the cell that waits, with all lines; a cell in between holds its own output only."""
    start, between, wait = run(
        tmp_path,
        f"job = start_distributed_train(worker({TWENTY!r}.replace('0.02', '0.1')), nproc_per_node=2, "
        "output_notebook=True)",
        "time.sleep(1); print('mine')",
        "wait_distributed_train(job)",
    )
    assert text_of(between) == "mine\n"
    assert "shown in the cell that waits" in text_of(start)
    assert said(text_of(start), 0) == []
    for rank in (0, 1):
        assert said(text_of(wait), rank) == [f"rank {rank} says {number}" for number in range(20)]


def test_waiting_in_the_same_cell(tmp_path: Path) -> None:
    """A cell that starts and then waits has one panel."""
    (cell,) = run(
        tmp_path,
        f"job = start_distributed_train(worker({TWENTY!r}), nproc_per_node=1, output_notebook=True)\n"
        "wait_distributed_train(job)",
    )
    assert len(panels(cell)) == 1
    assert len(said(text_of(cell), 0)) == 20


def test_awaiting_in_a_cell(tmp_path: Path) -> None:
    """The awaitable API shows the same panel in the cell that awaits it."""
    before, cell = run(
        tmp_path,
        "1",
        f"await aio.start_and_wait_distributed_train("
        f"worker({TWENTY!r}), nproc_per_node=2, output_notebook=True)",
    )
    assert text_of(before) == "1"
    assert len(panels(cell)) == 1
    for rank in (0, 1):
        assert said(text_of(cell), rank) == [f"rank {rank} says {number}" for number in range(20)]


def test_failure(tmp_path: Path) -> None:
    """A failed job's panel marks the rank and has the report; the error comes out of the call."""
    source = TWENTY + "\nif rank == 1: sys.exit('<script>out of memory</script>')\ntime.sleep(30)"
    (cell,) = run(
        tmp_path,
        f"start_and_wait_distributed_train(worker({source!r}), nproc_per_node=2, output_notebook=True)",
        allow_errors=True,
    )
    assert [output.ename for output in cell.outputs if output.output_type == "error"] == [
        "DistributedRuntimeError"
    ]
    (panel,) = panels(cell)
    assert "FAILED" in panel["text/plain"].splitlines()[0]
    assert said(panel["text/plain"], 1)[-1] == "<script>out of memory</script>"
    assert panel["text/html"].count('<tr style="background:rgba') == 1
    assert "root cause" in panel["text/html"]
    assert "<script" not in panel["text/html"]


def test_progress_bar(tmp_path: Path) -> None:
    """A bar is one line in the finished panel, in its last state."""
    source = "for i in range(1, 51): sys.stderr.write(f'\\r{i}/50'); time.sleep(0.01)"
    (cell,) = run(
        tmp_path,
        f"start_and_wait_distributed_train(worker({source!r}), nproc_per_node=2, output_notebook=True)",
    )
    assert said(text_of(cell), 0) == said(text_of(cell), 1) == ["50/50"]


def test_a_line_without_end(tmp_path: Path) -> None:
    """64 MiB without a newline are one line of the panel, which says how much it does not show."""
    source = "block = b'x' * (1 << 20)\nfor _ in range(64): sys.stdout.buffer.write(block)"
    (cell,) = run(
        tmp_path,
        f"start_and_wait_distributed_train(worker({source!r}), nproc_per_node=1, output_notebook=True)",
    )
    lines = said(panels(cell)[0]["text/plain"], 0)
    assert len(lines) <= 2, lines
    sizes = [re.search(r"([\d.]+) ([kM])B", line) for line in lines]
    assert sum(float(size[1]) * {"k": 1e3, "M": 1e6}[size[2]] for size in sizes if size) > 66.9e6
    assert len(panels(cell)[0]["text/html"]) < 200_000
    (log,) = (tmp_path / "log").glob("*-proc-rank-0-*.txt")
    assert log.stat().st_size == 64 << 20


def test_without_output_notebook(tmp_path: Path) -> None:
    """A job that is not to be shown shows nothing."""
    (cell,) = run(tmp_path, f"start_and_wait_distributed_train(worker({TWENTY!r}), nproc_per_node=2);")
    assert cell.outputs == []


class Kernel:
    """A kernel, and all that it publishes."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(cwd=str(folder))

    def execute(self, source: str) -> str:
        message: str = self._client.execute(source)
        return message

    def next(self, timeout: float) -> dict[str, dict[str, object]] | None:
        """Return the next message, None when none came in time."""
        try:
            message: dict[str, dict[str, object]] = self._client.get_iopub_msg(timeout=timeout)
        except queue.Empty:
            return None
        return message

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


def test_flood(kernel: Kernel, tmp_path: Path) -> None:
    """A flood stays below 200 messages and 1 MB per second, says what it left out, and ends with the job."""
    source = (
        "for i in range(20000): print(f'rank {rank} line {i} ' + 'x' * 40)\nopen(f'ended{rank}', 'w').close()"
    )
    cell = kernel.execute(
        f"{IMPORTS}\nstart_and_wait_distributed_train("
        f"worker({source!r}), nproc_per_node=8, output_notebook=True, env={{'PYTHONUNBUFFERED': ''}})"
    )
    messages: list[tuple[float, int]] = []
    last = ""
    while True:
        message = kernel.next(60)
        assert message is not None
        if message["parent_header"].get("msg_id") != cell:
            continue
        content = message["content"]
        assert message["header"]["msg_type"] != "error", content
        if message["header"]["msg_type"] in ("stream", "display_data", "update_display_data"):
            messages.append((time.monotonic(), len(repr(content).encode())))
        if message["header"]["msg_type"] == "update_display_data":
            data = content["data"]
            assert isinstance(data, dict)
            last = data["text/plain"]
        if content.get("execution_state") == "idle":
            break
    ended = max(os.path.getmtime(tmp_path / f"ended{rank}") for rank in range(8))
    assert time.time() - ended < 3
    for start, _ in messages:
        window = [size for moment, size in messages if start <= moment < start + 3]
        assert len(window) < 3 * 200
        assert sum(window) < 3 * 1_000_000
    notice = re.search(
        r"^\.\.\. (\d+) lines \(.* MB\) left out of the display; all is in (.*)$", last, re.MULTILINE
    )
    assert notice is not None
    shown = sum(len([line for line in said(last, rank) if " line " in line]) for rank in range(8))
    assert int(notice[1]) + shown == 8 * 20_000
    for rank in range(8):
        assert said(last, rank)[-1].startswith(f"rank {rank} line 19999 ")
        (log,) = Path(notice[2]).glob(f"*-proc-rank-{rank}-device-*.txt")
        assert log.read_bytes().count(b"\n") == 20_000


def test_job_that_runs_on_after_its_cell(kernel: Kernel) -> None:
    """When the cell has ended and no other runs, its display is still updated, to the job's end."""
    cell = kernel.execute(
        f"{IMPORTS}\njob = start_distributed_train("
        f"worker({TWENTY!r}.replace('0.02', '0.1')), nproc_per_node=2, output_notebook=True)"
    )
    shown: str | None = None
    idle = False
    while True:
        message = kernel.next(30)
        assert message is not None
        kind, content = message["header"]["msg_type"], message["content"]
        assert kind not in ("error", "stream"), content
        if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == cell:
            idle = True
        data = content.get("data")
        if not isinstance(data, dict) or not data["text/plain"].startswith("job "):
            continue
        transient = content["transient"]
        assert isinstance(transient, dict)
        shown = shown or transient["display_id"]
        assert transient["display_id"] == shown
        if "SUCCEEDED" in data["text/plain"].splitlines()[0] and len(said(data["text/plain"], 0)) == 20:
            break
    assert idle
    assert said(data["text/plain"], 1) == [f"rank 1 says {number}" for number in range(20)]
