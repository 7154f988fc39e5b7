"""What exit codes and known Ascend errors mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk.diagnosis import explain_exit, hint
from davincirunsdk.diagnosis.matching import Level, find, level_of
from davincirunsdk.diagnosis.patterns import CODES, FRAGMENTS, Role


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (0, "exit code 0"),
        (1, "exit code 1: usually an uncaught Python exception"),
        (2, "exit code 2: usually wrong arguments or a script that cannot be opened"),
        (3, "exit code 3"),
        (75, "exit code 75"),
        (127, "exit code 127: command not found"),
        (128, "exit code 128"),
        (200, "exit code 200"),
        (255, "exit code 255"),
        (-9, "SIGKILL (signal 9): the out-of-memory killer (see dmesg), the platform, or a kill -9"),
        (-12, "SIGUSR2 (signal 12)"),
        (-40, "signal 40"),
        (
            137,
            f"exit code 137, which stands for {explain_exit(-9)}",
        ),
        (135, "exit code 135, which stands for SIGBUS (signal 7): bus error: usually /dev/shm is full"),
        (None, "exit status unknown: the host program took it"),
    ],
)
def test_exit_in_words(exit_code: int | None, expected: str) -> None:
    """An exit is said with its code or signal name, and with a reading only where one is known."""
    assert explain_exit(exit_code) == expected


@pytest.mark.parametrize(
    ("exit_code", "word"), [(-6, "abort"), (134, "abort"), (-11, "segmentation"), (139, "segmentation")]
)
def test_crashes_are_read_alike_with_and_without_a_shell(exit_code: int, word: str) -> None:
    """Death by a signal has the same reading when a shell reports it as 128 + n."""
    assert word in explain_exit(exit_code)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(-(2**31), 2**31))
def test_any_exit_code_has_words(exit_code: int) -> None:
    """No exit code breaks its explanation, and the number is always in it."""
    assert str(abs(exit_code)) in explain_exit(exit_code)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_known_code_is_explained_in_both_of_its_forms(code: str) -> None:
    """Each code of the table gives its own meaning, in the old and in the new form of a log line."""
    if code.startswith("ERR"):
        lines = [f"[ERROR] 2025-03-04-05:06:07 (PID:41, Device:1, RankID:1) {code} PTA a call went wrong"]
    else:
        lines = [
            f"{code}: it went wrong here",
            f"[PID: 41] 2025-03-04-05:06:07.001.002 Some_Title({code}): so",
        ]
    for line in lines:
        assert hint(["step 1", line, "step 2"]).startswith(f"{code}: {CODES[code].meaning}")
        assert level_of(line) is Level.ERROR


@pytest.mark.parametrize(
    ("row", "alternative"),
    [(row, alternative) for row, pattern in enumerate(FRAGMENTS) for alternative in pattern.fragments],
)
def test_every_fragment_is_found(row: int, alternative: tuple[str, ...]) -> None:
    """Each alternative of each row is found in an error line by its own row, whatever its case."""
    match = find([f"[ERROR] MOD(7,1f,python):t [f.cc:1] {' xx '.join(alternative).upper()} xx"])
    assert match is not None
    assert match.pattern is FRAGMENTS[row]


def test_every_row_says_what_to_do_in_few_words() -> None:
    """Each row has a meaning and a remedy, and its whole hint fits four lines of a terminal."""
    rows = [([f"[ERROR] {code})"], row) for code, row in CODES.items()]
    rows += [(["[ERROR] " + " ".join(row.fragments[0])], row) for row in FRAGMENTS]
    for lines, row in rows:
        assert row.remedy
        assert row.meaning in hint(lines)
        assert len(hint(lines)) < 320


def test_nothing_known_gives_no_hint() -> None:
    """Ordinary output and an ordinary exception give no hint."""
    assert hint([]) == ""
    assert hint(["epoch 3 loss 0.25", "Traceback (most recent call last):", "ValueError: boom-42"]) == ""


def test_secondary_kind_points_at_another_rank() -> None:
    """A time-out of a collective says that another rank is the likelier cause."""
    said = hint(["[PID: 9] 2025-03-04-05:06:07 Notify_Wait(EI0002): no record came from the remote rank"])
    assert said == (
        "EI0002: a wait for another rank timed out inside a collective operation. "
        "Another rank is the likelier cause. To do: look for a rank without this error, "
        "or with an earlier one; raise HCCL_EXEC_TIMEOUT only if a rank really is that slow."
    )


def test_primary_goes_before_secondary() -> None:
    """A cause goes before its effect in the same log, whichever came first."""
    cause = "EJ0001: HCCP did not come up. Reason: maybe the last training process is running"
    effect = "EI0006: the wait for a socket timed out"
    assert hint([cause, effect]).startswith("EJ0001: ")
    assert hint([effect, cause]).startswith("EJ0001: ")


def test_error_goes_before_mention() -> None:
    """A code in an advice, a warning or a note about another rank does not hide the real error."""
    error = "EI0006: the wait for a socket timed out"
    for mention in (
        "[WARNING] HCCL(7,python): earlier run had EI0011: no memory",
        "INFO: rank 3 reported EJ0001: device busy",
        "        Solution: 1. see EI0004: in the manual, the rank table may be wrong",
        "        Possible Cause: 1. NPU out of memory on the peer",
        "W1205 10:11:12 socket.cpp] Address already in use",
        "peer said EI0011: no memory",
    ):
        assert hint([mention, error]).startswith("EI0006: "), mention


def test_lone_mention_is_said_to_be_one() -> None:
    """A known error that is only mentioned in a warning is not sold as the cause."""
    said = hint(["[WARNING] retrying after EI0019: port in use"])
    assert said.startswith("only mentioned, maybe not the cause: EI0019: ")


def test_first_of_equals_is_taken() -> None:
    """Of two causes the first in the log is taken, for the later may follow from it."""
    lines = ["EI0014: device_ip repeated", "EI0003: argument bad"]
    assert hint(lines).startswith("EI0014: ")
    assert hint(lines[::-1]).startswith("EI0003: ")


def test_catch_all_of_torch_npu_is_no_cause() -> None:
    """ERR99999, printed for every exception that is not torch_npu's, gives no hint and hides none."""
    catch_all = (
        "[ERROR] 2025-03-04-05:06:07 (PID:41, Device:0, RankID:0) ERR99999 UNKNOWN application exception"
    )
    assert hint(["KeyError: 'lr'", catch_all]) == ""
    assert hint([catch_all, "RuntimeError: NPU out of memory. Tried to get 2 GiB"]).startswith(
        '"out of memory"'
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("E10023: some text", "E10023: a CANN error that this program does not know"),
        ("[PID: 3] now A_Title(EK0007): text", "EK0007: a CANN error that this program does not know"),
        (
            "[ERROR] 2025-03-04 (PID:1, Device:0, RankID:0) ERR01003 OPS shape",
            "ERR01003: an error of torch_npu (operators, bad value)",
        ),
        (
            "[ERROR] 2025-03-04 (PID:1, Device:0, RankID:0) ERR77777 XX",
            "ERR77777: an error of torch_npu (unknown part, unknown kind)",
        ),
    ],
)
def test_unknown_codes_are_shown_without_guessing(line: str, expected: str) -> None:
    """A code outside the table is shown as it is, with the advice to read on, and blames nobody."""
    assert hint([line]) == f"{expected}. To do: read the message and the lines before it."


