"""Evidence beyond the log: what is added when it is there, and that its lack or trouble costs nothing."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from ranks_told import OWN, STEPS, told

from davincirunsdk.diagnosis import surroundings
from davincirunsdk.diagnosis.evidence import Evidence
from davincirunsdk.diagnosis.judge import judge
from davincirunsdk.diagnosis.surroundings import look_around
from davincirunsdk.host import memory

if TYPE_CHECKING:
    from pathlib import Path

PLOG = (
    "[INFO] HCCL(4001,python):2025-03-04-12:00:00.1 [a.cc:1] fine\n"
    "[ERROR] HCCL(4001,python):2025-03-04-12:00:01.1 [a.cc:7] [InitGroupStage][EnvConfig]first\n"
    "[ERROR] HCCL(4001,python):2025-03-04-12:00:02.1 [a.cc:8] second\n"
    "[ERROR] HCCL(4001,python):2025-03-04-12:00:03.1 [a.cc:9] third\n"
)


def evidence(folder: Path, text: str = OWN, code: int = 1) -> Evidence:
    log = folder / "job-proc-rank-1-device-1.txt"
    log.write_text(text)
    return Evidence(job_id="job", log_dir=folder, ranks=(replace(told(1, text, code), log_path=log),))


def test_plog_of_the_failing_rank(tmp_path: Path) -> None:
    """Its first lines at error level and its path are in the report."""
    folder = tmp_path / "plog" / "debug" / "plog"
    folder.mkdir(parents=True)
    (folder / "plog-4001_20250304120000.log").write_text(PLOG)
    (folder / "plog-4002_20250304120000.log").write_text(PLOG.replace("first", "another"))
    text = judge(look_around(evidence(tmp_path), plog_roots={1: tmp_path / "plog"})).text
    joined = " ".join(text.split())
    assert "[InitGroupStage][EnvConfig]first" in joined
    assert "second" in joined
    assert "third" not in joined
    assert "another" not in joined
    assert f"plog:         {folder}/plog-4001_20250304120000.log\n" in text


def test_nothing_there_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of it the evidence stays as it was."""
    monkeypatch.setenv("HOME", str(tmp_path))
    before = evidence(tmp_path)
    assert look_around(before, plog_roots={1: tmp_path / "gone"}) == before


def test_a_look_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose reading never returns holds the report for the patience of a look, not longer."""
    monkeypatch.setattr(surroundings, "PATIENCE", 0.6)
    folder = tmp_path / "plog" / "debug" / "plog"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "plog-4001_1.log")
    before = evidence(tmp_path)
    began = time.monotonic()
    assert look_around(before, plog_roots={1: tmp_path / "plog"}) == before
    assert time.monotonic() - began < 10
    # Let the thread that hangs go.
    os.close(os.open(folder / "plog-4001_1.log", os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize(
    ("groups", "name", "content"),
    [
        ("0::/job\n", "job/memory.events", "low 0\noom 3\noom_kill 2\n"),
        (
            "4:memory:/job\n0::/\n",
            "memory/job/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        ),
        ("0::/elsewhere\n", "memory.events", "oom_kill 2\n"),
    ],
    ids=["v2", "v1", "container"],
)
def test_kills_for_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, name: str, content: str
) -> None:
    """The counter of either kind of cgroup is read; a rise during the job is said."""
    tree = tmp_path / "cgroup"
    (tree / name).parent.mkdir(parents=True)
    (tree / name).write_text(content)
    (tmp_path / "self").write_text(groups)
    monkeypatch.setattr(memory, "_CGROUPS", tree)
    monkeypatch.setattr(memory, "_OWN", tmp_path / "self")
    assert memory.memory_kills() == 2
    killed = evidence(tmp_path, STEPS, -9)
    assert "killed 1 process during the job" in " ".join(
        judge(look_around(killed, kills_before=1)).text.split()
    )
    assert "no kill for memory" in " ".join(judge(look_around(killed, kills_before=2)).text.split())
