"""The live view on a real pseudo-terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from output_helpers import Job, Pty, say, worker

from davincirunsdk.output import choose_sink
from davincirunsdk.types import JobState, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk.output import Sink

TIMEOUT = 5.0


@pytest.fixture
def pty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Pty(columns=100)
    yield terminal
    terminal.close()


def open_live(pty: Pty, job: Job) -> Sink:
    sink = choose_sink(names=job.names, snapshot=job.snapshot, stream=pty.stream, live=True)
    assert sink is not None
    return sink


def test_table_above_the_lines(pty: Pty) -> None:
    """The view has a row per worker, and the newest lines below, and is renewed in its place."""
    job = Job()
    sink = open_live(pty, job)
    for number in range(50):
        say(sink, number % 2, b"line %d\n" % number)
    pty.wait_for("[rank 1] line 49")
    job.workers = (worker(0, last_line="[bold]step[/bold] \u4e2d"), worker(1, state=WorkerState.STOPPING))
    pty.wait_for("STOPPING")
    rows = pty.screen()
    assert rows[0] == ""
    assert rows[1].rstrip() == "job job-1: RUNNING, 2 workers on this node, logs in /logs"
    row = r"rank 0 +RUNNING +4000 +1:02:\d\d +1\.2 MB +\[bold\]step\[/bold\] \u4e2d *"
    assert re.fullmatch(row, rows[3])
    assert len(rows) <= 23
    assert rows[-1] == "[rank 1] line 49"
    sink.close(TIMEOUT)


def test_a_last_line_does_not_act_on_the_terminal(pty: Pty) -> None:
    """Window titles, colours and moves of the cursor in a worker's last line stay out of the table."""
    job = Job()
    job.workers = (worker(0, last_line="\x1b]0;owned\x07\x1b[31mred\x1b[0m \x1b[2Aend\x9b1J."), worker(1))
    sink = open_live(pty, job)
    say(sink, 1, b"something\n")
    pty.wait_for("red end")
    assert b"owned" not in pty.raw
    assert [row.split()[-2:] for row in pty.screen() if row.startswith("rank 0")] == [["red", "end."]]
    sink.close(TIMEOUT)


def test_end(pty: Pty) -> None:
    """When the job ends, the newest lines and the final table stay on the terminal."""
    job = Job()
    sink = open_live(pty, job)
    say(sink, 0, b"".join(b"%d\n" % number for number in range(2000)))
    pty.wait_for("[rank 0] 1999")
    say(sink, 1, b"last words")
    job.state = JobState.FAILED
    job.workers = (worker(0, state=WorkerState.STOPPED), worker(1, state=WorkerState.FAILED, exit_code=-9))
    sink.close(TIMEOUT)
    pty.wait_for("SIGKILL")
    rows = pty.screen()
    assert rows[0] == "... 1501 lines are not shown here; all is in /logs"
    assert rows[1:501] == [*(f"[rank 0] {number}" for number in range(1501, 2000)), "[rank 1] last words"]
    assert rows[-1].split()[:4] == ["rank", "1", "FAILED", "4001"]


def test_clock_goes_on(pty: Pty) -> None:
    """The table is renewed although nothing is said."""
    sink = open_live(pty, Job())
    pty.wait_for("RUNNING")
    first = pty.screen()
    pty.wait_until(lambda rows: len(rows) == len(first) and rows != first)
    sink.close(TIMEOUT)


def test_many_workers_on_a_small_terminal(pty: Pty) -> None:
    """The table leaves room for lines, and says how many rows it has no room for."""
    job = Job(workers=tuple(worker(rank) for rank in range(32)))
    sink = open_live(pty, job)
    say(sink, 31, b"a line\n")
    pty.wait_for("[rank 31] a line")
    rows = pty.screen()
    assert len(rows) <= 23
    assert "... and 24 more" in rows
    sink.close(TIMEOUT)


def test_no_terminal() -> None:
    """Where stdout is no terminal, the live view is the plain display."""
    job = Job()
    with open(os.memfd_create("stdout"), "w+") as file:
        sink = choose_sink(names=job.names, snapshot=job.snapshot, stream=file, live=True)
        assert sink is not None
        say(sink, 0, b"a\n")
        sink.close(TIMEOUT)
        file.seek(0)
        assert file.read() == "[rank 0] a\n"


def test_nothing_is_imported_before_it_is_needed() -> None:
    """A display on a pipe imports neither rich nor anything of notebooks."""
    program = (
        "import sys; from davincirunsdk.output import choose_sink;"
        "where = dict(stream=sys.stdout, live=True, output_notebook=True);"
        "sink = choose_sink(names={0: ''}, snapshot=None, **where);"
        "sink.close(1);"
        "print([name for name in sys.modules if name in ('rich', 'IPython')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=True, text=True
    )
    assert done.stdout == "[]\n"
