"""Runs that are kept: how many, which ones, and the link to the latest."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk import FMKManager
from davincirunsdk.logs.file import LogFile
from davincirunsdk.logs.kept import keep_newest, numbers_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("job_folder")


async def run(folder: Path, word: str, **options: object) -> None:
    """Run a job of two ranks that print a word."""
    words = [sys.executable, "-S", "-c", f"print({word!r})"]
    manager = FMKManager(words, log_dir=folder, nproc_per_node=2, name="job", **options)  # type: ignore[arg-type]
    async with manager:
        await manager.wait()


def texts(folder: Path) -> set[str]:
    """Read what rank 1 of all runs has printed."""
    return {path.read_text().strip() for path in folder.glob("job-proc-rank-1-*.txt")}


async def test_the_newest_runs_are_kept(tmp_path: Path) -> None:
    """The oldest go, of all files alike; other jobs' files and the user's own stay, and so does the order."""
    others = ["job-a-proc-rank-1-device-1.1.txt", "job-events.2.txt", "notes.1.txt", "job.1.jsonl"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for number in range(4):
        await run(tmp_path, f"run {number}")
    assert texts(tmp_path) == {"run 0", "run 1", "run 2", "run 3"}
    await run(tmp_path, "run 4", keep_logs=3)
    assert texts(tmp_path) == {"run 2", "run 3", "run 4"}
    await run(tmp_path, "run 5", keep_logs=3)
    await run(tmp_path, "run 6")
    assert texts(tmp_path) == {"run 3", "run 4", "run 5", "run 6"}
    await run(tmp_path, "run 7", keep_logs=1)
    assert texts(tmp_path) == {"run 7"}
    assert len(list(tmp_path.glob("job-events*.jsonl"))) == 1
    assert all((tmp_path / name).read_text() == "mine" for name in others)


@given(st.sets(st.integers(1, 40), max_size=12), st.integers(1, 15))
def test_any_numbers_may_be_gone(tmp_path_factory: pytest.TempPathFactory, kept: set[int], most: int) -> None:
    """Whatever was removed by hand: nothing is overwritten, and with the first gone the order holds."""
    folder = tmp_path_factory.mktemp("kept")
    for number in kept:
        (folder / f"log.{number}.txt").write_text(str(number))
    (folder / "log.txt").write_text("before")
    LogFile(folder / "log.txt", pytest.fail).close()
    (new,) = set(numbers_of(folder / "log.txt")) - kept
    assert (folder / f"log.{new}.txt").read_text() == "before"
    if 1 not in kept:
        assert new == max(kept, default=0) + 1
    keep_newest([folder / "log.txt"], most)
    expected = sorted([*kept, new])
    assert numbers_of(folder / "log.txt") == (expected[-(most - 1) :] if most > 1 else [])


@pytest.mark.parametrize("count", [50, 51])
async def test_a_word_about_many(tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int) -> None:
    """More than 50 kept runs are worth a line that names the option, and no more than one."""
    for number in range(1, count):
        (tmp_path / f"job-events.{number}.jsonl").touch()
    (tmp_path / "job-events.jsonl").write_text("{}\n")
    with caplog.at_level(logging.WARNING):
        await run(tmp_path, "here")
        said = [one for one in caplog.messages if "keep_logs" in one]
        assert len(said) == (count > 50)
        if said:
            assert re.search(r"keeps 51 earlier runs .*--keep-logs", said[0])
        caplog.clear()
        await run(tmp_path, "here", keep_logs=50)
        assert not any("keep_logs" in one for one in caplog.messages)


async def test_the_latest(tmp_path: Path) -> None:
    """The link shows the newest run's first log, by a relative path; a file of that name stays."""
    latest = tmp_path / "latest"
    for word in ("first", "second"):
        await run(tmp_path, word)
        assert latest.read_text() == f"{word}\n"
    assert os.readlink(latest) == "job-proc-rank-0-device-0.txt"
    latest.unlink()
    latest.write_text("mine")
    await run(tmp_path, "third")
    assert latest.read_text() == "mine"
    assert not list(tmp_path.glob(".latest*"))
