"""A job that is over, explained from the logs that are left of it, whoever launched it."""

from __future__ import annotations

import json
import os
import re
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


def event(kind: str, after: float, **about: object) -> str:
    line = {"v": 1, "time": NOON + after, "kind": kind, "job": "job", "node": "a"}
    return json.dumps(line | about) + "\n"


def events_of_job(ranks: int, *, failing: int | None = None, detail: str = "") -> str:
    """The events of a job whose ranks a stop ended, or one of them by itself before."""
    lines = [event("about", 0, about={"command": "train.py"})]
    lines += [event("started", 1, rank=rank, pid=70 + rank) for rank in range(ranks)]
    lines += [event("stopping", 8, detail=detail)]
    if failing is not None:
        lines += [event("exited", 8, rank=failing, pid=70 + failing, exit_code=1)]
    lines += [
        event("exited", 9, rank=rank, pid=70 + rank, exit_code=-15)
        for rank in range(ranks)
        if rank != failing
    ]
    return "".join(lines)


@pytest.mark.parametrize("appended", [False, True], ids=["file of its own", "appended"])
@pytest.mark.parametrize(("before", "ranks", "failing"), [(8, 4, 2), (3, 2, 0), (16, 1, 0)])
def test_ranks_of_an_earlier_larger_job_do_not_count(
    tmp_path: Path, before: int, ranks: int, failing: int, appended: bool
) -> None:
    """Of a folder that two jobs of one name have used, only the ranks of the newer one are judged."""
    write_ours(tmp_path, {rank: OWN if rank in (failing, before - 1) else STEPS for rank in range(before)})
    newer = events_of_job(
        ranks, failing=failing, detail=f"rank {failing} failed; still running: rank {ranks - 1}"
    )
    older = events_of_job(before, failing=before - 1, detail=f"rank {before - 1} failed")
    (tmp_path / "job-events.jsonl").write_text(older + newer if appended else newer)
    report = explain_folder(tmp_path, lang="en")
    assert (report.verdict, report.ranks) == (Verdict.ROOT_CAUSE, (failing,))
    assert len(report.failures) == 1
    assert "still running" not in report.text
    assert len(report.stopped_ranks) == ranks - 1


@pytest.mark.parametrize("device", range(1, 8))
def test_log_of_a_rank_on_another_device_before(tmp_path: Path, device: int) -> None:
    """A rank that an earlier job of the name had on another device has its newest log only."""
    old = tmp_path / f"job-proc-rank-0-device-{device}.txt"
    old.write_text(OWN.replace("boom-42", "stale"))
    os.utime(old, (NOON, NOON))
    write_ours(tmp_path, {0: OWN, 1: STEPS})
    text = explain_folder(tmp_path, lang="en").text
    assert "boom-42" in text
    assert "stale" not in text


_REASONS = {
    "SIGTERM": ("SIGTERM", Verdict.STOPPED),
    "SIGUSR1 from pid 7": ("SIGUSR1", Verdict.STOPPED),
    "stop was asked for": ("", Verdict.STOPPED),
    "the job was cancelled": ("取消", Verdict.STOPPED),
    "the time limit of 90 s was reached": ("90 秒", Verdict.TIME_LIMIT),
    "no rank showed progress for 30 s": ("30 秒", Verdict.STALLED),
    "ranks 1, 2 still ran 5 s after rank 0 had ended well": ("rank 1, 2 仍在运行", Verdict.STALLED),
    "internal error of davincirunsdk: OSError: write failed": (
        "OSError: write failed", Verdict.INTERNAL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", _REASONS)
@pytest.mark.parametrize("lang", ["zh", "en"])
def test_reason_of_a_stop_is_told_in_one_language(tmp_path: Path, reason: str, lang: str) -> None:
    """A stop's reason is in the report's language, and nobody who has ended is said to run still."""
    write_ours(tmp_path, dict.fromkeys(range(3), STEPS))
    detail = f"{reason}; still running: rank 0, rank 1, rank 2"
    (tmp_path / "job-events.jsonl").write_text(events_of_job(3, detail=detail))
    report = explain_folder(tmp_path, lang=lang)
    chinese, verdict = _REASONS[reason]
    assert report.verdict is verdict
    assert "; still running" not in report.text
    if lang == "en":
        assert reason in " ".join(report.text.split())
        return
    assert chinese in report.text
    known = {"rank", "SIGTERM", "SIGUSR", *re.findall("[A-Za-z]+", chinese)}
    assert set(re.findall("[A-Za-z]+", report.why)) <= known


@pytest.mark.parametrize("write", [write_msrun, write_torchrun], ids=["msrun", "torchrun"])
@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: set device failed\n[ERROR] EE1001\n",
        OWN.removeprefix(STEPS),
        "RuntimeError: boom\n[ERROR] some call failed\nEE1001: The argument is invalid.\n",
    ],
    ids=["code", "traceback", "code in a line of its own"],
)
def test_output_after_an_error_hides_it_not(
    tmp_path: Path, write: Callable[[Path, dict[int, str]], None], error: str
) -> None:
    """Without known ends, ranks that wrote an error and more after it are those to look at."""
    write(tmp_path, dict.fromkeys((0, 1), STEPS + error + STEPS) | {2: STEPS})
    assert explain_folder(tmp_path, lang="en").ranks == (0, 1)
