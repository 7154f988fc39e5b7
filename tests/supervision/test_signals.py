"""Signals to the command, in a terminal and without, and to programs that use the blocking API."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import wait_until
from recorded import PY, WORKERS, Recorded, in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., subprocess.Popen[bytes]]

pytestmark = pytest.mark.usefixtures("job_folder")

COUNTERS = ("counts", "counts", "counts", "counts")
DEAF = ("obedient", "deaf", "setsid")
LIMIT = 2.5


@pytest.fixture
def start(recorded: Recorded, tmp_path: Path) -> Iterator[Start]:
    """Start a program in a group of its own and wait until its job is complete."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*words: str, **settings: object) -> subprocess.Popen[bytes]:
        with (tmp_path / "said.txt").open("wb") as said:
            options = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "start_new_session": True}
            process = subprocess.Popen(words, **{**options, **settings})  # type: ignore[call-overload]
        started.append(process)
        wait_until(lambda: recorded.ready() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "said.txt").read_text()
        return process  # type: ignore[no-any-return]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def command(recorded: Recorded, grace_period: float = 5) -> list[str]:
    """Words of the command for the recorded job."""
    options = ["--nproc-per-node", str(recorded.count), "--grace-period", str(grace_period)]
    return [PY, "-m", "davincirunsdk", *options, *recorded.command]


@pytest.mark.parametrize("recorded", [(*COUNTERS, "fails")], indirect=True)
def test_nohup_outlives_the_terminal(recorded: Recorded, start: Start) -> None:
    """Under nohup a hang-up of the whole group stops nothing, and workers ignore it, too."""
    process = start("nohup", *command(recorded))
    os.killpg(process.pid, signal.SIGHUP)
    for pid in recorded.pids("fails"):
        assert ignored(pid) & 1 << (signal.SIGHUP - 1)
    time.sleep(0.3)
    assert process.poll() is None
    assert len(recorded.alive()) == recorded.count
    recorded.let_fail()
    assert process.wait(in_time(LIMIT)) == 3
    assert not recorded.alive()


