"""What is written when a job is over: `report` and `html`, of real jobs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import DistributedRuntimeError, FMKManager, start_distributed_train
from davincirunsdk.documents import write_whole

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("job_folder")

FAILS = [sys.executable, "-c", "import os, sys; print('<script>'); sys.exit(int(os.environ['RANK']) * 3)"]
KEYS = [
    "schema", "verdict", "ranks", "why", "text", "exit_code", "failures", "stopped_ranks", "attempt",
]  # fmt: skip


async def run(command: list[str], **options: object) -> DistributedRuntimeError | None:
    """Run a job of two workers; return its error."""
    async with FMKManager(command, nproc_per_node=2, grace_period=3.0, **options) as manager:  # type: ignore[arg-type] # any option
        try:
            await manager.wait()
        except DistributedRuntimeError as error:
            return error
    return None


async def test_the_report_of_a_failure_is_that_of_its_error(tmp_path: Path) -> None:
    """File, exception and the last event carry the same report."""
    error = await run(FAILS, report=tmp_path / "deep" / "report.json", name="job")
    assert error is not None
    written = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert written == json.loads(error.report.to_json())
    assert list(written) == KEYS
    assert (written["verdict"], written["ranks"], written["exit_code"]) == ("root_cause", [1], 3)
    (*_, last) = (tmp_path / "log" / "job-events.jsonl").read_text().splitlines()
    assert json.loads(last)["report"] == written


async def test_a_good_job_has_a_report_too(tmp_path: Path) -> None:
    """A program that reads the report need not guess from its absence."""
    assert await run([sys.executable, "-c", ""], report=tmp_path / "report.json") is None
    written = json.loads((tmp_path / "report.json").read_text())
    assert list(written) == KEYS
    assert (written["verdict"], written["exit_code"], written["failures"]) == ("succeeded", 0, [])


async def test_the_page_of_a_failure(tmp_path: Path) -> None:
    """The run report names the culprit, and what a worker printed is text in it."""
    await run(FAILS, html=tmp_path / "run.html", name="job")
    page = (tmp_path / "run.html").read_text()
    assert "failed, exit code 3" in page
    assert "<script" not in page
    assert 'href="' in page


async def test_the_page_of_a_running_job() -> None:
    """It can be drawn at any time, and says that the job runs."""
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    manager = FMKManager(wait, nproc_per_node=1)
    with pytest.raises(RuntimeError, match="never started"):
        await manager.report_html()
    async with manager:
        assert "running, or its launcher was lost" in await manager.report_html()


async def test_a_report_that_cannot_be_written_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job ends as it would; the reason is said."""
    (tmp_path / "folder").mkdir()
    # A folder that goes while the job runs: one that is not there at the start is an error then.
    source = "import os, sys; r = int(os.environ['RANK']); r and (os.rmdir('folder'), open('folder', 'w')); "
    command = [sys.executable, "-c", source + "sys.exit(r * 3)"]
    error = await run(command, report=tmp_path / "folder" / "report.json")
    assert error is not None
    assert error.exit_code == 3
    assert "report.json cannot be written" in caplog.text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses leaves the file of before, and nothing beside it."""
    target = tmp_path / "report.json"
    write_whole(target, "before")

    def refuse(self: Path, other: Path) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(OSError, match="full"):
        write_whole(target, "after")
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_page_in_code_without_a_loop() -> None:
    """A script gets the page itself, while the job runs and when it is over."""
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    manager = start_distributed_train(wait, nproc_per_node=1, echo="none")
    assert "<title>" in str(manager.report_html())
    manager.stop()
    assert "<title>" in str(manager.report_html())
