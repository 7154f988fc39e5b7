"""Who is the root cause, and the report about it."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk.diagnosis import explain_exit, failure_report, order
from davincirunsdk.diagnosis.excerpt import excerpt, headline, shorten
from davincirunsdk.types import WorkerFailure, WorkerState, WorkerStatus

LOGS = Path("/data/log")
NOON = time.mktime((2025, 3, 4, 12, 0, 0, 0, 0, -1))

TIMED_OUT = ("step 7", "EI0006: the wait for a socket timed out", "RuntimeError: the collective failed")
OWN_ERROR = (
    "step 7",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in f',
    "ValueError: boom-42",
)


def failure(
    rank: int, exit_code: int | None = 1, tail: tuple[str, ...] = (), *, after: float = 0.0
) -> WorkerFailure:
    return WorkerFailure(
        rank=rank,
        local_rank=rank % 8,
        node_rank=rank // 8,
        node=f"worker-{rank // 8}",
        device_id=rank % 8,
        pid=4000 + rank,
        exit_code=exit_code,
        ended=NOON + after,
        log_path=LOGS / f"job-proc-rank-{rank}-device-{rank % 8}.txt",
        tail=tail,
        reason=explain_exit(exit_code),
        name=f"rank {rank}",
    )


def scheduler(tail: tuple[str, ...] = ()) -> WorkerFailure:
    return replace(failure(0, 1, tail), rank=-1, name="scheduler", log_path=LOGS / "job-scheduler.txt")


def status(
    rank: int,
    state: WorkerState,
    exit_code: int | None = None,
    last_line: str = "",
    last_output: float | None = NOON,
) -> WorkerStatus:
    return WorkerStatus(
        rank=rank,
        local_rank=rank,
        device_id=rank,
        pid=4000 + rank,
        state=state,
        exit_code=exit_code,
        started=NOON - 60,
        ended=NOON,
        log_path=LOGS / "x.txt",
        log_bytes=0,
        last_output=last_output,
        last_line=last_line,
        lost_bytes=0,
        name=f"rank {rank}" if rank >= 0 else "scheduler",
    )


def report(
    *failures: WorkerFailure,
    workers: tuple[WorkerStatus, ...] = (),
    nnodes: int = 1,
    stopped_reason: str = "",
) -> str:
    return failure_report(
        failures=failures,
        workers=workers,
        job_id="job",
        nnodes=nnodes,
        log_dir=LOGS,
        stopped_reason=stopped_reason,
    )


def zone() -> str:
    return time.strftime("%z", time.localtime(NOON))


def long_traceback(depth: int = 30) -> tuple[str, ...]:
    frames = [
        line for i in range(depth) for line in (f'  File "train.py", line {i}, in f{i}', f"    f{i + 1}()")
    ]
    return (
        *(f"noise {i}" for i in range(500)),
        "Traceback (most recent call last):",
        *frames,
        "ValueError: boom-42",
    )


# --- order


def test_first_failure_stays_first() -> None:
    """The worker that failed first by itself is the root cause when it is no victim."""
    silent, loud = failure(3), failure(0, 1, OWN_ERROR, after=0.3)
    assert order((silent, loud)) == (silent, loud)
    assert order(()) == ()


@pytest.mark.parametrize(
    "line",
    [
        "[PID: 5] 2025-03-04-05:06:07 Notify_Wait(EI0002): no record came",
        "EI0006: the wait for a socket timed out",
        "EI0015: not all ranks came",
        "[ERROR] 2025-03-04-05:06:07 (PID:5, Device:0, RankID:0) ERR02200 DIST call hccl api failed",
        "RuntimeError: The total number of timed out node is 1",
        "  Cluster Exception Location[IP/ID]:[10.0.0.1/3], ExceptionType:[Heartbeat Lost Occurred]",
        "RuntimeError: [pair.cc:1] Connection closed by peer [10.0.0.1]:77",
    ],
)
@pytest.mark.parametrize(
    "culprit",
    [
        failure(3, -9),
        failure(3, -11),
        failure(3, 1, OWN_ERROR),
        failure(3),
        failure(3, 1, ("EI0003: bad argument",)),
    ],
    ids=["killed", "crashed", "own exception", "silent", "other error"],
)
def test_cause_goes_before_its_earlier_victim(line: str, culprit: WorkerFailure) -> None:
    """A rank whose error is a time-out gives way to one that failed otherwise, also if that ended later."""
    victim, another = failure(0, 1, ("step", line)), failure(1, 1, ("step", line), after=0.1)
    assert order((victim, another, culprit)) == (culprit, victim, another)


def test_victims_alone_keep_their_order() -> None:
    """When every failure is a time-out, the first one stays first."""
    both = failure(0, 1, TIMED_OUT), failure(1, 1, TIMED_OUT, after=0.1)
    assert order(both) == both


def test_watchdog_abort_is_a_victim() -> None:
    """SIGABRT after a collective time-out is the watchdog's doing; any other SIGABRT is a cause."""
    aborted = failure(0, -6, ("terminate called", "  what():  Watchdog caught collective operation timeout"))
    corrupted = failure(0, 134, ("EI0002: no notify came", "free(): invalid pointer"))
    plain = failure(0, -6, ("Assertion `n > 0' failed.",))
    culprit = failure(2, 1, OWN_ERROR, after=0.2)
    assert order((aborted, culprit))[0] is culprit
    assert order((corrupted, culprit))[0] is culprit
    assert order((plain, culprit))[0] is plain


