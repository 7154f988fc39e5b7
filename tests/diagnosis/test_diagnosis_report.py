"""The text of the report: what is on it, how wide, how long, what is never cut."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_told import LOST_PEER, NOON, OWN, STEPS, TIMED_OUT, judged, told

from davincirunsdk.columns import width
from davincirunsdk.diagnosis.colour import coloured
from davincirunsdk.diagnosis.layout import shorten, wrap
from davincirunsdk.logs.timeline import Timeline

LATE = 'Traceback (most recent call last):\n  File "z.py", line 1, in f\nTypeError: late\n'


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S.000 %z", time.localtime(seconds))


def test_whole_report() -> None:
    """One failure, one worker that ended badly while being stopped, and the rest as counts."""
    report = judged(
        told(0, STEPS, -15, stop=10.2),
        told(1, STEPS + "KeyError: late\n", 9, at=10.4, stop=10.2),
        told(2, OWN, 1, ended=10.0),
        replace(told(3, STEPS, -9, stop=10.2), state=told(3, STEPS, -9, stop=10.2).state.KILLED),
        told(4, STEPS, 0),
    )
    assert report.text == (
        "job job failed: rank 2 is the root cause, exit code 1\n"
        "root cause:   rank 2, device 2, pid 4002\n"
        "why:          Sure: rank 2 is the only rank that failed by itself, before any other was stopped\n"
        "ended:        exit code 1: usually an uncaught Python exception\n"
        f"time:         {stamp(NOON + 10)}, after 10.0 s\n"
        "error:        ValueError: boom-42\n"
        "traceback:\n"
        "  | step 1 loss 0.5\n"
        "  | step 2 loss 0.4\n"
        "  | Traceback (most recent call last):\n"
        '  |   File "train.py", line 3, in f\n'
        "  |     g()\n"
        "  | ValueError: boom-42\n"
        "ended badly while being stopped (an effect, not the cause):\n"
        "  rank 1, exit code 9: KeyError: late\n"
        "other ranks:  1 stopped by us in time, 1 killed by us after the grace period (SIGKILL), 1 had\n"
        "              ended well\n"
        "log:          /data/log/job-proc-rank-2-device-2.txt\n"
        "all logs:     /data/log\n"
        "rank 2: ValueError: boom-42 (log: /data/log/job-proc-rank-2-device-2.txt)"
    )


def test_equal_tracebacks_once() -> None:
    """Of ranks that failed alike one traceback is shown, with the others in one line."""
    text = judged(*(told(rank, OWN, 1, at=10 + rank / 10) for rank in range(64))).text
    assert text.count("Traceback") == 1
    assert "ranks 0-63 failed alike (0 first)" in text
    assert "ranks 1-63" in text
    assert text.count("\n") < 40


def test_decisive_line_is_wrapped_not_cut() -> None:
    """A long exception keeps all its words, in the field and in the traceback."""
    words = [f"word{n:02d}" for n in range(40)]
    text = judged(told(0, OWN.replace("boom-42", " ".join(words)), 1)).text
    joined = " ".join(text.replace("  | ", " ").split())
    assert joined.count(" ".join(words)) == 2
    assert max(map(width, text.splitlines()[:-1])) <= 100


def test_monster_lines_stay_bounded() -> None:
    """A line of 100 kB does not flood the report; its start and its end are kept."""
    text = judged(told(0, OWN.replace("boom-42", "x" * 100_000 + "END"), 1)).text
    assert text.count("\n") < 40
    assert "ValueError: xxx" in text
    assert "END" in text


def test_chained_exceptions_quote_first_and_last() -> None:
    """Of a chain both ends are quoted, and the middle where only that explains."""
    chain = (
        OWN + "\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 2, in g\n'
        "RuntimeError: NPU out of memory. Tried to allocate 2 GiB\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 9, in h\nSystemError: step failed\n'
    )
    text = judged(told(0, chain, 1)).text
    for words in ("ValueError: boom-42", "NPU out of memory", "SystemError: step failed", "smaller batch"):
        assert words in text


def test_exception_group_shows_what_is_in_it() -> None:
    """The exceptions in a group are quoted, not only the group."""
    group = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "t.py", line 1, in <module>\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "t.py", line 7, in load\n'
        "    | ZeroDivisionError: division by zero\n"
        "    +------------------------------------\n"
    )
    report = judged(told(0, STEPS + group + "bye\n", 1), told(1, LOST_PEER, 1, at=11))
    assert report.ranks == (0,)
    assert "error:        ZeroDivisionError: division by zero\n" in report.text
    assert "ExceptionGroup: unhandled errors" in report.text


@pytest.mark.parametrize(
    "noise",
    [
        f"Exception ignored in: <function f>\n{LATE}",
        f"--- Logging error ---\n{LATE}",
        "sys:1: ResourceWarning: unclosed file\n",
    ],
)
def test_noise_at_the_interpreters_exit_is_not_the_error(noise: str) -> None:
    """What comes last and means nothing is not taken for the error."""
    report = judged(told(0, OWN + noise, 1))
    assert report.root_cause.excerpt
    assert "error:        ValueError: boom-42" in report.text


def test_message_goes_before_the_table() -> None:
    """The message's own reason is printed, and the table's usual cause only without one."""
    line = "EI0003: bad argument. Reason: the count 7 of op AllReduce is odd.\n"
    text = judged(told(0, STEPS + line, 1)).text
    assert "the count 7 of op AllReduce is odd" in text
    assert "usual cause" not in text
    assert "usual cause" in judged(told(0, STEPS + "EI0003: bad argument\n", 1)).text


def test_several_nodes() -> None:
    """With several nodes each rank's node is named, and the clocks are explained."""
    text = judged(told(0, LOST_PEER, 1), told(11, OWN, 1, at=9, node=1)).text
    assert "root cause:   rank 11, local rank 3, device 3, node worker-1 (node rank 1), pid 4011\n" in text
    assert "rank 0 on worker-0, exit code 1" in text
    assert "clocks:" in text


