"""Failures of many ranks, replayed: who is named, how sure, and which words help."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from failure_cases import CORPUS, faults_of_case, read_corpus, write_as_others_do
from replayed import replay

from davincirunsdk.diagnosis.explain import explain_folder

if TYPE_CHECKING:
    from pathlib import Path

    from failure_cases import Case

CASES = read_corpus()
LAUNCHERS = ("msrun", "torchrun")
IN_WORDS_ALONE = (
    "peer-out-of-memory-others-wait",
    "one-device-held",
    "connect-timeout-one-never-came",
    "hbm-ecc",
    "set-device-invalid",
    "rank-raises-scheduler-blames-node",
    "watchdogs-after-a-type-error",
    "missing-module-alike",
    "oom-alike-different-numbers",
    "chinese-exception",
)
"""Cases whose lines tell enough without exit codes and times."""
OPEN = {line for line in (CORPUS / "open.txt").read_text().splitlines() if line and not line.startswith("#")}
"""Way and name of what is not right yet; the strict mark below makes each go from the list when it is."""


def _marked(way: str, name: str, *values: object) -> object:
    is_open = f"{way} {name}" in OPEN
    marks = [pytest.mark.xfail(strict=True, reason="in corpus/open.txt")] if is_open else []
    return pytest.param(*values, id=f"{way}-{name}", marks=marks)


def test_the_corpus_is_sound() -> None:
    """Names are unique, quotes stand in the log, words that the report must find itself do not."""
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 80
    assert not {case.name: faults for case in CASES if (faults := faults_of_case(case))}
    known = {f"{mode} {case.name}" for case in CASES for mode in case.modes}
    assert known | {f"{launcher} {name}" for launcher in LAUNCHERS for name in IN_WORDS_ALONE} >= OPEN


@pytest.mark.parametrize(
    ("case", "mode"), [_marked(mode, case.name, case, mode) for case in CASES for mode in case.modes]
)
def test_the_report_is_right(case: Case, mode: str, tmp_path: Path) -> None:
    """Verdict, ranks and words; nobody named who must not be, no hint that is false."""
    faults, text = replay(case, mode, tmp_path)
    assert not faults, text


@pytest.mark.parametrize(
    ("name", "launcher"),
    [_marked(launcher, name, name, launcher) for launcher in LAUNCHERS for name in IN_WORDS_ALONE],
)
def test_logs_of_other_launchers_name_the_same_ranks(name: str, launcher: str, tmp_path: Path) -> None:
    """From the lines alone: nobody is named who must not be."""
    case = next(case for case in CASES if case.name == name)
    write_as_others_do(case, launcher, tmp_path)
    report = explain_folder(tmp_path, lang="en")
    wanted = {int(rank) for rank in " ".join(case.wanted("ranks", "") or case.wanted("rank", "")).split()}
    assert set(report.ranks) == wanted, report.text
