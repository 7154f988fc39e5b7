"""Lines in their order: steps that grow over epochs, bars that are not the training's, time left."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk.steps.drift import lagging
from davincirunsdk.steps.scan import StepScanner
from davincirunsdk.steps.shapes import read_line
from davincirunsdk.steps.tracker import Tracker
from davincirunsdk.types import Progress, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Iterable


def bar(step: int, total: int, label: str = "", more: str = "") -> str:
    """Return a state of tqdm's bar."""
    return f"{label}{100 * step // total:3d}%|██        | {step}/{total} [00:10<00:20,  2.00it/s{more}]"


def follow(lines: Iterable[str], seconds: float = 1.0) -> list[Progress]:
    """Track lines, one each `seconds`, and return the progress after each."""
    tracker, found = Tracker(), []
    for number, line in enumerate(lines):
        if (reading := read_line(line)) is not None:
            tracker.take(reading, 1000.0 + number * seconds)
        if tracker.progress is not None:
            found.append(tracker.progress)
    return found


PER_EPOCH = {
    "LossMonitor": lambda epoch, step: [f"epoch: {epoch + 1} step: {step}, loss is 0.5"],
    "Lightning": lambda epoch, step: [bar(step, 20, f"Epoch {epoch}: ", ", v_num=0")],
    "mmengine": lambda epoch, step: [f"Epoch(train) [{epoch + 1}][{step}/20]  time: 0.1  loss: 0.5"],
    "Keras": lambda epoch, step: [
        *([f"Epoch {epoch + 1}/3"] if step == 1 else []),
        f"{step}/20 ━━━━━━ 1s 2ms/step - loss: 0.5",
    ],
    "MindFormers": lambda epoch, step: [f"{{ Epoch:[ {epoch + 1}/ 3], step:[ {step}/ 20], loss: 0.5"],
    "ultralytics": lambda epoch, step: [
        f"  {epoch + 1}/3   9.6G   0.5   0.5   1.0   72   960: {bar(step, 20)}"
    ],
    "own loop": lambda epoch, step: [f"Epoch [{epoch + 1}/3], Step [{step}/20], Loss: 0.5"],
    "tqdm in each epoch": lambda epoch, step: [bar(step, 20)],
}


@pytest.mark.parametrize("name", PER_EPOCH)
def test_steps_grow_over_epochs(name: str) -> None:
    """What begins anew in each epoch is counted on."""
    lines = [line for epoch in range(3) for step in range(1, 21) for line in PER_EPOCH[name](epoch, step)]
    steps = [progress.step for progress in follow(lines)]
    assert steps == sorted(steps)
    assert sorted(set(steps)) == list(range(1, 61))


@pytest.mark.parametrize("name", ["Keras", "MindFormers", "ultralytics", "own loop"])
def test_total_over_all_epochs(name: str) -> None:
    """Where the number of epochs is known, so is the total, and the time left."""
    lines = [line for epoch in range(2) for step in range(1, 21) for line in PER_EPOCH[name](epoch, step)]
    last = follow(lines)[-1]
    assert (last.step, last.total, last.epoch, last.epochs) == (40, 60, 2, 3)
    assert last.step_seconds is not None
    assert last.eta == pytest.approx(20 * last.step_seconds)


def test_evaluation_bars_do_not_count() -> None:
    """HF Trainer's evaluation draws the same bar, of another length, while the training's stands still."""
    lines = [
        *(bar(step, 100) for step in range(1, 51)),
        *(bar(step, 13) for step in range(1, 14)),
        "{'eval_loss': 0.9, 'eval_runtime': 3.2, 'epoch': 0.5}",
        "{'loss': 0.25, 'grad_norm': 1.0, 'epoch': 0.5}",
        *(bar(step, 100) for step in range(51, 101)),
    ]
    found = follow(lines)
    assert [progress.step for progress in found] == sorted(progress.step for progress in found)
    assert {progress.total for progress in found} == {100}
    assert (found[-1].step, found[-1].loss) == (100, 0.25)


def test_a_short_bar_after_each_epoch_does_not_count() -> None:
    """A loop of one's own: a bar for training, a bar for evaluation, in turn."""
    lines = [
        line
        for _ in range(3)
        for line in [*(bar(n, 20) for n in range(1, 21)), *(bar(n, 5) for n in range(1, 6))]
    ]
    assert follow(lines)[-1].step == 60


def test_a_bar_of_preparation_gives_way() -> None:
    """A bar without words that was full before the training's began is not held on to."""
    short, long = [bar(n, 5) for n in range(1, 6)], [bar(n, 300) for n in range(1, 200)]
    assert (follow([*short, *long])[-1].step, follow([*short, *long])[-1].total) == (199, 300)
    # The training is the shorter one: seen when it has gone on for longer than an evaluation.
    found = follow([*(bar(n, 500) for n in range(1, 501)), *(bar(n, 90) for n in range(1, 81))], seconds=2.0)
    assert (found[-1].step, found[-1].total) == (80, 90)


