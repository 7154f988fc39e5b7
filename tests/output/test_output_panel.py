"""The notebook panel as HTML and text, and the lines it has room for."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from output_helpers import Job, worker

from davincirunsdk.output.panel import Panel
from davincirunsdk.output.tail import Tail
from davincirunsdk.output.types import Snapshot
from davincirunsdk.types import JobState, WorkerState

NASTY = "</div><script>alert('x')</script> & \"quoted\" <b>bold"


class Page(HTMLParser):
    """What a browser would make of HTML."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "input":
            self.open.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def filled(*lines: tuple[int, str]) -> Tail:
    tail = Tail(lines=100, size=10_000)
    for rank, line in lines:
        tail.add(rank, line)
    return tail


def test_everything_is_escaped() -> None:
    """Whatever workers print, and however a job is called, is text in the page and never markup."""
    job = Job(
        workers=(worker(0, last_line=NASTY, name=NASTY), worker(1)), report=NASTY, state=JobState.FAILED
    )
    panel = Panel("key", job.names)
    for page in (
        panel.html(job.snapshot(), filled((0, NASTY)), [(1, NASTY)]),
        panel.choice(),
        panel.moved(job.snapshot())[0],
    ):
        read = Page(page)
        assert read.open == []
        assert not {"script", "b"} & set(read.tags) - {"b"}
        assert "<script" not in page
    read = Page(panel.html(job.snapshot(), filled((0, NASTY)), [(1, NASTY)]))
    assert read.text.count(NASTY) == 6, "name, last line, report, label, line, bar"


def test_the_last_line_is_readable() -> None:
    """Colours and window titles of a worker are left out of the table, as they are of the lines."""
    last = "\x1b]0;title\x07\x1b[31mred\x1b[0m end"
    job = Job(workers=(worker(0, last_line=last),))
    html = Panel("key", job.names).html(job.snapshot(), filled(), [])
    assert "red end" in Page(html).text
    assert "\x1b" not in html


def test_failure_is_marked() -> None:
    """A failed worker's row is coloured, and the report is there."""
    job = Job(
        workers=(
            worker(0, state=WorkerState.STOPPED, exit_code=-15),
            worker(1, state=WorkerState.FAILED, exit_code=3),
        ),
        report="root cause: rank 1",
        state=JobState.FAILED,
    )
    panel = Panel("key", job.names)
    page = panel.html(job.snapshot(), filled(), [])
    assert page.count('<tr style="background:rgba') == 1
    for shown in (page, panel.plain(job.snapshot(), filled(), [])):
        assert "root cause: rank 1" in shown
        assert "SIGTERM" in shown


@pytest.mark.parametrize("state", list(JobState))
def test_an_unfinished_job_has_a_time(state: JobState) -> None:
    """A panel that says RUNNING says when, for it outlives its kernel; that of an ended job is final."""
    job = Job(state=state)
    panel = Panel("key", job.names)
    for shown in (panel.html(job.snapshot(), filled(), []), panel.plain(job.snapshot(), filled(), [])):
        assert ("as of 2" in shown) == (state in (JobState.PENDING, JobState.RUNNING, JobState.STOPPING))


