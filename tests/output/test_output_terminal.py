"""Worker output on real pipes, files and pseudo-terminals, and on what else may stand for stdout."""

from __future__ import annotations

import gzip
import io
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest
from output_helpers import Job, Pty, say, screen, worker

from davincirunsdk.output import Sink, choose_sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from davincirunsdk.output.terminal import Writable

TIMEOUT = 5.0


def open_sink(stream: Writable, job: Job | None = None, **options: object) -> Sink:
    """Open a sink on a stream."""
    job = job or Job()
    sink = choose_sink(names=job.names, snapshot=job.snapshot, stream=stream, **options)  # type: ignore[arg-type]
    assert sink is not None
    return sink


def shown(*said: tuple[int, bytes], job: Job | None = None, **options: object) -> list[str]:
    """Let workers say something to a sink on a file, and return the lines in it."""
    with open(os.memfd_create("stdout"), "w+", encoding="utf-8") as file:
        sink = open_sink(file, job, **options)
        for rank, data in said:
            say(sink, rank, data)
        sink.close(TIMEOUT)
        file.seek(0)
        return file.read().splitlines()


@pytest.fixture
def pty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Pty()
    yield terminal
    terminal.close()


def test_whole_lines_with_their_rank() -> None:
    """Each line has its rank in front; a last line without newline has a line of its own."""
    lines = shown((0, b"A\nlast"), (1, b"B\n"), (0, b" words"), (1, b"\nlast1"))
    assert sorted(lines) == ["[rank 0] A", "[rank 0] last words", "[rank 1] ", "[rank 1] B", "[rank 1] last1"]
    assert lines.index("[rank 0] A") < lines.index("[rank 0] last words")


def test_nothing_but_the_text() -> None:
    """Without a terminal there are no colours, neither ours nor the workers', unless they are asked for."""
    assert shown((0, b"\x1b[31mred\n")) == ["[rank 0] red"]
    (line,) = shown((0, b"\x1b[31mred\n"), colour="always")
    assert line == "\x1b[36m[rank 0]\x1b[0m \x1b[31mred\x1b[0m"


