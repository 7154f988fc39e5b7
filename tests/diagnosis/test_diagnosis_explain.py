"""A job that is over, explained from the logs that are left of it, whoever launched it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from ranks_told import LOST_PEER, NOON, OWN, STEPS, TIMED_OUT

from davincirunsdk.diagnosis.explain import explain_folder
from davincirunsdk.types import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write_ours(folder: Path, logs: dict[int, str]) -> None:
    for rank, text in logs.items():
        (folder / f"job-proc-rank-{rank}-device-{rank}.txt").write_text(text)


def write_torchrun(folder: Path, logs: dict[int, str]) -> None:
    for attempt in (0, 1):
        for rank, text in logs.items():
            place = folder / "none_abc" / f"attempt_{attempt}" / str(rank)
            place.mkdir(parents=True)
            (place / "stdout.log").write_text(STEPS)
            (place / "stderr.log").write_text(text if attempt else STEPS)


def write_msrun(folder: Path, logs: dict[int, str]) -> None:
    (folder / "scheduler.log").write_text("[WARNING] scheduler waits\n")
    for rank, text in logs.items():
        (folder / f"worker_{rank}.log").write_text(text)


def write_numbered(folder: Path, logs: dict[int, str]) -> None:
    for rank, text in logs.items():
        (folder / f"train-rank{rank}.log").write_text(text)


def write_combined(prefix: str) -> Callable[[Path, dict[int, str]], None]:
    def write(folder: Path, logs: dict[int, str]) -> None:
        rows = [
            prefix.format(r=rank) + line
            for rank, text in sorted(logs.items(), reverse=True)
            for line in text.splitlines()
        ]
        (folder / "out.log").write_text("\n".join(["started", *rows]) + "\n")

    return write


@pytest.mark.parametrize(
    "write",
    [
        write_ours,
        write_torchrun,
        write_msrun,
        write_numbered,
        write_combined("[rank{r}]: "),
        write_combined("[default{r}]:"),
        write_combined("[trainer+{r}]: "),
        write_combined("{r}: "),
        write_combined("[1,{r}]<stderr>:"),
        write_combined("\x1b[36m(Worker pid=77, rank={r})\x1b[0m "),
        write_combined("2025-03-04T12:00:00.1Z [rank{r}]: "),
    ],
    ids=[
        "ours",
        "torchrun",
        "msrun",
        "numbered",
        "rank",
        "default",
        "role",
        "srun",
        "mpirun",
        "ray",
        "kubectl",
    ],
)
def test_layouts_of_all_launchers(tmp_path: Path, write: Callable[[Path, dict[int, str]], None]) -> None:
    """The same failure is found in whatever layout the logs are left."""
    write(tmp_path, {0: LOST_PEER, 1: OWN, 2: TIMED_OUT})
    report = explain_folder(tmp_path, lang="en")
    assert report.verdict is Verdict.ROOT_CAUSE
    assert report.ranks == (1,)
    assert "ValueError: boom-42" in report.text
    assert "[rank" not in report.text.split("log:")[0].replace(str(tmp_path), "")


def test_one_log_file_alone(tmp_path: Path) -> None:
    """A bare log file is one rank's; carriage returns of a progress bar hide nothing."""
    file = tmp_path / "x.log"
    file.write_text("10%|#  |\r50%|## |\r" + OWN.replace("\n", "\r\n"))
    report = explain_folder(file, lang="en")
    assert report.ranks == (0,)
    assert "ValueError: boom-42" in report.text.splitlines()[-1]


def test_error_files_of_torch(tmp_path: Path) -> None:
    """What `@record` wrote counts where the logs hold nothing."""
    for rank in (0, 1):
        place = tmp_path / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        (place / "stderr.log").write_text(LOST_PEER if rank else STEPS)
    extra = {"py_callstack": OWN.removeprefix(STEPS), "timestamp": str(int(NOON))}
    content = {"message": {"message": "ValueError: boom-42", "extraInfo": extra}}
    (tmp_path / "attempt_0" / "0" / "error.json").write_text(json.dumps(content))
    assert explain_folder(tmp_path).ranks == (0,)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 3}', '{"message": {"extraInfo": []}}'])
def test_broken_error_files_break_nothing(tmp_path: Path, content: str) -> None:
    """An error file that makes no sense is as good as none."""
    write_torchrun(tmp_path, {0: LOST_PEER, 1: OWN})
    (tmp_path / "none_abc" / "attempt_1" / "0" / "error.json").write_text(content)
    assert explain_folder(tmp_path).ranks == (1,)


def test_events_of_a_killed_launcher(tmp_path: Path) -> None:
    """An events file that stops in a line is read as far as it goes."""
    write_ours(tmp_path, {0: STEPS, 1: OWN})
    lines = [
        json.dumps({"v": 1, "time": NOON, "kind": "started", "job": "job", "node": "a", "rank": 1, "pid": 7}),
        json.dumps(
            {"v": 1, "time": NOON + 9, "kind": "exited", "job": "job", "node": "a", "rank": 1, "exit_code": 3}
        ),
        '{"v": 1, "time": 17',
    ]
    (tmp_path / "job-events.jsonl").write_text("\n".join(lines))
    report = explain_folder(tmp_path)
    assert (report.ranks, report.exit_code) == ((1,), 3)


def test_nothing_to_explain(tmp_path: Path) -> None:
    """A folder without logs and a missing path are errors that say what was expected."""
    with pytest.raises(FileNotFoundError, match="as job-proc-rank-0"):
        explain_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected the log folder"):
        explain_folder(tmp_path / "not-there")


def test_language_of_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Chinese locale gives a Chinese report, and so does the argument."""
    write_ours(tmp_path, {0: OWN})
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert "根因" in explain_folder(tmp_path).text
    assert "根因" not in explain_folder(tmp_path, lang="en").text
    monkeypatch.setenv("LANG", "C")
    assert "根因" not in explain_folder(tmp_path).text
    assert "根因" in explain_folder(tmp_path, lang="zh").text