def ignored(pid: int) -> int:
    """Read the mask of signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))


@pytest.mark.parametrize("recorded", [COUNTERS], indirect=True)
def test_control_c_in_a_terminal(recorded: Recorded, start: Start) -> None:
    """Typed once in a terminal, each worker gets exactly one SIGTERM and no SIGINT; the code is 130."""
    master, terminal = pty.openpty()
    take_terminal = "import fcntl, os, sys; fcntl.ioctl(0, 0x540E, 0); os.execv(sys.argv[1], sys.argv[1:])"
    try:
        process = start(PY, "-S", "-c", take_terminal, *command(recorded), stdin=terminal)
        os.write(master, b"\x03")
        assert process.wait(in_time(LIMIT)) == 130
    finally:
        os.close(master)
        os.close(terminal)
    assert not recorded.alive()
    assert recorded.signals() == [signal.SIGTERM] * recorded.count


@pytest.mark.parametrize("recorded", [DEAF], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_impatience_is_obeyed(
    number: signal.Signals, recorded: Recorded, start: Start, tmp_path: Path
) -> None:
    """A signal a second after the first kills at once; the code is that of the first, and no traceback."""
    process = start(*command(recorded, grace_period=600))
    process.send_signal(number)
    wait_until(lambda: "stopping" in (tmp_path / "said.txt").read_text())
    said = time.monotonic()
    for again in (number, signal.SIGINT, signal.SIGTERM):
        # A wrapper's copies of the same wish, which count for nothing.
        process.send_signal(again)
    wait_until(lambda: time.monotonic() - said > 1.1)
    assert len(recorded.alive()) >= 2
    assert "killing" not in (tmp_path / "said.txt").read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(in_time(LIMIT)) == 128 + number
    assert not recorded.alive()
    assert "Traceback" not in (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize("recorded", [COUNTERS], indirect=True)
def test_a_batch_systems_signals_are_passed_on(recorded: Recorded, start: Start) -> None:
    """SIGUSR1 and SIGUSR2 reach every worker once, and the job goes on."""
    process = start(*command(recorded))
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: recorded.signals() == [signal.SIGUSR1] * recorded.count)
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: len(recorded.signals()) == 2 * recorded.count)
    assert sorted(recorded.signals())[recorded.count :] == [signal.SIGUSR2] * recorded.count
    assert process.poll() is None
    process.terminate()
    assert process.wait(in_time(LIMIT)) == 143


@pytest.mark.parametrize("recorded", [DEAF], indirect=True)
@pytest.mark.parametrize(
    ("number", "code"), [("SIGQUIT", 131), ("SIGALRM", -14), ("SIGABRT", -6), ("SIGXCPU", -24)]
)
def test_no_signal_leaves_workers(number: str, code: int, recorded: Recorded, start: Start) -> None:
    """Whether the command stops on it or dies of it, the workers are gone."""
    process = start(*command(recorded, grace_period=0.5))
    process.send_signal(signal.Signals[number])
    assert process.wait(in_time(LIMIT)) == code
    recorded.assert_gone_by(time.monotonic() + (in_time(3.0) if code < 0 else 0.0))


@pytest.mark.parametrize("recorded", [("obedient", "fails")], indirect=True)
def test_a_broken_pipe_ends_nothing(recorded: Recorded, start: Start) -> None:
    """SIGPIPE does not end the job."""
    process = start(*command(recorded))
    process.send_signal(signal.SIGPIPE)
    time.sleep(0.2)
    assert process.poll() is None
    assert len(recorded.alive()) == 2
    recorded.let_fail()
    assert process.wait(in_time(LIMIT)) == 3


@pytest.mark.parametrize("recorded", [("fails", "counts", "counts")], indirect=True)
def test_a_signal_during_the_stop_does_not_hide_the_failure(
    recorded: Recorded, start: Start, tmp_path: Path
) -> None:
    """The failure that came first stays the cause, also when somebody presses Ctrl-C meanwhile."""
    process = start(*command(recorded))
    recorded.let_fail()
    wait_until(lambda: len(recorded.signals()) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(in_time(LIMIT)) == 3
    assert recorded.signals() == [signal.SIGTERM] * 2
    assert "rank 0" in (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize("recorded", [("counts", "counts")], indirect=True)
def test_sigterm_during_the_stop_does_not_hide_the_time_limit(
    recorded: Recorded, start: Start, tmp_path: Path
) -> None:
    """A time limit blames no worker, and stays the cause also when a batch system signals meanwhile."""
    words = command(recorded)
    process = start(*words[:3], "--timeout", f"{in_time(2):.1f}", *words[3:])
    wait_until(lambda: len(recorded.signals()) == 2, timeout=20)
    process.terminate()
    assert process.wait(in_time(LIMIT)) == 124, (tmp_path / "said.txt").read_text()


def test_no_sigterm_hides_the_failure_up_to_the_last_moment() -> None:
    """Who is signalled while it ends, as by `srun --kill-on-bad-exit`, ends with the rank's own code."""
    words = [PY, "-m", "davincirunsdk", "--nproc-per-node", "1", "sh", "-c", "exit 7"]
    for _ in range(6):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert any("root cause" in line for line in process.stderr)
            while process.poll() is None:
                process.terminate()
                # The end is to be hit at many places.
                time.sleep(0.0005)
        assert process.returncode == 7


def script(recorded: Recorded, tmp_path: Path, grace_period: float, way: str = "blocking wait") -> list[str]:
    """Words of a script that uses the blocking API."""
    words = [way, str(tmp_path), str(grace_period), str(recorded.count)]
    return [PY, str(WORKERS / "host.py"), *words, *recorded.command]


@pytest.mark.parametrize("recorded", [COUNTERS], indirect=True)
def test_control_c_in_a_script(recorded: Recorded, start: Start, tmp_path: Path) -> None:
    """Once: each worker gets one SIGTERM and its time, then the script gets KeyboardInterrupt."""
    process = start(*script(recorded, tmp_path, 5))
    process.send_signal(signal.SIGINT)
    assert process.wait(in_time(LIMIT)) == -signal.SIGINT
    assert not recorded.alive()
    assert recorded.signals() == [signal.SIGTERM] * recorded.count
    assert (tmp_path / "said.txt").read_text().strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("recorded", [DEAF], indirect=True)