def test_kill_counts_more_than_words() -> None:
    """A rank that was killed is no victim, even if it had just complained about another one."""
    killed = failure(0, 137, TIMED_OUT)
    assert order((killed, failure(1, 1, OWN_ERROR, after=0.1)))[0] is killed


def test_own_exception_before_a_time_out_is_a_cause() -> None:
    """A rank that failed in its own code and met a time-out only while shutting down is no victim."""
    shutting_down = failure(0, 1, (*OWN_ERROR, "EI0006: the wait for a socket timed out"))
    assert order((shutting_down, failure(1, 3, after=0.1)))[0] is shutting_down
    carried = failure(0, 1, ("RuntimeError: the collective failed", "EI0006: the wait timed out"))
    assert order((carried, failure(1, 3, after=0.1)))[0].rank == 1


def test_warning_makes_no_victim() -> None:
    """A time-out that was only warned about does not excuse a rank."""
    warned = failure(0, 1, ("[WARNING] EI0006: the wait for a socket timed out, trying again", "gave up"))
    assert order((warned, failure(1, 3, after=0.1)))[0] is warned


# --- which lines


def test_end_of_a_deep_traceback_is_shown() -> None:
    """Of a traceback longer than the room its end with the exception is shown."""
    shown = excerpt(long_traceback(), 20)
    assert len(shown) == 20
    assert shown[-1] == "ValueError: boom-42"
    assert headline(long_traceback()) == "ValueError: boom-42"


def test_real_traceback_is_understood() -> None:
    """A traceback as this very Python writes it, chained and with marks under the code, is read rightly."""
    try:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("boom-43") from error
    except KeyError:
        tail = (*traceback.format_exc().splitlines(), "closing", "closed")
    assert headline(tail) == "KeyError: 'boom-43'"
    assert order((failure(0, 1, (*tail, "EI0006: timed out")), failure(1, after=1)))[0].rank == 0


def test_exception_is_shown_in_spite_of_noise_after_it() -> None:
    """An exception followed by much noise is shown together with the very last lines."""
    tail = (*long_traceback(), "EI0006: code of the library", *(f"teardown {i}" for i in range(100)))
    shown = excerpt(tail, 20)
    assert len(shown) == 20
    assert "ValueError: boom-42" in shown
    assert "EI0006: code of the library" in shown
    assert "... 93 more lines in the log file ..." in shown
    assert shown[-4:] == ("teardown 96", "teardown 97", "teardown 98", "teardown 99")
    assert headline(tail) == "ValueError: boom-42"


