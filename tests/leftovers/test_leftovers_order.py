"""Who is told when: judged from facts alone."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk.leftovers.proc import Disposition, MarkedProcess
from davincirunsdk.leftovers.stop_order import Order, Seen

TERM = 1 << (signal.SIGTERM - 1)
BACKGROUND = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGQUIT - 1)
DEFAULT = Disposition(0, 0, 0)
CATCHES = Disposition(0, 0, TERM)
DEAF = Disposition(0, TERM, 0)
IN_BACKGROUND = Disposition(0, BACKGROUND, TERM)


def one(
    pid: int,
    above: int = 0,
    *,
    command: str = "python",
    signals: Disposition | None = DEFAULT,
    waits: bool = False,
    reads: int = 0,
    writes: int = 0,
    place: str = "",
    also_writes: int = 0,
) -> Seen:
    """Make what a look shows of a process."""
    process = MarkedProcess(pid, pid, above or 1, pid, pid, "S", 1, command)
    return Seen(
        process,
        above,
        (place.encode(),) if place else (),
        signals,
        waits,
        reads,
        frozenset({writes} - {0}),
        frozenset({also_writes} - {0}),
    )


def due(*seen: Seen, told: tuple[int, ...] = (), half_over: bool = False) -> set[int]:
    """List the pids whose turn it is."""
    order = Order(
        {each.process.pid: each for each in seen}, told={(pid, pid) for pid in told}, half_over=half_over
    )
    return {process.pid for process in order.due()}


def test_the_top_first_then_what_is_below() -> None:
    """A helper waits for its rank's end, or for half the grace period."""
    rank, helper, below = one(1, signals=CATCHES), one(2, 1), one(3, 2)
    assert due(rank, helper, below) == {1}
    assert due(rank, helper, below, told=(1,)) == set()
    assert due(helper._replace(above=0), below) == {2}
    assert due(rank, helper, below, told=(1,), half_over=True) == {2, 3}


def test_what_a_trap_starts_is_not_told_with_its_shell() -> None:
    """`trap 'cp checkpoint /obs' TERM`: the copy would die of the signal that it is made for."""
    shell = one(1, command="bash", signals=CATCHES, waits=True)
    rank, copy = one(2, 1, signals=CATCHES), one(9, 1)
    seen = {each.process.pid: each for each in (shell, rank, copy)}
    assert {process.pid for process in Order(seen, began=5).due()} == {1, 2}
    assert {process.pid for process in Order(seen, began=5, half_over=True).due()} == {1, 2, 9}


@pytest.mark.parametrize("signals", [DEFAULT, DEAF])
def test_who_only_waits_is_told_together_with_its_child(signals: Disposition) -> None:
    """A shell, conda run, numactl: its child is the rank, and that one's helpers come later."""
    wrapper, rank, helper = one(1, signals=signals, waits=True), one(2, 1, signals=CATCHES), one(3, 2)
    assert due(wrapper, rank, helper) == {1, 2}
    assert due(wrapper, rank, helper, told=(1, 2), half_over=True) == {3}


@pytest.mark.parametrize("command", ["bash", "sh", "dash", "zsh"])
def test_a_trap_hides_the_signal_from_a_child_in_the_foreground_only(command: str) -> None:
    """A shell runs the trap after its foreground child; a child in the background it can signal itself."""
    shell = one(1, command=command, signals=CATCHES, waits=True)
    assert due(shell, one(2, 1, signals=CATCHES)) == {1, 2}
    assert due(shell, one(2, 1, signals=IN_BACKGROUND)) == {1}
    assert due(shell, one(2, 1, signals=None)) == {1}
    assert due(shell._replace(signals=IN_BACKGROUND), one(2, 1, signals=IN_BACKGROUND), half_over=True) == {
        1,
        2,
    }


def test_a_program_with_a_handler_that_waits_is_no_shell() -> None:
    """Whether it passes the signal on cannot be seen: its child has time until half the grace period."""
    wrapper, child = one(1, command="python3", signals=CATCHES, waits=True), one(2, 1)
    assert due(wrapper, child) == {1}
    assert due(wrapper, child, told=(1,), half_over=True) == {2}