def test_wrapping_code_gives_way() -> None:
    """An internal or wrapping code is taken only when nothing else is known."""
    wrap = "[ERROR] 2025-03-04-05:06:07 (PID:41, Device:0, RankID:0) ERR02200 DIST call hccl api failed"
    assert hint([wrap, "        Reason: the last training process is running"]).startswith(
        '"the last training'
    )
    assert hint(["EE9999: inner error", "EI0005: counts differ"]).startswith("EI0005: ")
    assert "Another rank is the likelier cause" in hint([wrap])
    assert hint(["EE9999: inner error"]).endswith("To do: read the lines before it.")


def test_culprit_named_by_hccl_is_passed_on() -> None:
    """HCCL's own finding, deep in a time-out's text, beats the time-out and its place is quoted."""
    found = "    Cluster Exception Location[IP/ID]:[10.1.2.3/5], ExceptionType:[Heartbeat Lost Occurred]"
    lines = ["EI0002: no notify came from the remote rank; there is 1 abnormal device:", found]
    assert hint(lines) == (
        '"cluster exception location ... heartbeat lost occurred": '
        "HCCL lost the heartbeat of a rank: 10.1.2.3/5. "
        "The cause is there, not in this rank. To do: read the log of the rank that it names."
    )
    lines.append(found.replace("Heartbeat Lost", "Error cqe").replace("10.1.2.3/5", "10.1.2.9/7"))
    assert "10.1.2.9/7" in hint(lines), "a failed transfer tells more than a lost heartbeat"


