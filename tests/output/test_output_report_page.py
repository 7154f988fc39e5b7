"""The run report: what events make of a page, whatever workers print, however many ranks there are."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk.output.charts import span, thinned
from davincirunsdk.output.report_page import ranges, report_page
from davincirunsdk.output.run_record import Point, read_record, record_of

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 1_790_000_000.0
OURS = frozenset(
    "html head meta title style body h1 h2 span dl dt dd b div pre details summary svg line text rect"
    " polyline p i table tr th td a".split()
)


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def event(after: float, kind: str, rank: int | None = None, **more: object) -> dict[str, object]:
    """An event as in the events file."""
    line: dict[str, object] = {"v": 1, "time": BEGAN + after, "kind": kind, "job": "job", "node": "n0"}
    return line | ({} if rank is None else {"rank": rank}) | more


def failed_run(ranks: int, culprit: int, words: str = "boom") -> list[dict[str, object]]:
    """A run in which one rank fails and the others are stopped."""
    failure = {
        "rank": culprit, "node": "n0", "device": 0, "pid": 7, "exit_code": 3, "signal": None, "code": words,
        "meaning": words, "remedy": words, "excerpt": [words], "first_error_time": None, "role": "primary",
    }  # fmt: skip
    report = {"verdict": "root_cause", "why": words, "text": words, "failures": [failure], "exit_code": 3}
    return [
        *(event(0, "started", rank, pid=1000 + rank) for rank in range(ranks)),
        *(
            event(step, "progress", rank, progress={"step": step, "total": 50, "loss": 2 - step / 50})
            for step in range(1, 30)
            for rank in range(ranks)
        ),
        event(30, "exited", culprit, exit_code=3, pid=1000 + culprit),
        event(30.01, "stopping", detail=words),
        *(event(31, "exited", rank, exit_code=-15) for rank in range(ranks) if rank != culprit),
        event(31.5, "finished", exit_code=3, detail=words, report=report),
    ]


def page_of(events: list[dict[str, object]]) -> str:
    """The page of these events."""
    record = record_of(events)
    assert record is not None
    return report_page(record)


@settings(max_examples=60, deadline=None)
@given(words=st.text(max_size=60) | st.sampled_from(["</style><script>alert(1)</script>", "\"'><img src=x>"]))
def test_nothing_a_worker_prints_becomes_markup(words: str) -> None:
    """Elements and attributes are the same whatever the words are, and the words are there to be read."""
    page, plain = Page(page_of(failed_run(2, 1, words))), Page(page_of(failed_run(2, 1, "x")))
    assert page.elements == plain.elements <= OURS
    assert page.attributes == plain.attributes
    assert not [name for name in page.attributes if name.startswith("on")]


def test_the_page_needs_nothing_else() -> None:
    """No script, no address outside: it opens from disk without a network."""
    page = page_of(failed_run(8, 3))
    assert "script" not in Page(page).elements
    assert not re.search(r"(src|href)=\"?https?:", page)
    assert "default-src 'none'" in page


def test_who_failed_and_who_was_stopped_are_told_apart() -> None:
    """One rank failed by itself, the others were stopped by the launcher; the verdict is in the head."""
    page = page_of(failed_run(4, 2))
    assert page.count('<rect class="bad"') == 1
    assert page.count('<rect class="stop"') == 3
    assert "failed, exit code 3" in page
    assert "stopped by the launcher, SIGTERM" in page


def test_a_second_failure_is_not_taken_for_a_stopped_rank() -> None:
    """Whom the report names failed by itself, though the stop had begun."""
    events = failed_run(4, 2)
    report: Any = events[-1]["report"]
    report["failures"].append({**report["failures"][0], "rank": 0})
    assert page_of(events).count('<rect class="bad"') == 2


def test_attempts_stand_beside_each_other() -> None:
    """A restarted rank has two lives in one row, and the restart is marked."""
    first = failed_run(2, 0)[:-1]
    again = [
        event(
            40, "restarting", detail="attempt 0 failed after 0:00:30: rank 0; restart 1 of at most 2 in 10 s"
        ),
        *(event(50, "started", rank, pid=2000 + rank) for rank in range(2)),
        *(event(60, "exited", rank, exit_code=0) for rank in range(2)),
        event(60, "finished", exit_code=0, detail="SUCCEEDED"),
    ]
    record = record_of([*first, *again])
    assert record is not None
    assert record.attempts == 2
    page = report_page(record)
    assert page.count("<rect") == 4
    assert '<line class="restart"' in page


def test_curves_are_not_drawn_across_a_restart() -> None:
    """Steps and losses begin anew with each attempt: no line leads back from the last to the first."""
    first = failed_run(1, 0)[:-1]
    again = [
        event(
            40, "restarting", detail="attempt 0 failed after 0:00:30: rank 0; restart 1 of at most 2 in 10 s"
        ),
        event(50, "started", 0, pid=2),
        *(event(50 + step, "progress", 0, progress={"step": step}) for step in range(1, 9)),
        event(60, "exited", 0, exit_code=0),
        event(60, "finished", exit_code=0),
    ]
    page = page_of([*first, *again])
    assert page.count("<title>rank 0: 8</title></polyline>") == 2


def test_who_failed_in_an_attempt_before_is_told() -> None:
    """The launcher writes its stop down just before the end that made it stop, and keeps no report of it."""
    record = record_of(
        [
            *(event(0, "started", rank, pid=rank + 1) for rank in range(3)),
            event(30, "stopping", detail="rank 1 failed; still running: rank 0, rank 2"),
            event(30.001, "exited", 1, exit_code=1),
            event(31, "exited", 0, exit_code=-15),
            event(31, "exited", 2, exit_code=1),
            event(32, "restarting", detail="attempt 0 ended: rank 1; restart 1 of at most 2 in 2 s"),
            *(event(40, "started", rank, pid=rank + 9) for rank in range(3)),
        ]
    )
    assert record is not None
    assert [rank.lives[0].stopped for rank in record.ranks] == [True, False, True]
    assert record.attempts == 2
    page = Page(report_page(record)).text
    assert "stopping after 30 s: rank 1 failed" in page
    assert "stopped by the launcher" in page


def test_lengths_of_time_are_round() -> None:
    """Nobody needs to be told of no seconds."""
    assert [span(seconds) for seconds in (600, 630, 7200, 9000)] == [
        "10 min",
        "10 min 30 s",
        "2 h",
        "2 h 30 min",
    ]


def test_a_thousand_ranks_stay_readable() -> None:
    """Ranks of one fate share a row, the odd one has its own, and the page is far below 5 MB."""
    page = page_of(failed_run(1024, 700))
    assert len(page) < 1_000_000
    assert page.count("<rect") == 2
    assert "ranks 0-699, 701-1023" in page
    assert ">rank 700</text>" in page


def test_events_cut_anywhere_make_a_page(tmp_path: Path) -> None:
    """A launcher that was killed leaves a cut last line: the run is shown as far as it is known."""
    lines = "".join(json.dumps(one) + "\n" for one in failed_run(2, 1))
    file = tmp_path / "job-events.jsonl"
    (tmp_path / "job-proc-rank-1-device-1.txt").write_bytes(b"last words \xff\n")
    for size in range(120, len(lines), 997):
        file.write_text(lines[:size])
        record = read_record(file)
        assert not record.finished
        assert record.tail(1) == ("last words \N{REPLACEMENT CHARACTER}",)
        assert "its launcher was lost" in report_page(record)
    file.write_text("nothing\n")
    with pytest.raises(ValueError, match="holds no event"):
        read_record(file)


@pytest.mark.parametrize("odd", [None, "x", [], {}, True, float("nan"), {"step": "a", "loss": None}])
def test_odd_values_are_left_out(odd: object) -> None:
    """A value of another kind than it should be is not drawn, and breaks nothing."""
    events = [
        event(0, "started", 0, pid=odd),
        event(1, "progress", 0, progress=odd),
        event(2, "odd", detail=odd),
    ]
    assert "<svg" in page_of([*events, {"kind": odd}, {"time": odd, "kind": "x"}])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3000))
def test_thinned_curves_keep_their_peaks(values: list[float]) -> None:
    """However many points there are, the lowest and the highest are drawn, in order."""
    points = [Point(time=float(place), value=value) for place, value in enumerate(values)]
    kept = thinned(points)
    assert len(kept) <= 241
    assert {min(values), max(values)} <= {point.value for point in kept}
    assert [point.time for point in kept] == sorted(point.time for point in kept)


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_all_ranks(ranks: set[int]) -> None:
    """What is written is the set and nothing else."""
    written = ranges(ranks)
    back = set()
    for piece in filter(None, written.split(", ")):
        first, _, last = piece.partition("-")
        back |= set(range(int(first), int(last or first) + 1))
    assert back == ranks
