"""A script that no worker could run is told of once, before anything is started."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from davincirunsdk import FMKManager
from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.supervision.script_file import script_of

PY = sys.executable


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with two workers."""
    return subprocess.run(
        [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [("bad.py",), (PY, "bad.py"), (PY, "-u", "-W", "ignore", "bad.py", "-c")])
def test_a_syntax_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The error is said once with file, line and text; no worker is started, no log is made."""
    (tmp_path / "bad.py").write_text("import os\n\nx = = 1\n")
    done = run(tmp_path, *words)
    assert done.returncode == 126, done.stderr
    assert done.stderr.count("SyntaxError") == 1
    assert (
        f"{tmp_path}/bad.py, line 3: SyntaxError: invalid syntax (x = = 1); nothing was started"
        in done.stderr
    )
    assert not (tmp_path / "log").exists()


def test_a_script_with_odd_escapes_stays_quiet(tmp_path: Path) -> None:
    """What is only a warning of Python's is not ours to say."""
    (tmp_path / "fine.py").write_text("# coding: latin-1\nx = '\\d'\n")
    done = run(tmp_path, "fine.py")
    assert done.returncode == 0
    assert not [line for line in done.stderr.splitlines() if "Warning" in line]


@pytest.mark.parametrize("words", [("no.py",), (PY, "no.py"), ("python3", "-O", "no.py")])
def test_a_script_that_is_not_there(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A missing script is said once."""
    done = run(tmp_path, *words)
    assert done.returncode == 127, done.stderr
    assert done.stderr.count("No such file") == 1
    assert str(tmp_path / "no.py") in done.stderr


async def test_the_library_says_so_too(tmp_path: Path) -> None:
    """A missing or unreadable script is an error of the start, with the number for it."""
    with pytest.raises(WorkerSpawnError, match=r"open file .no\.py.") as caught:
        async with FMKManager([PY, "no.py"], tmp_path, tmp_path / "log", nproc_per_node=2):
            pass
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "log").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    """A script without read permission is an error of the start."""
    script = tmp_path / "s.py"
    script.write_text("")
    script.chmod(0)
    with pytest.raises(WorkerSpawnError, match="Permission denied"):
        async with FMKManager([PY, "s.py"], tmp_path, tmp_path / "log", nproc_per_node=2):
            pass


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "a.py"], "a.py"),
        (["/x/python3.11", "-u", "a.py", "-c"], "a.py"),
        (["python", "-X", "dev", "a.py"], "a.py"),
        (["python", "-m", "a.py"], None),
        (["python", "-c", "a.py"], None),
        (["python", "-uc", "a.py"], None),
        (["python", "-"], None),
        (["python"], None),
        (["bash", "a.py"], None),
    ],
)
def test_which_script(command: list[str], script: str | None) -> None:
    """The script is the first word that is not an option of Python's."""
    assert script_of(command, Path("/w")) == (Path("/w") / script if script else None)
