"""A script or module that no worker could run is told of once, before anything is started."""

from __future__ import annotations

import errno
import os
import py_compile
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from davincirunsdk import FMKManager
from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.supervision.script_file import script_of

PY = sys.executable


ROOT_LIKE_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def run(folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command with two workers."""
    return subprocess.run(
        [*before, PY, "-m", "davincirunsdk", "--nproc-per-node", "2", *words],
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


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("s.py",), 126),
        ((PY, "s.py"), 126),
        (("closed/t.py",), 126),
        ((PY, "closed/t.py"), 126),
        (("closed/program",), 126),
        (("--work-dir", "closed/in", "t.py"), 126),
        (("--work-dir", "closed/in", "true"), 3),
        (("--work-dir", "closed/in", "-m", "t"), 3),
        (("--report", "closed/r.json", "true"), 3),
        (("--html", "closed/in/r.html", "true"), 3),
        (("--metrics", "closed/in/r.prom", "true"), 3),
    ],
    ids=str,
)
def test_what_may_not_be_read(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """A file that this user may not read, or a folder not entered, is an error of the start and said once."""
    (tmp_path / "s.py").touch(0)
    (tmp_path / "closed" / "in").mkdir(parents=True)
    (tmp_path / "closed" / "t.py").touch()
    (tmp_path / "closed" / "program").touch(0o755)
    (tmp_path / "closed").chmod(0)
    done = run(tmp_path, *words, before=() if os.geteuid() else ROOT_LIKE_OTHERS)
    (tmp_path / "closed").chmod(0o755)
    assert done.returncode == code, done.stderr
    assert "Permission denied" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert not list(tmp_path.glob("log/*.txt"))


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


RAN = "import os; open(os.environ['RANK'] + '.ran', 'w').close()\n"
NOT_SEEN = "open('imported', 'w').close()\n"


def make_tree(folder: Path) -> None:
    """Packages of all kinds."""
    files = {
        "train.py": RAN,
        "wrong.py": "x = = 1\n",
        "elsewhere/token.py": NOT_SEEN,
        "plain/__init__.py": "",
        "plain/train.py": RAN,
        "plain/deep/__init__.py": "",
        "plain/deep/train.py": RAN,
        "seen/__init__.py": NOT_SEEN,
        "able/__init__.py": "",
        "able/__main__.py": RAN,
        "bare/inner/train.py": RAN,
        "bare/__main__.py": RAN,
        "bare/wrong.py": "\n(\n",
        "bringing/__init__.py": "import os\n__path__.append(os.path.abspath('aside'))\n",
        "aside/brought.py": RAN,
        "elsewhere/far.py": RAN,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("-m", "nonesuch"), 127, "no module named 'nonesuch'"),
        ((PY, "-m", "nonesuch"), 127, "no module named 'nonesuch'"),
        ((PY, "-u", "-W", "ignore", "-Bmnonesuch"), 127, "no module named 'nonesuch'"),
        (("-m", "train.py"), 127, "leave out -m to run a file"),
        (("-m", "plain.deep.nonesuch"), 127, "no module named 'plain.deep.nonesuch'"),
        (("-m", "bare.inner.nonesuch"), 127, "no module named 'bare.inner.nonesuch'"),
        (("-m", "seen.nonesuch"), 127, "no module named 'seen.nonesuch'"),
        ((PY, "-I", "-m", "train"), 127, "no module named 'train'"),
        (("--work-dir", "elsewhere", "-m", "train"), 127, "/elsewhere and in the paths of"),
        (("--max-restarts", "3", "-m", "nonesuch"), 127, "no module named 'nonesuch'"),
        (("-m", "plain"), 126, "'plain' is a package without __main__"),
        (
            ("-m", "wrong"),
            126,
            "/wrong.py, line 1: SyntaxError: invalid syntax (x = = 1); nothing",
        ),
        (("-m", "bare.wrong"), 126, "bare/wrong.py, line 2: SyntaxError: '(' was never closed"),
    ],
    ids=str,
)
def test_a_module_that_cannot_run(tmp_path: Path, words: tuple[str, ...], code: int, text: str) -> None:
    """It is said once, nothing is started or written, and no line of the user's packages has run."""
    make_tree(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = run(tmp_path, *words)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1
    assert text in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "train"),
        ("-m", "plain.deep.train"),
        ("-m", "able"),
        ("-m", "able.__main__"),
        ("-m", "bare"),
        ("-m", "bare.inner.train"),
        ("-m", "bringing.brought"),
        (PY, "-Bum", "train"),
        ("--env", "PYTHONPATH={here}/elsewhere", "-m", "far"),
        ("--work-dir", "{{rank}}", "--env", "PYTHONPATH={here}/elsewhere", "-m", "far"),
        ("--work-dir", "elsewhere", "-m", "far"),
        ("--env", "PYTHONPATH={here}/packed.zip", "-m", "packed.train"),
        ("-m", "compiled.train"),
        ("{here}/other/bin/python", "-m", "only_there.train"),
        ("{here}/other/bin/python", "-m", "hooked"),
    ],
    ids=str,
)
def test_a_module_that_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Whatever Python itself finds is not refused."""
    make_tree(tmp_path)
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("packed/__init__.py", "")
        packed.writestr("packed/train.py", RAN)
    (tmp_path / "compiled").mkdir()
    py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "compiled/train.pyc"))
    if any("other" in word for word in words):
        make_other_python(tmp_path / "other")
    done = run(tmp_path, *(word.format(here=tmp_path) for word in words))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("?.ran"))) == 2


def make_other_python(folder: Path) -> None:
    """Make an environment with a package of its own, and a module that only an import hook finds."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "only_there").mkdir()
    (site / "only_there/train.py").write_text(RAN)
    (site / "aside").mkdir()
    (site / "aside/hooked.py").write_text(RAN)
    (site / "hook.py").write_text(
        "import importlib.util, os, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'hooked':\n"
        "            place = os.path.join(os.path.dirname(__file__), 'aside', 'hooked.py')\n"
        "            return importlib.util.spec_from_file_location(name, place)\n"
        "sys.meta_path.append(Finder)\n"
    )
    (site / "hook.pth").write_text("import hook\n")


async def test_the_library_looks_for_modules_too(tmp_path: Path) -> None:
    """A missing module is an error of the start, and a `FileNotFoundError` as a missing script is."""
    with pytest.raises(FileNotFoundError, match="no module named 'nonesuch'") as caught:
        async with FMKManager([PY, "-m", "nonesuch"], tmp_path, tmp_path / "log", nproc_per_node=2):
            pass
    assert isinstance(caught.value, WorkerSpawnError)
    assert not (tmp_path / "log").exists()
