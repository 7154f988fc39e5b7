"""`%%davincirun` in real kernels: the cell as a script, live, with tracebacks that point into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from processes import is_alive, wait_until
from test_notebook import panels, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(120)]

LOAD = "%load_ext davincirunsdk\nsecret = 1"


def words(cell: Any) -> str:
    """All that a cell shows as text."""
    parts = []
    for output in cell.outputs:
        parts += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
        parts += [output.get("evalue", ""), *output.get("traceback", [])]
    return "\n".join(parts)


def test_the_cell_is_the_script(tmp_path: Path) -> None:
    """Each rank runs it with its arguments, finds modules beside the notebook, and no variable of it."""
    (tmp_path / "beside.py").write_text("word = 'found it'")
    source = (
        "%%davincirun --nproc-per-node 2 --name cell -- --epochs 3\n"
        "import os, sys, beside\n"
        "print(f\"rank {os.environ['RANK']}\", beside.word, sys.argv[1:], 'secret' in globals())\n"
    )
    _, cell = run(tmp_path, LOAD, source)
    shown = words(cell)
    for rank in range(2):
        assert f"rank {rank} found it ['--epochs', '3'] False" in shown
    assert panels(cell)
    assert (tmp_path / "log/cell-3.py").read_text() == "# " + source
    assert list((tmp_path / "log").glob("cell-proc-rank-1-*.txt"))


def test_a_traceback_points_into_the_cell(tmp_path: Path) -> None:
    """Lines count as in the cell, the magic's own being the first."""
    source = "%%davincirun --nproc-per-node 2\nimport os\n\nif os.environ['RANK'] == '1':\n    1 / 0\n"
    _, cell = run(tmp_path, LOAD, source, allow_errors=True)
    shown = words(cell)
    assert "ZeroDivisionError" in shown
    (script,) = (tmp_path / "log").glob("cell-*.py")
    assert f'{script}", line 5' in shown
    assert "1 / 0" in shown
    assert "DistributedRuntimeError" in shown
    for ours in ("magic.py", "blocking.py", "background.py"):
        assert ours not in shown, "the launcher's own frames hide the error"


def test_a_syntax_error_is_told_once(tmp_path: Path) -> None:
    """With the line of the cell, before any worker would say the same."""
    source = "%%davincirun --nproc-per-node 4\nimport os\nx = = 1\n"
    _, cell = run(tmp_path, LOAD, source, allow_errors=True)
    shown = words(cell)
    assert "log/cell-3.py, line 3: SyntaxError: invalid syntax (x = = 1); nothing was started" in shown
    assert not list((tmp_path / "log").glob("*.txt"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--nproc-per-node", "not a whole number"),
        ("--nproc-per-nod 2", "No such option"),
        ("--detach", "--detach has no use in a cell"),
        ("--help", "no use in a cell"),
        ("--stop-signal TREM", "--stop-signal is"),
        ("--name 'a", "quotation"),
    ],
)
def test_wrong_words(tmp_path: Path, line: str, text: str) -> None:
    """A wrong line is told in a line, and nothing runs."""
    _, cell = run(tmp_path, LOAD, f"%%davincirun {line}\nopen('ran', 'w')\n", allow_errors=True)
    shown = words(cell)
    assert text.lower() in shown.lower()
    assert "UsageError" in shown
    assert not (tmp_path / "ran").exists()


def test_the_stop_button(tmp_path: Path) -> None:
    """An interrupt of the cell ends the workers, each by the stop signal, and the kernel goes on."""
    from jupyter_client.manager import start_new_kernel

    source = (
        "%%davincirun --nproc-per-node 2 --stop-signal INT\n"
        "import os, time\n"
        "rank = os.environ['RANK']\n"
        "open(f'part{rank}', 'w').write(str(os.getpid()))\n"
        "os.rename(f'part{rank}', f'pid{rank}')\n"
        "try: time.sleep(600)\n"
        "finally: open(f'saved{rank}', 'w').close()\n"
    )
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        client.execute(LOAD, reply=True, timeout=30)
        cell = client.execute(source)
        paths = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in paths), what="two workers")
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=30))["parent_header"].get("msg_id") != cell:
            continue
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert reply["content"]["traceback"] == ["KeyboardInterrupt: the job of this cell was stopped"]
        assert not any(is_alive(int(path.read_text())) for path in paths)
        assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
        assert client.execute("1 + 1", reply=True, timeout=30)["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
