"""What a person sees of a real job: the command on pipes and on a pseudo-terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from output_helpers import Pty

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = "import os, sys, time; rank = int(os.environ['RANK'])\n"
BAR = "for i in range(1, 61):\n    sys.stderr.write(f'\\r{i}/60'); time.sleep(0.05)\n"


def command(folder: Path, source: str, *options: str, workers: int = 2) -> list[str]:
    own = ["--log-dir", str(folder), "--nproc-per-node", str(workers), "--quiet"]
    return [sys.executable, "-m", "davincirunsdk", *own, *options, sys.executable, "-c", BEGIN + source]


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables


def run(
    folder: Path, source: str, *options: str, workers: int = 2, **variables: str
) -> tuple[int, list[str]]:
    """Run a job with stdout on a pipe, and return its exit code and what was shown."""
    done = subprocess.run(
        command(folder, source, *options, workers=workers),
        env=environment(**variables),
        stdout=subprocess.PIPE,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="strict").splitlines()


@pytest.fixture
def pty() -> Iterator[Pty]:
    terminal = Pty(columns=100)
    yield terminal
    terminal.close()


def test_last_lines_without_newline(tmp_path: Path) -> None:
    """Each rank's unterminated last line is shown on a line of its own, with its own mark."""
    _, lines = run(tmp_path, "sys.stdout.write(f'A{rank}\\nlast{rank}')")
    assert sorted(lines) == ["[rank 0] A0", "[rank 0] last0", "[rank 1] A1", "[rank 1] last1"]


def test_all_that_fast_ranks_say(tmp_path: Path) -> None:
    """Ranks that print 1000 lines and are gone are shown in full, each in order."""
    _, lines = run(tmp_path, "for i in range(1000): print(i)", workers=8, PYTHONUNBUFFERED="")
    for rank in range(8):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [str(number) for number in range(1000)]


def test_bars_on_a_pipe(tmp_path: Path) -> None:
    """Bars of two ranks are a few lines per second, never mixed, and their last state is shown."""
    _, lines = run(tmp_path, BAR)
    assert all(re.fullmatch(r"\[rank [01]\] \d+/60", line) for line in lines)
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert 3 <= len(mine) <= 8
        assert mine[-1] == f"[rank {rank}] 60/60"


@pytest.mark.parametrize("live", [False, True])
def test_bars_on_a_terminal(tmp_path: Path, pty: Pty, live: bool) -> None:
    """Bars are seen while they move, and their last state stays."""
    options = ["--live"] if live else []
    job = subprocess.Popen(
        command(tmp_path, BAR, *options),
        env=environment(TERM="xterm", NO_COLOR="1"),
        stdout=pty.stream.fileno(),
        stdin=subprocess.DEVNULL,
    )
    pty.wait_until(lambda rows: any(re.fullmatch(r"\[rank 1\] [12]\d/60", row) for row in rows))
    assert job.wait(50) == 0
    pty.wait_for("[rank 0] 60/60\n[rank 1] 60/60")
    assert ("SUCCEEDED" in "".join(pty.screen())) == live


def test_reader_that_leaves(tmp_path: Path) -> None:
    """A closed stdout does not end the job, nor its log files."""
    source = "for i in range(20): print(i, flush=True); time.sleep(0.02)"
    with subprocess.Popen(command(tmp_path, source), env=environment(), stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        job.stdout.close()
        assert job.wait(50) == 0
    for log in tmp_path.glob("*-proc-rank-*.txt"):
        assert log.read_text().splitlines() == [str(number) for number in range(20)]


def test_reader_that_sleeps(tmp_path: Path) -> None:
    """A stdout that nobody reads does not slow the job, whose logs are complete."""
    source = "for i in range(2000): print('x' * 999)\nopen(f'{rank}.done', 'w').close()"
    reader, writer = os.pipe()
    try:
        job = subprocess.Popen(
            [*command(tmp_path, source)],
            env=environment(),
            stdout=writer,
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        assert job.wait(50) == 0
    finally:
        os.close(reader)
        os.close(writer)
    assert [log.stat().st_size for log in tmp_path.glob("*-proc-rank-*.txt")] == [2_000_000, 2_000_000]


def test_what_ranks_say_while_they_are_stopped(tmp_path: Path) -> None:
    """The words of a rank's SIGTERM handler are shown, before the command ends."""
    source = (
        "import signal\n"
        "def end(*_): print('saving', flush=True); time.sleep(0.3); print('saved', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True)\n"
        "while True: time.sleep(1)"
    )
    with subprocess.Popen(command(tmp_path, source), env=environment(), stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert {job.stdout.readline(), job.stdout.readline()} == {b"[rank 0] ready\n", b"[rank 1] ready\n"}
        job.send_signal(signal.SIGTERM)
        lines = job.stdout.read().decode().splitlines()
        assert job.wait(50) == 143
    assert sorted(lines) == ["[rank 0] saved", "[rank 0] saving", "[rank 1] saved", "[rank 1] saving"]
