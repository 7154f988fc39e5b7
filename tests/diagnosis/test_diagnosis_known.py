"""What exit codes and known Ascend errors mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk.diagnosis.exits import explain_exit
from davincirunsdk.diagnosis.findings import best_known
from davincirunsdk.diagnosis.knowledge import CODES, FRAGMENTS, Role


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (0, "exit code 0"),
        (1, "exit code 1: usually an uncaught Python exception"),
        (3, "exit code 3"),
        (127, "exit code 127: command not found"),
        (128, "exit code 128"),
        (200, "exit code 200"),
        (-12, "SIGUSR2 (signal 12)"),
        (-40, "signal 40"),
        (137, f"exit code 137, which stands for {explain_exit(-9)}"),
        (135, "exit code 135, which stands for SIGBUS (signal 7): bus error: usually /dev/shm is full"),
        (None, "exit status unknown"),
    ],
)
def test_exit_in_words(exit_code: int | None, expected: str) -> None:
    """An exit is said with its code or signal name, and with a reading only where one is known."""
    assert explain_exit(exit_code) == expected


@settings(deadline=None)  # the machine may be busy
@given(st.integers(-(2**31), 2**31), st.sampled_from(["en", "zh"]))
def test_any_exit_code_has_words(exit_code: int, lang: str) -> None:
    """No exit code breaks its explanation, and the number is always in it."""
    assert str(abs(exit_code)) in explain_exit(exit_code, lang)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_known_code_is_found_in_each_of_its_forms(code: str) -> None:
    """Each code of the table is found in the old and in the new form of a log line."""
    if code.startswith("ERR"):
        lines = [f"[ERROR] 2025-03-04-05:06:07 (PID:41, Device:1, RankID:1) {code} PTA a call went wrong"]
    else:
        lines = [
            f"{code}: it went wrong here",
            f"[PID: 41] 2025-03-04-05:06:07.001.002 Some_Title({code}): so",
        ]
    for line in lines:
        found = best_known([line])
        assert found is not None
        assert found[0] is CODES[code]


@pytest.mark.parametrize(
    ("row", "alternative"),
    [
        (row, alternative)
        for row, known in enumerate(FRAGMENTS)
        if not known.aside
        for alternative in known.fragments
    ],
)
def test_every_fragment_is_found(row: int, alternative: tuple[str, ...]) -> None:
    """Each alternative of each row is found in an error line, by its own row or by a more specific one."""
    found = best_known([f"[ERROR] MOD(7,1f,python):t [f.cc:1] {' xx '.join(alternative).upper()} xx"])
    assert found is not None
    known = found[0]
    assert known is FRAGMENTS[row] or (known in FRAGMENTS and FRAGMENTS.index(known) < row)


def test_every_row_has_both_languages() -> None:
    """Each row has a meaning and a remedy in English and in Chinese, and a cause in both or in none."""
    for known in (*CODES.values(), *FRAGMENTS):
        assert known.meaning.en
        assert known.meaning.zh
        assert known.remedy.en
        assert known.remedy.zh
        assert bool(known.cause.en) == bool(known.cause.zh)
        assert known.source
        assert known.component


@pytest.mark.parametrize(
    "lines",
    [
        ["Traceback (most recent call last):", "ValueError: boom-42"],
        ["        Solution: 1. see EI0004: in the manual, the rank table may be wrong"],
        ["        Possible Cause: 1. NPU out of memory on the peer", "        2. Address already in use"],
        ["RuntimeError: failed, likely causes are e.g. no space left on device or a dead peer"],
        ["RuntimeError: it failed. Please check whether the device lost heartbeat"],
        ["[WARNING] DISTRIBUTED(1,x): Failed to connect to the meta server node url: 127.0.0.1:8118"],
        ["RuntimeError: 操作失败，请检查是否 out of memory"],
    ],
)
def test_advice_and_examples_are_no_findings(lines: list[str]) -> None:
    """What stands in advice, in an example, or in a warning gives no meaning that could be false."""
    assert best_known(lines) is None


def test_cause_goes_before_effect_and_wrapper() -> None:
    """In one text a cause goes before an effect, and what only wraps others comes last."""
    wrap = "[ERROR] 2025-03-04-05:06:07 (PID:41, Device:0, RankID:0) ERR02200 DIST call hccl api failed"
    for lines, code in (
        (["EI0006: the wait timed out", "EI0005: counts differ"], "EI0005"),
        (["EE9999: inner error", "EI0005: counts differ"], "EI0005"),
        ([wrap, "EI0002: no notify"], "EI0002"),
        ([wrap], "ERR02200"),
    ):
        found = best_known(lines)
        assert found is not None
        assert found[0].code == code


@pytest.mark.parametrize(
    ("line", "code", "meaning"),
    [
        ("E10023: some text", "E10023", "a CANN error that this program does not know"),
        ("[PID: 3] now A_Title(EK0007): text", "EK0007", "a CANN error that this program does not know"),
        (
            "[ERROR] 2025-03-04 (PID:1, Device:0, RankID:0) ERR01003 OPS shape",
            "ERR01003",
            "an error of torch_npu (operators, bad value)",
        ),
    ],
)
def test_unknown_codes_are_shown_without_guessing(line: str, code: str, meaning: str) -> None:
    """A code outside the table is shown as it is, and blames nobody."""
    found = best_known([line])
    assert found is not None
    assert (found[0].code, found[0].meaning.en) == (code, meaning)
    assert found[0].role is Role.UNKNOWN


def test_catch_all_of_torch_npu_is_no_cause() -> None:
    """ERR99999, printed for every exception that is not torch_npu's, says nothing."""
    line = "[ERROR] 2025-03-04-05:06:07 (PID:41, Device:0, RankID:0) ERR99999 UNKNOWN application exception"
    assert best_known([line]) is None
