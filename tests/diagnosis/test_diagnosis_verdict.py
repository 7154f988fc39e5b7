"""Who is to blame: the rules of the judgement, each as a kind."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_told import LOST_PEER, NOON, OWN, STEPS, TIMED_OUT, judged, told

from davincirunsdk.diagnosis.account import read_rank
from davincirunsdk.diagnosis.evidence import End, Evidence, LostNode, RaisedError
from davincirunsdk.diagnosis.judge import judge
from davincirunsdk.diagnosis.parcel import pack, unpack
from davincirunsdk.types import Verdict, WorkerState


def test_silent_first_death_goes_before_the_loud_victim() -> None:
    """A rank that ended without a word before another one lost its peer is the root cause."""
    report = judged(told(0, LOST_PEER, 1, at=11), told(3, STEPS, 1, at=9), told(1, STEPS, -15, stop=9.2))
    assert report.verdict is Verdict.ROOT_CAUSE
    assert report.ranks == (3,)
    assert report.stopped_ranks == (1,)


def test_same_fault_together() -> None:
    """Ranks with the same error but for numbers failed alike; one that was stopped after it counts, too."""
    report = judged(
        told(0, OWN, 1, at=10.2),
        told(1, OWN.replace("42", "43"), 1, at=10.0),
        told(2, OWN, -15, at=10.1, stop=10.4),
        told(3, STEPS, -15, stop=10.4),
    )
    assert report.verdict is Verdict.FAILED_ALIKE
    assert report.ranks == (1, 2, 0)
    assert report.stopped_ranks == (3,)


def test_order_is_by_first_error_line() -> None:
    """A rank that dies last, because it dumps core, but complained first is the root cause."""
    late = told(1, OWN.replace("Value", "Key"), 1, at=11.0, ended=11.1)
    assert judged(told(0, OWN, -6, at=10.0, ended=15.0), late).ranks == (0,)


def test_exception_of_a_rank_that_still_lives() -> None:
    """A rank that had raised before the others were stopped is the cause, though its end was our doing."""
    report = judged(told(0, LOST_PEER, 1, at=10.3), told(1, OWN, -15, at=10.0, stop=10.5))
    assert report.verdict is Verdict.ROOT_CAUSE
    assert report.ranks == (1,)
    assert report.exit_code == 1


def test_handled_error_of_a_stopped_rank_blames_nobody() -> None:
    """An exception after which a rank went on working is not why the job failed."""
    went_on = OWN + "step 3 loss 0.3\nstep 4 loss 0.2\n"
    report = judged(told(0, LOST_PEER, 1, at=12), told(1, went_on, -15, stop=12.2), told(2, STEPS, -9, at=9))
    assert report.ranks == (2,)


@pytest.mark.parametrize("code", [-9, 137, -11, -7])
def test_foreign_signal_is_never_an_effect(code: int) -> None:
    """A rank that a signal of nobody's ended goes before ranks that waited, whatever it had printed."""
    report = judged(told(0, LOST_PEER, 1, at=9.9), told(1, TIMED_OUT, code, at=10), told(2, LOST_PEER, 1))
    assert report.verdict is Verdict.ROOT_CAUSE
    assert report.ranks == (1,)


def test_watchdog_abort_is_a_victim() -> None:
    """SIGABRT with a text about a collective's time-out is an effect; one with a device fault is a cause."""
    watchdog = STEPS + (
        "terminate called after throwing an instance of 'std::runtime_error'\n"
        "  what():  Watchdog caught collective operation timeout: WorkHCCL(SeqNum=7, OpType=ALLREDUCE)\n"
    )
    words = "Watchdog caught collective operation timeout"
    device = watchdog.replace(words, "reason=[hbm Multi-bit ECC error]")
    assert judged(told(0, watchdog, -6, at=9), told(1, OWN, 1, at=10)).ranks == (1,)
    report = judged(told(0, device, -6, at=11), told(1, watchdog, -6, at=10), told(2, watchdog, -6, at=10))
    assert report.ranks == (0,)


def test_rank_named_by_others_is_the_suspect() -> None:
    """When all who failed were waiting, the rank they name goes first, though it ran without a word."""
    wait = STEPS + "EI0002: The wait times out. Reason: no record came from remote rank [3].\n"
    quiet = [told(rank, STEPS, -15, stop=10.2) for rank in (2, 3)]
    report = judged(told(0, wait, 1), told(1, wait, -15, stop=10.2), *quiet)
    assert report.verdict is Verdict.SUSPECTS
    assert report.ranks == (3,)
    assert report.root_cause.rank == 3
    assert 3 not in [failure.rank for failure in report.failures]
    assert "is the root cause" not in report.text