def test_colours_are_readable() -> None:
    """Every text colour has a contrast of at least 3.4 on white and on the grey of dark themes."""
    job = Job(
        workers=tuple(worker(rank, state=state) for rank, state in enumerate([*WorkerState, *WorkerState])),
        state=JobState.FAILED,
        report="report",
    )
    lines = filled(*((rank, "x") for rank in job.names))
    page = Panel("key", job.names).html(job.snapshot(), lines, [])
    colours = set(re.findall(r"[; \"]color:(#\w+)", page)) - {"#fff"}
    assert len(colours) >= 10
    for colour in colours:
        for ground in ("#ffffff", "#1e1e1e"):
            assert contrast(colour, ground) >= 3.4, (colour, ground)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21; WCAG 2.1, section 1.4.3."""

    def luminance(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        red, green, blue = (
            part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_plain_text() -> None:
    """The text has a short table and each line once, with its rank; no line stands in the table too."""
    job = Job(workers=(worker(0, last_line="b"), worker(1, state=WorkerState.SUCCEEDED, exit_code=0)))
    text = Panel("key", job.names).plain(
        job.snapshot(), filled((0, "a <b>"), (1, "x"), (0, "b")), [(1, "50%")]
    )
    text = re.sub(r"1:02:\d\d", "1:02:03", text)
    assert re.sub(r"as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "as of now", text).splitlines() == [
        "job job-1: RUNNING, 2 workers on this node, logs in /logs, as of now",
        "        state      pid   time     exit",
        "rank 0  RUNNING    4000  1:02:03",
        "rank 1  SUCCEEDED  4001  1:02:03  0",
        "[rank 0] a <b>",
        "[rank 1] x",
        "[rank 0] b",
        "[rank 1] 50%",
    ]


def test_what_is_left_out_is_said() -> None:
    """Lines that have no room are counted in both, with the folder that has them."""
    job = Job()
    tail = Tail(lines=10, size=10_000)
    for number in range(1000):
        tail.add(0, f"{number:09}")
    tail.leave_out(234, 2340)
    said = "... 1224 lines (12.2 kB) left out of the display; all is in /logs"
    panel = Panel("key", job.names)
    assert said in panel.plain(job.snapshot(), tail, [])
    assert said in Page(panel.html(job.snapshot(), tail, [])).text


def test_choice_of_ranks() -> None:
    """There is one button per rank and one for all; a single rank needs none."""
    assert Page(Panel("key", {0: "rank 0", 1: "rank 1", -1: "scheduler"}).choice()).tags.count("input") == 4
    assert Panel("key", {0: "rank 0"}).choice() == ""


def test_tail_keeps_the_quiet_rank() -> None:
    """The rank that says most gives up its oldest lines; a quiet rank keeps its own."""
    tail = Tail(lines=100, size=100_000)
    tail.add(1, "quiet")
    for number in range(1000):
        tail.add(0, str(number))
    lines = tail.lines()
    assert lines[0] == (1, "quiet")
    assert lines[1:] == [(0, str(number)) for number in range(901, 1000)]
    assert tail.lines_left_out == 901


def test_tail_is_bounded_in_characters() -> None:
    """Few long lines are too many as well."""
    tail = Tail(lines=100, size=1000)
    for _ in range(50):
        tail.add(0, "x" * 100)
    assert len(tail.lines()) == 10


def test_notices_do_not_pile_up() -> None:
    """A notice takes the place of one just before it; after a line of the rank it is a new one."""
    tail = Tail(lines=10, size=1000)
    for number in range(3):
        tail.add_notice(0, f"notice {number}")
        tail.add(1, str(number))
    tail.add(0, "line")
    tail.add_notice(0, "notice 3")
    assert [line for rank, line in tail.lines() if rank == 0] == ["notice 2", "line", "notice 3"]
    assert tail.lines_left_out == 0


def test_shortened_tail_counts_on() -> None:
    """A shorter copy counts what it leaves out on top of the earlier count; notices do not count."""
    tail = Tail(lines=10, size=1000)
    tail.add_notice(0, "notice")
    for number in range(12):
        tail.add(0, str(number))
    assert tail.lines_left_out == 2
    short = tail.shortened(lines=4, size=1000)
    assert short.lines() == [(0, str(number)) for number in range(8, 12)]
    assert short.lines_left_out == 8
    assert tail.shortened(lines=10, size=1000) is tail


def test_the_run_report_is_linked_when_it_is_written() -> None:
    """While the job runs its name is told, at the end it is a link; what is in the name stays text."""
    page = Path("/tmp/<b>run.html")
    running, over = (
        Panel("key", {0: "rank 0"}).html(
            Snapshot(job_id="j", state=state, workers=(), log_dir=Path("log"), page=page),
            Tail(lines=5, size=500),
            [],
        )
        for state in (JobState.RUNNING, JobState.SUCCEEDED)
    )
    assert "<a href" not in running
    assert "at the end" in running
    assert 'href="file:///tmp/%3Cb%3Erun.html"' in over
    assert "<b>run" not in over