def test_missing_ranks_are_passed_on() -> None:
    """The ranks that the root did not see, and the worker that MindSpore lost, are quoted."""
    assert "exchange of addresses: 1,3. The cause" in hint(
        ["EI0015: no complete exchange", "[ERROR] HCCL(1,python): Failed to connect agent[1,3]"]
    )
    lost = "RuntimeError: The total number of timed out node is 1, worker 2 is the first one timed out"
    assert "first with: 2. The cause is there" in hint([lost])


def test_prefix_of_another_launcher_is_no_hindrance() -> None:
    """A line behind another launcher's rank or process prefix is read as if it stood alone."""
    for prefix in ("[rank3]: ", "[default0]:", "(RayWorker pid=77) ", "(Worker_TP0 pid=5)"):
        assert level_of(f"{prefix}EL0001: device lost") is Level.ERROR
        assert level_of(f"{prefix}ValueError: x") is Level.ERROR


@pytest.mark.parametrize(
    "text", ["0xE10001)", "docs/EI0006/index", "XEI0006:", "EI00061:", "EI0006 and more", "ERR022001"]
)
def test_look_alikes_are_no_codes(text: str) -> None:
    """A number, a path or a longer word that resembles a code is not taken for one."""
    assert hint([f"[ERROR] {text}"]) == ""


def test_error_level_is_told_in_every_form_of_log() -> None:
    """Each form in which Ascend software and Python write errors counts as one; other lines do not."""
    errors = (
        "[ERROR] HCCL(7,python):2025-03-04-05:06:07.1.2 [x.cc:9] [7][Init]text",
        "[CRITICAL] ME(7:1,MainProcess):2025-03-04 text",
        "2025-03-04 05:06:07 ERROR trainer text",
        "torch.distributed.DistBackendError: text",
        "  what():  text",
        "train.py: error: text",
    )
    for line in errors:
        assert level_of(line) is Level.ERROR, line
    for line in (
        "[W304 05:06:07 x.cpp:1] text",
        "[WARNING] text",
        "[INFO] text",
        "DEBUG text",
        "Please check text",
    ):
        assert level_of(line) is Level.MENTION, line
    for line in ("", "step 3", "LINK_ERROR_INFO text", "errors so far 0"):
        assert level_of(line) is Level.PLAIN, line


def test_primary_roles_never_send_the_reader_elsewhere() -> None:
    """Only roles that say so send the reader to another rank."""
    for code, pattern in CODES.items():
        sent = "Another rank is the likelier cause" in hint([f"[ERROR] {code}: x"])
        assert sent is (pattern.role is Role.SECONDARY)


_PIECES = st.sampled_from(
    [
        "EI0006:",
        "(EI0019):",
        "[ERROR] ",
        "ERR02200 ",
        "timed out node is",
        "[1,2]",
        "\x1b[31m",
        "Traceback",
        " " * 9,
    ]
)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.lists(st.text() | _PIECES | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))))
)
def test_no_output_breaks_the_hint(pieces: list[list[str]]) -> None:
    """Whatever a worker printed, there is a hint or none, in one bounded line that can be written out."""
    said = hint(["".join(line) for line in pieces])
    assert len(said) < 500
    assert said.isprintable()
