"""The command of `on_end`, and the metrics file: real jobs, hooks that hang, fail, flood."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from processes import is_alive, wait_until

from davincirunsdk import DistributedRuntimeError, FMKManager
from davincirunsdk.supervision.hook import call_hook, run_hook

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk import RunResult

PY = sys.executable
pytestmark = pytest.mark.usefixtures("job_folder")


def hook(source: str, patience: float = 20.0) -> str:
    """Run a hook of a line of Python."""
    return run_hook([PY, "-c", source], {"DAVINCIRUN_VERDICT": "x"}, patience)


@pytest.mark.parametrize("code", [0, 3])
async def test_the_command_hears_how_the_job_ended(code: int, tmp_path: Path) -> None:
    """It runs once, with verdict, exit code and a report; its own failure changes nothing."""
    script = tmp_path / "hook.py"
    script.write_text(
        "import json, os, sys\n"
        "report = json.load(open(os.environ['DAVINCIRUN_REPORT']))\n"
        "said = [os.environ['DAVINCIRUN_VERDICT'], os.environ['DAVINCIRUN_EXIT_CODE'], report['verdict']]\n"
        "open('said', 'a').write(json.dumps(said + sys.argv[1:]) + '\\n')\n"
        "sys.exit(9)\n"
    )
    command = [PY, "-c", f"import sys; sys.exit({code})"]
    async with FMKManager(command, nproc_per_node=2, on_end=f"{PY} {script} 'two words' '$HOME'") as manager:
        if code:
            with pytest.raises(DistributedRuntimeError):
                await manager.wait()
        else:
            await manager.wait()
    (line,) = (tmp_path / "said").read_text().splitlines()
    verdict, exit_code, of_report, *words = json.loads(line)
    assert verdict == of_report
    assert (verdict == "succeeded") is (code == 0)
    assert (exit_code, words) == (str(code), ["two words", "$HOME"])


def test_one_that_fails_is_quoted() -> None:
    """Exit code and last words are told."""
    assert hook("import sys; sys.exit('no such list')").endswith("ended with 1: no such list")
    assert "cannot be started" in run_hook(["/no/such/hook"], {})
    assert hook("pass") == ""


def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """After its time nothing of its session is left."""
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    assert "did not end within 1 s" in hook(source, patience=1.0)
    if (tmp_path / "pid").exists():
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not is_alive(pid), what="the hook's child is gone")


def test_one_that_floods_takes_no_memory() -> None:
    """Output beyond a bound is refused; the command gets no further than its time."""
    source = (
        "import os\n"
        "for _ in range(100000):\n"
        "    try: os.write(2, b'x' * 65536)\n"
        "    except OSError: os.write(1, b'y'); raise SystemExit(5)\n"
    )
    why = hook(source)
    assert "ended with 5" in why
    assert len(why) < 3000


def test_one_that_floods_with_lines_is_quoted_in_few() -> None:
    """A launcher's own words are not to be lost among a hook's."""
    why = hook("import sys\nfor number in range(900): print(number, file=sys.stderr)\nsys.exit(5)")
    assert why.endswith("ended with 5: 895\n896\n897\n898\n899")


async def test_a_function_in_python(caplog: pytest.LogCaptureFixture) -> None:
    """It gets the result once; what it raises is logged and changes nothing."""
    got: list[RunResult] = []

    def note(result: RunResult) -> None:
        got.append(result)
        raise SystemExit("no mail today")

    async with FMKManager([PY, "-c", "pass"], nproc_per_node=2, on_end=note) as manager:
        result = await manager.wait()
    assert got == [result]
    assert "note raised SystemExit: no mail today" in caplog.text


def test_a_function_that_hangs_is_left() -> None:
    """It is waited for as long as a command is."""
    never = threading.Event()
    assert "did not end within 0.5 s" in call_hook(lambda _: never.wait(), None, 0.5)
    never.set()


@pytest.mark.parametrize("wrong", [asyncio.sleep, 3, ["mail"]])
def test_what_is_neither_command_nor_function(wrong: Any) -> None:
    """The error says what may be given."""
    with pytest.raises(TypeError, match="plain function that takes a RunResult"):
        FMKManager([PY, "-c", "pass"], nproc_per_node=2, on_end=wrong)


async def test_the_first_metrics_are_of_workers_that_run(tmp_path: Path) -> None:
    """What is written first stays for ten seconds: it must not be the state before the start."""
    file = tmp_path / "job.prom"
    source = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.02)"
    async with FMKManager([PY, "-c", source], nproc_per_node=2, metrics=file, name="m") as manager:
        async for event in manager.events():
            if event.kind == "started":
                break
        while not file.exists():
            await asyncio.sleep(0.02)
        text = file.read_text()
        (tmp_path / "end").touch()
        await manager.wait()
    assert 'davincirun_state{job="m",state="running"} 1' in text
    assert 'davincirun_ranks_alive{job="m"} 2' in text


async def test_metrics_of_a_job(tmp_path: Path) -> None:
    """The file is there while the job runs, is replaced whole, and ends as the job did."""
    source = (
        "import davincirunsdk, os, time\n"
        "davincirunsdk.progress(7, 10, loss=0.5)\n"
        "print('hello', flush=True)\n"
        "while not os.path.exists('end'): time.sleep(0.02)\n"
    )
    file = tmp_path / "job.prom"
    async with FMKManager([PY, "-c", source], nproc_per_node=2, metrics=file, name='a"b') as manager:
        async for event in manager.events():
            if event.kind == "progress":
                break
        wait_until(file.exists, what="the metrics file")
        assert file.read_text().endswith("# EOF\n")
        (tmp_path / "end").touch()
        await manager.wait()
    text = file.read_text()
    assert 'davincirun_state{job="a\\"b",state="succeeded"} 1' in text
    assert 'davincirun_step{job="a\\"b",rank="1"} 7' in text
    sample = re.compile(r'davincirun_[a-z_]+\{[a-z]+="([^"\\]|\\.)*"(,[a-z]+="\w+")?\} \S+')
    assert not [
        line for line in text.splitlines() if not line.startswith("# ") and not sample.fullmatch(line)
    ]