def test_last_traceback_counts_but_not_an_ignored_one() -> None:
    """Of chained exceptions the last is the reported one; an ignored one of a finaliser does not count."""
    frame = '  File "a.py", line 1, in f'
    head = "Traceback (most recent call last):"
    chained = (head, frame, "KeyError: 1", "During handling of the above", head, frame, "OSError: 2")
    assert headline(chained) == "OSError: 2"
    assert headline((*chained, "Exception ignored in: <f>", head, frame, "TypeError: 3")) == "OSError: 2"
    assert headline(("Exception ignored in: <f>", head, frame, "TypeError: 3")) == "TypeError: 3"


def test_head_of_the_traceback_may_be_gone() -> None:
    """A traceback whose first lines no longer are in the tail is still known by its frames."""
    assert headline(('  File "a.py", line 1, in f', "    g()", "my.mod.Boom: x", "bye")) == "my.mod.Boom: x"
    assert (
        headline(('[rank3]:   File "a.py", line 1, in f', "[rank3]: ValueError: x", "bye")) == "ValueError: x"
    )


def test_headline_without_exception() -> None:
    """Without an exception a known error is the line that tells most, else the last one."""
    assert headline(("a", "EI0003: bad argument", "b")) == "EI0003: bad argument"
    assert headline(("a", "b", "  ")) == "b"
    assert headline(()) == ""


def test_lines_are_made_fit_for_a_terminal() -> None:
    """Colours, cursor moves, progress states, tabs and unprintable characters do not reach the report."""
    assert shorten("\x1b[1;31mred\x1b[0m\x1b]0;title\x07 end\x1b(B", 80).startswith("red end")
    assert shorten("10%\r 50%\r100% done\n", 80) == "100% done"
    assert shorten("a\tb\x00c\udc80\u3000d", 80) == "a   b?c? d"
    long = shorten("start " + "x" * 1_000_000 + " end", 80)
    assert len(long) == 80
    assert long.startswith("start x")
    assert long.endswith("x end")


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.text()), st.integers(5, 20))
def test_excerpt_is_bounded(tail: list[str], count: int) -> None:
    """An excerpt never has more lines than asked for, and none only if there was no output."""
    shown = excerpt(tail, count)
    assert len(shown) <= count
    assert bool(shown) == any(line.strip() for line in tail)


# --- the report


def test_whole_report() -> None:
    """One failure, one worker that ended badly while being stopped, and the rest as counts."""
    workers = (
        status(0, WorkerState.STOPPED, -15),
        status(1, WorkerState.STOPPED, 9, "KeyError: 'late'"),
        status(2, WorkerState.FAILED, 1),
        status(3, WorkerState.KILLED, -9),
        status(4, WorkerState.SUCCEEDED, 0),
        status(5, WorkerState.STOPPED, 0),
    )
    assert report(failure(2, 1, OWN_ERROR), workers=workers) == (
        "job job failed: rank 2 is the root cause, exit code 1\n"
        "root cause:   rank 2, device 2, pid 4002\n"
        "ended:        exit code 1: usually an uncaught Python exception\n"
        f"time:         2025-03-04 12:00:00.000 {zone()}\n"
        "log:          /data/log/job-proc-rank-2-device-2.txt\n"
        "last lines:\n"
        "  | step 7\n"
        "  | Traceback (most recent call last):\n"
        '  |   File "train.py", line 3, in f\n'
        "  | ValueError: boom-42\n"
        "ended badly while being stopped (an effect, not the cause):\n"
        "  rank 1, exit code 9: KeyError: 'late'\n"
        "other ranks:  2 stopped by us in time (SIGTERM), 1 killed by us after the grace period (SIGKILL),\n"
        "              1 had ended well\n"
        "all logs:     /data/log"
    )