def test_lines_and_a_bar_of_one_framework() -> None:
    """verl's lines count, its bar knows the total."""
    lines = []
    for step in range(1, 4):
        lines += [
            bar(step, 30, "Training Progress: "),
            f"step:{step} - actor/pg_loss:0.5 - timing_s/step:30.0",
        ]
    last = follow(lines)[-1]
    assert (last.step, last.total, last.loss, last.step_seconds, last.eta) == (3, 30, 0.5, 30.0, 27 * 30.0)


def test_time_per_step_is_measured_where_none_is_printed() -> None:
    """DeepSpeed prints every tenth step and no time."""
    last = follow([f"[Rank 0] step={10 * n}, skipped=0, lr=[1e-4]" for n in range(1, 9)], seconds=5.0)[-1]
    assert (last.step, last.step_seconds, last.stride) == (80, 0.5, 10)


def test_the_first_step_seen_is_no_stride() -> None:
    """A run that goes on from step 5000 does not report every 5000 steps."""
    first, second = follow([f" iteration {n}/ 9000 | lm loss: 1.0 |" for n in (5000, 5010)])
    assert (first.stride, second.stride) == (1, 10)


def test_a_step_back_of_an_absolute_count_is_believed() -> None:
    """A rank that went back to a checkpoint is where it says."""
    lines = [f" iteration {n}/ 100 | lm loss: 1.0 |" for n in (50, 51, 40)]
    assert follow(lines)[-1].step == 40


STEPS = st.lists(
    st.one_of(
        st.integers(1, 100).map(lambda n: f" iteration {n}/ 100 | lm loss: 1.5 |\n"),
        st.integers(1, 100).map(lambda n: f"\r{bar(n, 100)}"),
        st.sampled_from(
            ["epoch: 1 step: 5, loss is 0.5\n", "noise\n", "\n", "é€𝄞\r\n", "\x1b[32mgreen\x1b[0m\n"]
        ),
    ),
    max_size=30,
)


@given(parts=STEPS, cuts=st.lists(st.integers(0, 3000), max_size=20))
def test_cuts_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    """Output read in any pieces says the same; a bar counts before the next one ends it."""
    data = "".join(parts).encode()
    whole, pieces = StepScanner(lambda _: None), StepScanner(lambda _: None)
    whole.see(data)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        pieces.see(data[start:end])
    ours, theirs = whole.progress, pieces.progress
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert (ours.step, ours.total, ours.loss) == (theirs.step, theirs.total, theirs.loss)


def test_a_flood_is_looked_at_once_a_second() -> None:
    """Above a MiB a second only the last 64 KiB are looked at, and the last step is found there."""
    scanner = StepScanner(lambda _: None)
    block = b"".join(b"step %d loss 0.5\n" % n for n in range(1, 60_001))
    for _ in range(4):
        scanner.see(block)
    progress = scanner.progress
    assert progress is not None
    assert progress.step >= 60_000


def status(rank: int, step: int | None, stride: int = 1, step_seconds: float | None = 1.0) -> WorkerStatus:
    """Return a worker at a step."""
    progress = None
    if step is not None:
        progress = Progress(step=step, total=None, time=0.0, stride=stride, step_seconds=step_seconds)
    return WorkerStatus(
        rank=rank,
        local_rank=rank,
        device_id=rank,
        pid=1,
        state=WorkerState.RUNNING,
        exit_code=None,
        started=0.0,
        ended=None,
        log_path=Path("x"),
        log_bytes=0,
        last_output=None,
        last_line="",
        lost_bytes=0,
        name=f"rank {rank}",
        progress=progress,
    )


def test_ranks_that_lag_are_named() -> None:
    """The slowest first, by the median of those that tell."""
    workers = [
        status(0, 500),
        status(1, 430),
        status(2, 498),
        status(3, 100),
        status(4, None),
        status(5, 500),
    ]
    assert [(worker.rank, behind) for worker, behind in lagging(workers)] == [(3, 398), (1, 68)]
    assert [(worker.rank, behind) for worker, behind in lagging([status(0, 500), status(1, 430)])] == [
        (1, 70)
    ]


def test_a_report_that_is_due_is_no_lag() -> None:
    """Ranks print in turn, and not every step; of one that prints alone nothing is said."""
    assert lagging([status(0, 520, 20), status(1, 500, 20), status(2, 480, 20), status(3, 520, 20)]) == ()
    assert lagging([status(0, 500, 1, 0.01), status(1, 490, 1, 0.01)]) == ()
    assert lagging([status(0, 500), status(1, None)]) == ()
    assert lagging([]) == ()


def test_a_flood_of_short_lines_costs_little() -> None:
    """The worker waits for whoever looks: short lines are looked at by the thousand, not by the million."""
    told: list[Progress] = []
    scanner = StepScanner(told.append)
    began = time.thread_time()
    for number in range(160):
        scanner.see(b"%07d\n" % number * 8192)
    scanner.see(b"epoch: 1 step: 7, loss is 0.5\n")
    assert time.thread_time() - began < 2.0
    progress = scanner.progress
    assert progress is not None
    assert progress.step == 7