def test_every_line_in_order() -> None:
    """Of ranks that speak at full speed from threads of their own, every line is shown, in order."""
    job = Job(workers=tuple(worker(rank) for rank in range(16)))
    reader, writer = os.pipe()
    got: list[bytes] = []
    with os.fdopen(reader, "rb") as output, open(writer, "w") as stream:
        collect = threading.Thread(target=lambda: got.extend(output.readlines()))
        collect.start()
        sink = open_sink(stream, job)

        def speak(rank: int) -> None:
            for start in range(0, 1000, 50):
                say(sink, rank, b"".join(b"%d\n" % number for number in range(start, start + 50)))

        threads = [threading.Thread(target=speak, args=(rank,)) for rank in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sink.close(TIMEOUT)
        stream.close()
        collect.join(10)
    for rank in range(16):
        label = b"[rank %d]" % rank
        mine = [line.split()[-1] for line in got if line.startswith(label)]
        assert mine == [b"%d" % number for number in range(1000)]


def test_echo_of_some_ranks() -> None:
    """Ranks that are not echoed are not shown, and with none of them there is no display at all."""
    assert shown((0, b"a\n"), (1, b"b\n"), echo=frozenset({1})) == ["[rank 1] b"]
    assert (
        choose_sink(names={0: "rank 0"}, snapshot=Job().snapshot, stream=sys.stdout, echo=frozenset()) is None
    )


def test_mixed_paths_keep_the_order() -> None:
    """Lines that go the short way and lines that need a closer look stay in order."""
    data = b"".join(
        b"%d %s\n"
        % (number, (b"plain", b"\xff", b"\x1b[1mbold", "\u4e2d\u6587".encode(), b"x\r")[number % 5])
        for number in range(500)
    )
    for size in (7, 100, 5000, len(data)):
        pieces = [(0, data[start : start + size]) for start in range(0, len(data), size)]
        lines = [line for line in shown(*pieces) if "x" not in line]
        words = ("plain", "\ufffd", "bold", "\u4e2d\u6587")
        assert lines == [f"[rank 0] {number} {words[number % 5]}" for number in range(500) if number % 5 < 4]


def test_bar_is_thinned_without_a_terminal() -> None:
    """200 states of a bar in two seconds are a few lines, the last one is among them, ranks do not mix."""
    with open(os.memfd_create("stdout"), "w+") as file:
        sink = open_sink(file)
        began = time.monotonic()
        for number in range(1, 201):
            for rank in (0, 1):
                say(sink, rank, b"\r%d/200" % number)
            time.sleep(0.01)
        took = time.monotonic() - began
        sink.close(TIMEOUT)
        file.seek(0)
        lines = file.read().splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine[-1] == f"[rank {rank}] 200/200"
        assert took <= len(mine) <= took + 3
    assert all(re.fullmatch(r"\[rank [01]\] \d+/200", line) for line in lines)


def test_bar_is_live_without_more_output() -> None:
    """The newest state of a bar that stands still is shown although nothing more comes."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as output, open(writer, "w") as stream:
        sink = open_sink(stream)
        say(sink, 0, b"\r1/2")
        assert output.readline() == "[rank 0] 1/2\n"
        say(sink, 0, b"\r2/2")
        assert output.readline() == "[rank 0] 2/2\n"
        sink.close(TIMEOUT)


def test_bars_on_a_terminal(pty: Pty) -> None:
    """On a terminal bars stand below the lines, one row per rank, and leave their last state as a line."""
    sink = open_sink(pty.stream)
    say(sink, 0, b"\r10%")
    say(sink, 1, b"\r20%")
    pty.wait_for("[rank 1] 20%")
    say(sink, 1, b"\rwhole\nhello\n\r30%")
    say(sink, 0, b"\r15%")
    pty.wait_for("[rank 1] 30%")
    pty.wait_for("[rank 0] 15%")
    assert pty.screen() == ["[rank 1] whole", "[rank 1] hello", "", "[rank 0] 15%", "[rank 1] 30%"]
    say(sink, 0, b"\r100%\n")
    sink.close(TIMEOUT)
    pty.wait_for("[rank 0] 100%\n[rank 1] 30%")
    assert pty.screen() == ["[rank 1] whole", "[rank 1] hello", "[rank 0] 100%", "[rank 1] 30%"]


def test_words_of_others_stay_whole_beside_bars(pty: Pty) -> None:
    """What somebody else writes on the terminal while bars are shown is not overwritten by them."""
    sink = open_sink(pty.stream)
    say(sink, 0, b"\r10%")
    pty.wait_for("[rank 0] 10%")
    pty.stream.write("words of the launcher\n")
    pty.stream.flush()
    say(sink, 0, b"\r20%")
    pty.wait_for("[rank 0] 20%")
    assert pty.screen() == ["words of the launcher", "", "[rank 0] 20%"]
    sink.close(TIMEOUT)


def test_bars_are_redrawn_a_few_times_per_second(pty: Pty) -> None:
    """A bar that changes a thousand times costs few redraws."""
    sink = open_sink(pty.stream)
    began = time.monotonic()
    for number in range(1000):
        say(sink, 0, b"\r%d" % number)
        time.sleep(0.001)
    took = time.monotonic() - began
    sink.close(TIMEOUT)
    pty.wait_for("[rank 0] 999")
    assert pty.raw.count(b"\x1b[J") <= 5 * took + 3


def test_bars_fit_the_terminal(pty: Pty) -> None:
    """A bar wider than the terminal is cut, and bars leave half of the screen to lines."""
    job = Job(workers=tuple(worker(rank) for rank in range(30)))
    sink = open_sink(pty.stream, job)
    for rank in range(30):
        say(sink, rank, b"\r" + "\u4e2d".encode() * 200)
    pty.wait_for("more progress bars")
    rows = pty.screen()
    assert len(rows) <= 1 + 12
    assert rows[-1] == "... 19 more progress bars"
    assert all(len(row.encode("gbk")) < 80 for row in rows)
    sink.close(TIMEOUT)


def test_colours_on_a_terminal(pty: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets colours, unless NO_COLOR or the caller says no; titles never come through."""
    said = b"\x1b]0;title\x07\x1b[31mred\nplain\n"
    for colour, variable, coloured in (("auto", "", True), ("auto", "1", False), ("never", "", False)):
        monkeypatch.setenv("NO_COLOR", variable)
        before = len(pty.raw)
        sink = open_sink(pty.stream, colour=colour)
        say(sink, 0, said)
        sink.close(TIMEOUT)
        pty.wait_for("[rank 0] plain")
        new = pty.raw[before:]
        assert (b"\x1b[31mred\x1b[0m" in new) == coloured
        assert b"title" not in new
        assert (b"\x1b" in new) == coloured


def test_dumb_terminal(pty: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot move its cursor gets lines only."""
    monkeypatch.setenv("TERM", "dumb")
    sink = open_sink(pty.stream)
    say(sink, 0, b"\r10%")
    sink.close(TIMEOUT)
    pty.wait_for("[rank 0] 10%")
    assert b"\x1b" not in pty.raw


@pytest.mark.parametrize("kind", ["pipe", "pty"])
def test_delay(kind: str, pty: Pty) -> None:
    """From the worker's line to the screen it takes less than 0.3 s, at the 95th percentile."""
    reader, writer = os.pipe()
    stream = pty.stream if kind == "pty" else open(writer, "w")
    sink = open_sink(stream)
    delays = []
    for number in range(100):
        sent = time.monotonic()
        say(sink, 0, b"line %d\n" % number)
        if kind == "pty":
            pty.wait_for(f"line {number}")
        else:
            assert os.read(reader, 1000).endswith(b"line %d\n" % number)
        delays.append(time.monotonic() - sent)
    sink.close(TIMEOUT)
    stream.close()
    os.close(reader)
    if kind == "pty":
        os.close(writer)
    assert sorted(delays)[94] < 0.3


def test_idle_display_does_not_wake_up() -> None:
    """A display with nothing to show uses no processor time."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as output, open(writer, "w") as stream:
        sink = open_sink(stream)
        say(sink, 0, b"a\n")
        output.readline()
        time.sleep(0.1)
        (thread,) = (each for each in threading.enumerate() if each.name == "davincirun-display")
        switches = Path(f"/proc/self/task/{thread.native_id}/status")
        before = switches.read_text().split("voluntary_ctxt_switches:")[1].split()[0]
        time.sleep(1)
        assert switches.read_text().split("voluntary_ctxt_switches:")[1].split()[0] == before
        sink.close(TIMEOUT)


def test_stuck_stdout() -> None:
    """A stdout that nobody reads never blocks a worker's pump, and closing gives up in time."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        sink = open_sink(stream)
        line = b"x" * 127 + b"\n"
        slowest = 0.0
        for _ in range(1000):
            began = time.monotonic()
            say(sink, 0, line * 512)
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.5
        began = time.monotonic()
        sink.close(1.0)
        assert 0.9 < time.monotonic() - began < 4
        os.close(reader)


def test_stuck_stdout_that_is_read_again() -> None:
    """When a stuck stdout is read again, the display says how much it left out, and shows the newest."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as output, open(writer, "w") as stream:
        sink = open_sink(stream)
        lines = [b"%07d" % number + b"x" * 120 + b"\n" for number in range(200_000)]
        for start in range(0, len(lines), 500):
            say(sink, 0, b"".join(lines[start : start + 500]))
        say(sink, 1, b"quiet\n")
        got: list[bytes] = []
        collect = threading.Thread(target=lambda: got.extend(output.readlines()))
        collect.start()
        sink.close(TIMEOUT)
        stream.close()
        collect.join(10)
    notices = [line for line in got if b"left out" in line]
    left_out = sum(int(line.split()[3]) for line in notices)
    assert re.fullmatch(
        rb"\[rank 0\] \.\.\. \d+ lines \([\d.]+ [kM]B\) left out of the display; "
        rb"all is in /logs/job-proc-rank-0-device-0.txt\n",
        notices[0],
    )
    shown_lines = [line.removeprefix(b"[rank 0] ") for line in got if b"x" in line and line not in notices]
    assert shown_lines[-1] == lines[-1]
    assert len(shown_lines) + left_out == len(lines)
    assert b"[rank 1] quiet\n" in got
    assert shown_lines == sorted(shown_lines)


def test_slow_reader_is_not_given_up() -> None:
    """Closing waits for a slow reader as long as it reads."""
    reader, writer = os.pipe()
    got = bytearray()

    def read_slowly() -> None:
        while data := os.read(reader, 1 << 16):
            got.extend(data)
            time.sleep(0.1)

    with open(writer, "w") as stream:
        sink = open_sink(stream)
        data = b"x" * 127 + b"\n"
        for _ in range(20):
            say(sink, 0, data * 1024)
        collect = threading.Thread(target=read_slowly)
        collect.start()
        sink.close(1.0)
    collect.join(10)
    os.close(reader)
    assert got.count(b"\n") == 20 * 1024


def test_broken_pipe() -> None:
    """A reader that goes away silences the display and nothing else."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        sink = open_sink(stream)
        os.close(reader)
        for number in range(100):
            say(sink, 0, b"%d\n" % number)
        began = time.monotonic()
        sink.close(TIMEOUT)
        assert time.monotonic() - began < 2


def test_nonblocking_stdout() -> None:
    """A stdout that somebody has made non-blocking gets every byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    got: list[bytes] = []
    with os.fdopen(reader, "rb") as output, open(writer, "w") as stream:
        sink = open_sink(stream)
        for _ in range(100):
            say(sink, 0, b"x" * 9_999 + b"\n")
        collect = threading.Thread(target=lambda: got.extend(output.readlines()))
        time.sleep(0.1)
        collect.start()
        sink.close(TIMEOUT)
        stream.close()
        collect.join(10)
    assert got == [b"[rank 0] " + b"x" * 9_999 + b"\n"] * 100


class OnlyWrite:
    """A stand-in for stdout that has no more than it must."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Raises(OnlyWrite):
    """A stand-in that is broken in a way of its own."""

    def write(self, text: str) -> None:
        raise RuntimeError(text)


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def test_stand_ins_for_stdout() -> None:
    """A StringIO and an object with only `write` get the lines."""
    string, simple = io.StringIO(), OnlyWrite()
    for stream in (string, simple):
        sink = open_sink(stream)
        say(sink, 0, b"\xe4\xb8\xad\n\xff\n")
        sink.close(TIMEOUT)
    assert string.getvalue() == simple.text == "[rank 0] \u4e2d\n[rank 0] \ufffd\n"


@pytest.mark.parametrize("make", [closed, Raises])
def test_broken_stand_ins(make: Callable[[], Writable]) -> None:
    """A closed stream, and one that raises something of its own, are simply not written to."""
    sink = open_sink(make())
    for _ in range(3):
        say(sink, 0, b"a\n")
    sink.close(TIMEOUT)
    say(sink, 0, b"late\n")
    sink.close(TIMEOUT)


def test_no_stdout() -> None:
    """Without a stdout there is no display."""
    assert choose_sink(names={0: "rank 0"}, snapshot=Job().snapshot, stream=None) is None
    assert (
        choose_sink(names={0: "rank 0"}, snapshot=Job().snapshot, stream=None, output_notebook=True) is None
    )


def test_stream_that_does_more_than_encode(tmp_path: Path) -> None:
    """A text stream over a compressor is written to as text, not past the compressor."""
    with gzip.open(tmp_path / "out.gz", "wt", encoding="utf-16") as stream:
        sink = open_sink(stream)
        say(sink, 0, b"a\nb\n")
        sink.close(TIMEOUT)
    with gzip.open(tmp_path / "out.gz", "rt", encoding="utf-16") as stream:
        assert stream.read() == "[rank 0] a\n[rank 0] b\n"


def test_earlier_text_comes_first() -> None:
    """What the program printed before, and its buffer still holds, stays in front."""
    with open(os.memfd_create("stdout"), "w+") as file:
        file.write("before\n")
        sink = open_sink(file)
        say(sink, 0, b"a\n")
        sink.close(TIMEOUT)
        file.seek(0)
        assert file.read() == "before\n[rank 0] a\n"


def test_ascii_stdout() -> None:
    """In the C locale, what the stream cannot encode is escaped, and nothing is raised."""
    program = """
        import sys
        from output_helpers import Job, say
        from davincirunsdk.output import choose_sink
        job = Job()
        sink = choose_sink(names=job.names, snapshot=job.snapshot, stream=sys.stdout)
        say(sink, 0, "\\u4e2d \\U0001f600 \\xe9\\n".encode() + b"\\xff\\nplain\\n")
        sink.close(5)
    """
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONIOENCODING": "ascii",
            "PYTHONPATH": f"{root}{os.pathsep}{root.parent}",
        },
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == b""
    assert done.stdout.decode("ascii").splitlines() == [
        "[rank 0] \\u4e2d \\U0001f600 \\xe9",
        "[rank 0] \\ufffd",
        "[rank 0] plain",
    ]


def test_stuck_terminal_does_not_keep_the_program() -> None:
    """A program whose terminal is stopped (Ctrl-S) ends all the same."""
    program = """
        import sys
        from output_helpers import Job, say
        from davincirunsdk.output import choose_sink
        job = Job()
        sink = choose_sink(names=job.names, snapshot=job.snapshot, stream=sys.stdout)
        for _ in range(100):
            say(sink, 0, b"x" * 9999 + b"\\n")
        sink.close(0.5)
    """
    root = Path(__file__).parents[1]
    main, other = os.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root.parent}"},
            stdout=other,
            timeout=30,
            check=True,
        )
    finally:
        os.close(main)
        os.close(other)


def test_helper_screen() -> None:
    """The tests' own terminal understands what the display uses."""
    assert screen("a\r\n\nbar\x1b[1A\r\x1b[Jline\r\n\x1b[36mx\x1b[0m") == ["a", "line", "x"]