def test_place_that_hccl_located_is_the_suspect() -> None:
    """The address and device of HCCL's own finding lead to a rank, also on another node."""
    found = TIMED_OUT + (
        "    Cluster Exception Location[IP/ID]:[10.0.0.2/1], ExceptionType:[Heartbeat Lost Occurred]\n"
    )
    there = [told(rank, STEPS, -15, stop=10.5, node=1) for rank in (8, 9)]
    assert judged(told(0, found, 1), told(1, found, 1), *there).ranks == (9,)


def test_only_rank_without_the_time_out_is_the_suspect() -> None:
    """If every other rank waited in vain, the one that did not say so is looked at."""
    quiet = told(2, STEPS, -15, at=3, stop=10.4)
    report = judged(told(0, TIMED_OUT, 1), told(1, TIMED_OUT, 1), quiet, told(3, TIMED_OUT, 1))
    assert report.verdict is Verdict.SUSPECTS
    assert report.ranks == (2,)


def test_odd_operation_among_victims_alike() -> None:
    """All ranks time out alike, but one at another operation: masked numbers must not hide that."""
    said = "[Rank {r}] Watchdog caught collective operation timeout: Work(SeqNum={n}, OpType=ALLREDUCE)\n"
    ranks = [told(r, STEPS + said.format(r=r, n=7 if r != 2 else 6), 1) for r in range(4)]
    assert judged(*ranks).ranks == (2,)
    report = judged(*(told(r, STEPS + said.format(r=r, n=7), 1) for r in range(4)))
    assert report.verdict is Verdict.UNCLEAR
    assert report.ranks == ()


@pytest.mark.parametrize("code", [-9, -15, 143, 137])
def test_killed_alike_is_stopped_from_outside(code: int) -> None:
    """One signal that reached all ranks and that we did not send points outside the job."""
    report = judged(*(told(rank, STEPS, code) for rank in range(4)))
    assert report.verdict is Verdict.STOPPED
    assert report.ranks == ()
    assert report.root_cause.rank == -1
    crashed = judged(*(told(rank, STEPS, -11) for rank in range(4)))
    assert crashed.verdict is Verdict.FAILED_ALIKE


def test_both_ends_of_a_link() -> None:
    """A transfer that failed between two ranks without faults of their own names both."""
    text = STEPS + "EI0013: error cqe, status 12, remote rank 1\n"
    others = told(2, TIMED_OUT, 1, at=11)
    report = judged(told(0, text, 1), told(1, TIMED_OUT, 1, at=11), others)
    assert report.verdict is Verdict.LINK
    assert report.ranks == (0, 1)
    dead = judged(told(0, text, 1), told(1, OWN, 1, at=9), others)
    assert dead.verdict is Verdict.ROOT_CAUSE
    assert dead.ranks == (1,)


def test_ranks_that_leave_together_follow_the_one_with_a_reason() -> None:
    """Several silent ends with one code follow the rank with the same code that said why."""
    report = judged(told(0, STEPS, 17, at=10), told(1, OWN, 17, at=10.5), told(2, STEPS, 17, at=10))
    assert report.ranks == (1,)


@pytest.mark.parametrize(
    "sentence",
    [
        "FileNotFoundError: waited 600 s for the file of the local leader, rank 0 did not write it",
        "RuntimeError: Timed out after 301 seconds waiting for clients. 3/4 clients joined.",
        "KeyError: peers not loaded: worker 2 never reported",
        "AssertionError: 超时：等待其他进程 600 秒",
    ],
)
def test_exception_about_waiting_is_judged_by_its_sentence(sentence: str) -> None:
    """A Python exception of any class that speaks of others who did not come is an effect."""
    waiting = OWN.replace("ValueError: boom-42", sentence)
    assert judged(told(0, waiting, 1), told(3, OWN, 1, at=12)).ranks == (3,)


def test_local_fault_in_a_collective_is_a_cause() -> None:
    """The word collective in an error about shapes or types excuses nobody."""
    shape = OWN.replace("ValueError: boom-42", "ValueError: all_gather got tensors of shape [3] and [4]")
    report = judged(told(0, shape, 1), told(1, LOST_PEER, 1, at=10.3))
    assert report.verdict is Verdict.ROOT_CAUSE
    assert report.ranks == (0,)


def test_what_is_raised_on_the_way_out_is_an_effect() -> None:
    """A second exception after a time-out does not make its rank the cause."""
    out = TIMED_OUT + 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: late\n'
    assert judged(told(0, out, 1, at=9), told(1, OWN, 1, at=10)).ranks == (1,)


def test_words_after_our_sigterm_are_effects() -> None:
    """A traceback that a rank prints when it is stopped never makes it the cause."""
    report = judged(told(3, STEPS, 7, at=9), told(1, OWN, 9, at=9.5, stop=9.2), told(0, STEPS, 1, at=9.4))
    assert report.ranks == (3,)
    assert report.exit_code == 7
    assert "ended badly while being stopped" in report.text