def test_report_over_several_nodes_with_a_victim_that_ended_first() -> None:
    """The killed rank leads, its node is named, and one line says why it goes before the earlier end."""
    failures = order((failure(0, 1, TIMED_OUT), failure(11, -9, after=0.25)))
    assert report(*failures, nnodes=2) == (
        "job job failed: rank 11 is the root cause, SIGKILL (signal 9)\n"
        "root cause:   rank 11, local rank 3, device 3, node worker-1 (node rank 1), pid 4011\n"
        "ended:        SIGKILL (signal 9): the out-of-memory killer (see dmesg), the platform, or a kill -9\n"
        f"time:         2025-03-04 12:00:00.250 {zone()}\n"
        "log:          /data/log/job-proc-rank-11-device-3.txt\n"
        "output:       no output before exit\n"
        "order:        rank 0 ended earlier, but EI0006 says that it was waiting for another rank\n"
        "other failures:\n"
        "  rank 0 on worker-0, exit code 1, 12:00:00.000: EI0006: the wait for a socket timed out\n"
        "all logs:     /data/log"
    )


def test_report_names_suspects_when_all_failures_are_effects() -> None:
    """If only victims failed, ranks still running without such an error are named, longest silent first."""
    workers = (
        status(0, WorkerState.FAILED, 1),
        status(1, WorkerState.STOPPED, -15, "step 7", NOON - 5),
        status(2, WorkerState.KILLED, -9, "step 6", NOON - 300),
        status(3, WorkerState.STOPPED, -15, "EI0006: the wait timed out"),
        status(4, WorkerState.SUCCEEDED, 0),
    )
    text = report(failure(0, 1, TIMED_OUT), workers=workers)
    assert text.startswith("job job failed: rank 0 failed first, exit code 1\nroot cause:   unclear: ")
    assert "\nfailed first: rank 0, device 0, pid 4000\n" in text
    assert "\nsuspects:     look at ranks 2, 1, still running without such an error\n" in text
    alone = report(failure(0, 1, TIMED_OUT), nnodes=2)
    assert "\nsuspects:     look at ranks of other nodes\n" in alone
    assert "suspects" not in report(failure(0, 1, TIMED_OUT))


def test_scheduler_is_no_rank() -> None:
    """MindSpore's scheduler as the root cause is called by its name, never a rank, and has no device."""
    workers = (status(0, WorkerState.STOPPED, -15), status(-1, WorkerState.FAILED, 1))
    text = report(scheduler(("Address already in use",)), workers=workers)
    assert "root cause:   MindSpore's scheduler, an auxiliary process, not a rank, pid 4000\n" in text
    assert "/data/log/job-scheduler.txt" in text
    assert "rank -1" not in text
    assert "device" not in text
    assert 'hint:         "address already in use": a port cannot be used.' in text
    assert "other ranks:  1 stopped by us in time (SIGTERM)\n" in text
    stopped = report(failure(0), workers=(status(-1, WorkerState.STOPPED, -15),))
    assert "other ranks" not in stopped


def test_reason_hint_and_stop_reason_given_by_the_caller_are_shown() -> None:
    """A reason beyond the exit, a ready hint and why the job was stopped are all in the report."""
    given_ = replace(failure(1, -9), reason="its log file could not be written", hint="Free the disk.")
    text = report(given_, stopped_reason="time limit of 60 s")
    assert "\nreason:       its log file could not be written\n" in text
    assert "\nhint:         Free the disk.\n" in text
    assert "\nstopped:      time limit of 60 s\n" in text
    assert "reason:" not in report(failure(1, -9)).replace("stopped:", "")


def test_worker_that_could_not_be_started() -> None:
    """A worker without a process is said to be not started, not to have an unknown exit status."""
    text = report(replace(failure(1, None), pid=None, reason="no such file: 'trian'"))
    assert text.startswith("job job failed: rank 1 is the root cause, not started\n")
    assert "no process" in text
    assert "no such file: 'trian'" in text
    assert "unknown" not in text