@pytest.mark.parametrize("storm", [1, 300])
def test_more_control_c_in_a_script(storm: int, recorded: Recorded, start: Start, tmp_path: Path) -> None:
    """One a second after the first does not wait for the grace period; a storm before it counts as one."""
    process = start(*script(recorded, tmp_path, 600))
    began = time.monotonic()
    for _ in range(storm):
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
        if time.monotonic() - began > 0.5:
            # On a busy machine the rest would come as a second wish.
            break
    began = time.monotonic()
    # All that came so far may be copies of one wish.
    wait_until(lambda: time.monotonic() - began > 1.1)
    assert process.poll() is None
    assert len(recorded.alive()) >= 2
    process.send_signal(signal.SIGINT)
    process.wait(in_time(LIMIT))
    assert process.returncode == -signal.SIGINT
    recorded.assert_gone_by(time.monotonic() + (0.0 if storm == 1 else in_time(3.0)))


@pytest.mark.parametrize("recorded", [COUNTERS], indirect=True)
def test_sigterm_to_a_script(recorded: Recorded, start: Start, tmp_path: Path) -> None:
    """Where SIGTERM has its default action it ends the script, when the job has ended."""
    process = start(*script(recorded, tmp_path, 5))
    process.send_signal(signal.SIGTERM)
    assert process.wait(in_time(LIMIT)) == -signal.SIGTERM
    assert not recorded.alive()
    assert recorded.signals() == [signal.SIGTERM] * recorded.count


@pytest.mark.parametrize("recorded", [DEAF], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_a_thread_waits(
    number: signal.Signals, recorded: Recorded, start: Start, tmp_path: Path
) -> None:
    """In a thread there is no handler to set: the program ends as it would, and its job with it."""
    process = start(*script(recorded, tmp_path, 0.5, way="blocking wait in a thread"))
    process.send_signal(number)
    # Python gives 1 for a KeyboardInterrupt if another thread compiles something before the exit.
    assert process.wait(in_time(LIMIT)) in (-number, 1 if number == signal.SIGINT else -number)
    # KeyboardInterrupt ends the main thread, after which the job is stopped; SIGTERM ends the process.
    recorded.assert_gone_by(time.monotonic() + (0.0 if number == signal.SIGINT else in_time(3.0)))


INTERRUPTED = """
import os, random, signal, sys, threading, time
import psutil
from davincirunsdk import start_and_wait_distributed_train

shots, rounds, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]

def left():
    found = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in found]

for number in range(rounds):
    over = threading.Event()

    def shoot():
        time.sleep(0.1 * number / rounds)
        for _ in range(shots):
            if over.is_set():
                return
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
        # Python loses a KeyboardInterrupt that is raised in a finalizer: once more.
        while not over.wait(5):
            os.kill(os.getpid(), signal.SIGINT)

    shooter = threading.Thread(target=shoot)
    try:
        shooter.start()
        start_and_wait_distributed_train(command, nproc_per_node=2, grace_period=600)
    except KeyboardInterrupt:
        pass
    while shooter.is_alive():
        try:
            over.set()
            shooter.join()
        except KeyboardInterrupt:
            pass
    assert not left(), (number, left())
print("interrupted", rounds, "times", flush=True)
"""


@pytest.mark.parametrize(("shots", "rounds"), [(1, 30), (40, 15)])
def test_control_c_at_any_moment_of_the_start(shots: int, rounds: int) -> None:
    """One Ctrl-C or a storm, from the first moment of the blocking call on: it raises and nothing is left."""
    words = [
        PY,
        "-c",
        INTERRUPTED,
        str(shots),
        str(rounds),
        PY,
        "-S",
        "-E",
        "-c",
        "import time; time.sleep(600)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.stdout == f"interrupted {rounds} times\n", done.stderr