def test_last_rank_alive_is_the_suspect() -> None:
    """When all others have ended well, the one that never ends is looked at."""
    report = judged(told(0, STEPS, 0), told(1, STEPS), told(2, STEPS, 0))
    assert report.verdict is Verdict.SUSPECTS
    assert report.ranks == (1,)


@pytest.mark.parametrize(
    ("end", "verdict", "code"),
    [
        (End.STOPPED, Verdict.STOPPED, 143),
        (End.STALLED, Verdict.STALLED, 124),
        (End.TIME_LIMIT, Verdict.TIME_LIMIT, 124),
        (End.INTERNAL_ERROR, Verdict.INTERNAL_ERROR, 70),
    ],
)
def test_limits_and_stops_have_their_own_verdicts(end: End, verdict: Verdict, code: int) -> None:
    """A stop that somebody asked for, a stall and a limit are said as such."""
    ranks = [told(rank, STEPS, -15, at=10 - rank, stop=11) for rank in range(3)]
    report = judged(*ranks, end=end, reason="because")
    assert report.verdict is verdict
    assert report.exit_code == code
    assert "because" in report.text


def test_scheduler_that_dies_first() -> None:
    """MindSpore's scheduler can be the cause; it is called by its name, and no rank is blamed."""
    report = judged(told(-1, "Address already in use\n", 1, at=9), told(0, LOST_PEER, 1))
    assert report.verdict is Verdict.AUXILIARY
    assert report.ranks == ()
    assert report.root_cause.name == "scheduler"
    assert "rank -1" not in report.text


def test_lost_node() -> None:
    """A node that nobody hears of is the cause unless a rank elsewhere failed by itself."""
    lost = LostNode(node_rank=1, node="worker-1", ranks=(8, 9), reason="no sign for 30 s", time=NOON)
    base = Evidence(job_id="job", log_dir=told(0).log_path.parent, nnodes=2, lost=(lost,))
    report = judge(replace(base, ranks=(told(0, TIMED_OUT, 1),)))
    assert report.verdict is Verdict.NODE_LOST
    assert report.root_cause.name == "node 1"
    assert judge(replace(base, ranks=(told(0, OWN, 1),))).verdict is Verdict.ROOT_CAUSE


def test_error_recorded_by_the_script() -> None:
    """An exception that a script's recorder wrote down counts, though its log holds nothing of it."""
    raised = RaisedError(message="boom", traceback=OWN, time=NOON + 9)
    report = judged(replace(told(1, STEPS, 1), raised=raised), told(0, LOST_PEER, 1, at=9.5))
    assert report.ranks == (1,)
    assert "ValueError: boom-42" in report.text


def test_report_is_data() -> None:
    """The report can be pickled, and its JSON has every field of its schema."""
    report = judged(told(0, OWN, 1), told(1, STEPS, -15, stop=10.3))
    assert pickle.loads(pickle.dumps(report)) == report
    data = json.loads(report.to_json())
    assert (data["schema"], data["verdict"], data["ranks"]) == (1, "root_cause", [0])
    assert (data["stopped_ranks"], data["attempt"], data["text"]) == ([1], 0, report.text)
    (failure,) = data["failures"]
    assert set(failure) == {
        "rank", "node", "device", "pid", "exit_code", "signal", "first_error_time", "end_time", "code",
        "meaning", "remedy", "role", "log_path", "excerpt",
    }  # fmt: skip
    assert failure["first_error_time"][-6] in "+-"
    assert failure["code"] is None
    assert "ValueError: boom-42" in failure["excerpt"]


_TEXTS = st.sampled_from([OWN, LOST_PEER, TIMED_OUT, STEPS, ""])
_ENDS = st.sampled_from([0, 1, 1, 3, -9, -11, -6, -15])
_SAID = st.lists(st.tuples(_TEXTS, _ENDS, st.floats(0, 100), st.booleans()), min_size=1, max_size=8)


@settings(deadline=None)  # the machine may be busy
@given(_SAID, st.integers())
def test_judgement_does_not_depend_on_the_order_of_its_input(
    said: list[tuple[str, int, float, bool]], seed: int
) -> None:
    """Whatever the ranks did, the verdict is the same for any order, and after a trip to another node."""
    ranks = [
        told(rank, text, code, at=at, stop=101 if stopped else None)
        for rank, (text, code, at, stopped) in enumerate(said)
    ]
    one = judged(*ranks)
    random.Random(seed).shuffle(ranks)
    other = judged(*ranks)
    assert (one.verdict, one.ranks, one.why, one.text) == (other.verdict, other.ranks, other.why, other.text)
    assert unpack(pack([read_rank(rank) for rank in ranks])) == tuple(read_rank(rank) for rank in ranks)
    well = all(rank.state is WorkerState.SUCCEEDED for rank in ranks)
    assert (one.verdict is Verdict.SUCCEEDED) == well
    assert (one.exit_code == 0) == well
