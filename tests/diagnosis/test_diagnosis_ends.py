"""Real failures of real processes, as they happen on any Linux machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

import davincirunsdk
from davincirunsdk import DistributedRuntimeError, FMKManager
from davincirunsdk.types import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.types import FailureReport

WAIT = "import time\nfor step in range(6000): print('step', step, flush=True); time.sleep(0.1)\n"


async def fail(folder: Path, culprit: str, rank: int = 1) -> FailureReport:
    """Three ranks, one of which runs the culprit's code."""
    (folder / "train.py").write_text(
        f"import os\nif os.environ['RANK'] == '{rank}':\n"
        + "".join(f"    {line}\n" for line in culprit.splitlines())
        + WAIT
    )
    with pytest.raises(DistributedRuntimeError) as caught:
        async with FMKManager(
            [sys.executable, "train.py"], work_dir=folder, log_dir=folder / "log", nproc_per_node=3, lang="en"
        ) as manager:
            await manager.wait()
    return caught.value.report


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", -11, ["SIGSEGV", "Fatal Python error: Segmentation fault"]),
        ("os.abort()", -6, ["SIGABRT", "Fatal Python error: Aborted"]),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ["SIGKILL", "did not send"]),
        ("import missing_module_xyz", 1, ["No module named 'missing_module_xyz'", "install it"]),
        ("open('/not/there')", 1, ["No such file or directory: '/not/there'", "check the path"]),
        ("import sys; sys.exit('reason: the licence is over')", 1, ["reason: the licence is over"]),
        (
            "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30)); b = bytearray(1 << 31)",
            1,
            ["MemoryError", "ran out of memory"],
        ),
        (
            "import argparse; p = argparse.ArgumentParser(prog='train.py'); p.parse_args(['--local-rank=1'])",
            2,
            ["unrecognized arguments: --local-rank=1", "LOCAL_RANK"],
        ),
    ],
    ids=["segfault", "abort", "sigkill", "import", "file", "exit", "memory", "argument"],
)
async def test_causes_are_named_with_words_that_help(
    tmp_path: Path, code: str, exit_code: int, words: list[str]
) -> None:
    """The rank is named as the root cause, with what happened and what to do."""
    report = await fail(tmp_path, code)
    assert report.verdict is Verdict.ROOT_CAUSE
    assert report.ranks == (1,)
    assert report.root_cause.exit_code == exit_code
    assert report.stopped_ranks == (0, 2)
    joined = " ".join(report.text.split())
    for text in words:
        assert text in joined, report.text


async def test_error_of_a_flood_is_found(tmp_path: Path) -> None:
    """An exception before a megabyte of later noise is still the cause: more of the log is looked at."""
    code = (
        "import sys, traceback\n"
        "try: raise ValueError('boom-42')\n"
        "except ValueError: traceback.print_exc()\n"
        "for n in range(4000): print('teardown of part', 'x' * 100, n)\n"
        "sys.exit(5)"
    )
    report = await fail(tmp_path, code)
    assert report.exit_code == 5
    assert "ValueError: boom-42" in report.text


async def test_record_hands_the_exception_over(tmp_path: Path) -> None:
    """What `davincirunsdk.record` writes is in the report though the log is closed; no frame of ours."""
    code = (
        "import davincirunsdk\n"
        "@davincirunsdk.record\n"
        "def main():\n"
        "    os.dup2(os.open('/dev/null', os.O_WRONLY), 2)\n"
        "    raise KeyError('lr')\n"
        "main()"
    )
    report = await fail(tmp_path, code)
    assert "KeyError: 'lr'" in report.text
    assert "davincirunsdk/script" not in report.text


def test_record_outside_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher nothing is written; with a folder that is gone the exception still comes through."""

    @davincirunsdk.record
    def main(value: int) -> int:
        if value:
            raise KeyError("lr")
        return 7

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert main(0) == 7
    with pytest.raises(KeyError):
        main(1)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "x.json"))
    with pytest.raises(KeyError):
        main(1)
    file = tmp_path / "x.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(KeyError):
        main(1)
    assert json.loads(file.read_text())["message"]["message"] == "KeyError: 'lr'"
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


async def test_killed_alike_from_outside(tmp_path: Path) -> None:
    """Who kills all ranks at once stands outside the job, and no rank is blamed."""
    (tmp_path / "train.py").write_text(WAIT)
    manager = FMKManager(
        [sys.executable, "train.py"], work_dir=tmp_path, log_dir=tmp_path / "log", nproc_per_node=3
    )
    async with manager:
        pids = [worker.pid for worker in manager.workers if worker.pid is not None]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        with pytest.raises(DistributedRuntimeError) as caught:
            await manager.wait()
    report = caught.value.report
    assert report.verdict is Verdict.STOPPED
    assert caught.value.root_cause.rank == -1
    assert report.ranks == ()