def test_paths_stay_whole() -> None:
    """A path is never shortened or broken, for it is there to be copied."""
    path = Path("/data") / "/".join(["folder"] * 40) / "log.txt"
    assert f"log:          {path}\n" in judged(replace(told(0, OWN, 1), log_path=path)).text


def test_chinese_report() -> None:
    """All labels and sentences are Chinese, columns count double there, and quotes stay as they are."""
    report = judged(told(0, TIMED_OUT, 1), told(1, OWN, 1, at=9), lang="zh")
    assert report.text.startswith("作业 job 失败：rank 1 是根因，退出码 1\n")
    assert report.why.startswith("确定")
    assert "ValueError: boom-42" in report.text
    assert max(map(width, report.text.splitlines())) <= 100


def test_colour_adds_nothing_but_colour() -> None:
    """Without its escape sequences the coloured report is the plain one."""
    import re

    text = judged(told(0, OWN, 1), told(1, LOST_PEER, 1)).text
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured(text)) == text
    assert "\x1b" not in text


def test_lines_are_made_fit_for_a_terminal() -> None:
    """Colours, cursor moves, progress states, tabs and unprintable characters do not reach the report."""
    assert shorten("\x1b[1;31mred\x1b[0m\x1b]0;title\x07 end\x1b(B", 80).startswith("red end")
    assert shorten("10%\r 50%\r100% done\n", 80) == "100% done"
    assert shorten("a\tb\x00c", 80) == "a   b?c"
    assert width(shorten("数" * 500, 80)) <= 80
    assert "".join(wrap("数据" * 100, 40)) == "数据" * 100


_LINE = st.text() | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(
        st.tuples(st.lists(_LINE, max_size=6), st.integers(-70, 260) | st.none()), min_size=1, max_size=6
    ),
    st.sampled_from(["en", "zh"]),
)
def test_no_output_breaks_the_report(said: list[tuple[list[str], int | None]], lang: str) -> None:
    """Whatever workers print and however they end, the report comes, bounded and printable."""
    ranks = [
        replace(told(rank, "x", code), output="\n".join(lines).encode("utf-8", "surrogateescape"))
        for rank, (lines, code) in enumerate(said)
    ]
    report = judged(*ranks, lang=lang)
    lines = report.text.split("\n")
    assert len(lines) < 60
    assert all(line.isprintable() for line in lines)
    assert report.text.encode()
    assert report.to_json()


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 2)), min_size=1, max_size=6000),
    st.integers(1, 1 << 16),
)
@settings(deadline=None, max_examples=30)
def test_times_of_bytes(pieces: list[tuple[int, float]], size: int) -> None:
    """The time of the last bytes is exact to a millisecond; memory stays bounded however many pieces come."""
    line = Timeline()
    now = 0.0
    for count, pause in pieces:
        now += pause
        line.note(count, now)
    times = line.of_last(size)
    assert len(times) <= 2049
    assert times[-1][0] == size
    assert now - times[-1][1] < 0.001 or times[-1][1] == now
    assert list(times) == sorted(times)