def test_stall_without_a_failure_lists_the_silent_workers() -> None:
    """A job stopped for silence lists its workers with last output and time, the longest silent first."""
    workers = (
        status(0, WorkerState.STOPPED, -15, "step 9", NOON - 20),
        status(1, WorkerState.KILLED, -9, "step 8", NOON - 30),
        status(2, WorkerState.STOPPED, -15, "", None),
        status(3, WorkerState.SUCCEEDED, 0),
    )
    assert report(workers=workers, stopped_reason="no output for 20 s") == (
        "job job failed: no worker failed by itself\n"
        "stopped:      no output for 20 s\n"
        "workers that were running, the longest silent first:\n"
        "  rank 2, no output at all\n"
        "  rank 1, silent since 11:59:30.000: step 8\n"
        "  rank 0, silent since 11:59:40.000: step 9\n"
        "other ranks:  2 stopped by us in time (SIGTERM), 1 killed by us after the grace period (SIGKILL),\n"
        "              1 had ended well\n"
        "all logs:     /data/log"
    )


def test_thousand_failures_stay_short() -> None:
    """With a thousand failures the report shows ten, counts the rest, and fits a screen."""
    tail = (*long_traceback(), "EI0002: no notify came", *("x" * 500 for _ in range(50)))
    failures = order(tuple(failure(rank, 1, tail, after=rank / 1000) for rank in range(1000)))
    workers = tuple(status(rank, WorkerState.STOPPED, 9, "y" * 200) for rank in range(1000, 2000))
    text = report(*failures, workers=workers, nnodes=200)
    lines = text.splitlines()
    assert "  ... and 990 more" in lines
    assert "  ... and 996 more" in lines
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert any("ValueError: boom-42" in line for line in lines)
    assert lines[1].startswith("root cause:   rank 0, ")


def test_ten_failures_are_all_shown() -> None:
    """Nothing is left out while ten failures fit."""
    text = report(*(failure(rank, 3) for rank in range(10)))
    assert "more" not in text
    assert all(f"  rank {rank}, exit code 3" in text for rank in range(1, 10))


def test_first_by_itself_is_not_spoilt_by_later_failures() -> None:
    """The worker that failed on its own leads; those that failed during the stop come after it."""
    workers = (
        status(0, WorkerState.FAILED, 1, "lost a peer"),
        status(1, WorkerState.STOPPED, 9, "Traceback"),
        status(3, WorkerState.FAILED, 7),
    )
    text = report(failure(3, 7), workers=workers)
    assert text.startswith("job job failed: rank 3 is the root cause, exit code 7\n")
    assert text.index("rank 3") < text.index("an effect, not the cause") < text.index("  rank 0, exit code 1")
    assert "  rank 1, exit code 9: Traceback\n" in text


def test_long_path_stays_whole() -> None:
    """A path is never shortened or broken, for it is there to be copied."""
    path = Path("/data") / "/".join(["folder"] * 40) / "log.txt"
    assert f"log:          {path}\n" in report(replace(failure(0), log_path=path))


_LINE = st.text() | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(
        st.tuples(
            st.integers(-1, 2000),
            st.none() | st.integers(-70, 260),
            st.lists(_LINE).map(tuple),
            st.floats(),
            _LINE,
        ),
        max_size=15,
    ),
    st.lists(st.tuples(st.sampled_from(WorkerState), st.none() | st.integers(-70, 260), _LINE), max_size=15),
    _LINE,
)
def test_no_job_breaks_the_report(
    failed: list[tuple[int, int | None, tuple[str, ...], float, str]],
    others: list[tuple[WorkerState, int | None, str]],
    words: str,
) -> None:
    """Whatever workers did and printed, the report comes, bounded and fit to be written in UTF-8."""
    failures = order(
        tuple(
            replace(
                scheduler() if rank < 0 else failure(rank),
                exit_code=code,
                tail=tail,
                ended=ended,
                reason=text,
                node=text,
            )
            for rank, code, tail, ended, text in failed
        )
    )
    workers = tuple(status(rank, state, code, line) for rank, (state, code, line) in enumerate(others))
    said = report(*failures, workers=workers, nnodes=2, stopped_reason=words)
    lines = said.split("\n")
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)
    assert said.encode()
    assert "rank -1" not in said
