"""`davincirun --explain`: the report about a job that is over."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from ranks_told import LOST_PEER, OWN

if TYPE_CHECKING:
    from pathlib import Path


def explain(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    return subprocess.run(
        [sys.executable, "-m", "davincirunsdk", *words],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for rank, text in {0: LOST_PEER, 1: OWN}.items():
        (tmp_path / f"worker_{rank}.log").write_text(text)
    return tmp_path


def test_report_of_a_folder_without_a_command(logs: Path) -> None:
    """The report goes to standard output, in plain text, and the exit code is 0."""
    done = explain("--explain", str(logs))
    assert done.returncode == 0, done.stderr
    assert "rank 1 is the root cause" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_report_of_one_file(logs: Path) -> None:
    """One log file is enough."""
    assert "ValueError: boom-42" in explain("--explain", str(logs / "worker_1.log")).stdout


@pytest.mark.parametrize("words", [("--lang", "zh", "--explain"), ("--explain",)])
def test_language(logs: Path, words: tuple[str, ...]) -> None:
    """The option or the locale chooses the language, wherever the option stands."""
    done = explain(*words, str(logs), LANG="zh_CN.UTF-8", PYTHONIOENCODING="utf-8")
    assert "rank 1 是根因" in done.stdout
    english = explain("--explain", str(logs), "--lang", "en", LANG="zh_CN.UTF-8")
    assert "rank 1 is the root cause" in english.stdout


def test_nothing_to_explain(tmp_path: Path) -> None:
    """A folder without logs is an error that says what was expected; a missing one is a usage error."""
    empty = explain("--explain", str(tmp_path))
    assert empty.returncode == 3
    assert "expected files such as" in empty.stderr
    assert explain("--explain", str(tmp_path / "gone")).returncode == 2