@pytest.mark.parametrize("command", ["timeout", "tini", "uv", "srun", "mpirun"])
def test_who_passes_signals_on_is_told_alone(command: str) -> None:
    """Nothing below it is told while it lives, also not at half the grace period."""
    wrapper, rank, helper = one(1, command=command, signals=CATCHES), one(2, 1), one(3, 2)
    assert due(wrapper, rank, helper) == {1}
    assert due(wrapper, rank, helper, told=(1,), half_over=True) == set()
    assert due(rank._replace(above=0), helper) == {2}
    assert due(one(1, command=command), one(2, 1), half_over=True) == {1, 2}, (
        "without a handler it passes on nothing"
    )


def test_who_gives_its_children_another_place_is_a_launcher() -> None:
    """A launcher within the job is known by what it sets for its children, whatever its name."""
    launcher = one(1, signals=CATCHES, place="outer 0")
    ranks = [one(2, 1, place="inner 0"), one(3, 1, place="inner 1")]
    assert due(launcher, *ranks) == {1}
    assert due(launcher, *ranks, told=(1,), half_over=True) == set()
    assert due(launcher, *(rank._replace(place=launcher.place) for rank in ranks), half_over=True) == {
        1,
        2,
        3,
    }


def test_a_filter_waits_for_its_writers() -> None:
    """`rank | tee`: tee is told neither with the shell nor at half the grace period."""
    shell = one(1, command="bash", waits=True)
    rank, tee = one(2, 1, signals=CATCHES, writes=7), one(3, 1, command="tee", reads=7, writes=9)
    assert due(shell, rank, tee) == {1, 2}
    assert due(rank._replace(above=0), tee._replace(above=0), told=(2,), half_over=True) == set()


@pytest.mark.parametrize(("signals", "told"), [(DEFAULT, set()), (CATCHES, {3})])
def test_the_end_of_its_input_is_what_a_filter_ends_by(signals: Disposition, told: set[int]) -> None:
    """A signal that kills it would take what it has read; one that it handles does not."""
    tee = one(3, command="tee", reads=7, writes=9, signals=signals)
    order = Order({3: tee}, filters={(3, 3)}, half_over=True)
    assert {process.pid for process in order.due()} == told


def test_filters_in_a_row() -> None:
    """Each waits for the one before it, also for one that writes elsewhere than to its output."""
    rank = one(1, writes=7)
    tee, zip_ = one(2, reads=7, writes=9, also_writes=8), one(3, reads=8)
    assert due(rank, tee, zip_, half_over=True) == {1}
    order = Order({2: tee, 3: zip_}, filters={(2, 2)}, half_over=True)
    assert (order.due(), set(order.filters)) == ([], {(2, 2), (3, 3)})
    assert Order({3: zip_}, filters=order.filters, half_over=True).due() == []


def test_what_is_below_a_waiting_filter_and_writes_to_it_is_told() -> None:
    """`exec tee < <(rank)`: the filter is above its writer."""
    tee, rank = one(1, command="tee", reads=7, writes=9), one(2, 1, signals=CATCHES, writes=7)
    assert due(tee, rank) == {2}


def test_two_in_conversation_are_no_filters() -> None:
    """Who writes to each other would wait for each other for ever."""
    assert due(one(1, reads=7, writes=8), one(2, reads=8, writes=7)) == {1, 2}


def test_a_helper_that_is_fed_is_no_filter() -> None:
    """A rank that writes to its helper's input by another descriptor holds it off as its parent only."""
    rank, helper = one(1, also_writes=7), one(2, 1, reads=7)
    assert due(rank, helper) == {1}
    assert due(rank, helper, told=(1,), half_over=True) == {2}


_PROCESSES = st.lists(
    st.builds(
        lambda above, kind, signals, waits, reads, writes: (above, kind, signals, waits, reads, writes),
        st.integers(0, 8),
        st.sampled_from(["python", "bash", "timeout", "tee"]),
        st.sampled_from([DEFAULT, CATCHES, DEAF, IN_BACKGROUND, None]),
        st.booleans(),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@given(_PROCESSES)
def test_whatever_a_job_looks_like_somebody_is_told(
    rows: list[tuple[int, str, Disposition, bool, int, int]],
) -> None:
    """Whoever is not told then is below a launcher, or a filter; circles of reused pids included."""
    seen = {
        pid: one(pid, above, command=command, signals=signals, waits=waits, reads=reads, writes=writes)
        for pid, (above, command, signals, waits, reads, writes) in enumerate(rows, 1)
    }
    order = Order(seen, half_over=True)
    now = {process.pid for process in order.due()}
    for pid, each in seen.items():
        left = order.is_left_to_launcher(each.process) or order.is_filter(each.process)
        assert (pid in now) or left
    early = {process.pid for process in Order(seen).due()}
    assert early <= now
