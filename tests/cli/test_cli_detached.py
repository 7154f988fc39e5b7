"""`--detach`: the job goes on with the terminal closed, and davincirunctl finds it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import is_alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PY = sys.executable
CTL = [PY, "-c", "from davincirunsdk.ctl.main import main; main()"]
COMMAND = [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", "--name", "away", "--detach"]
WORKER = """
import os, signal, sys, time
print("ready", os.environ["RANK"], flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
print("leaving", flush=True)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture(autouse=True)
def nothing_detached(job_folder: Path) -> Iterator[None]:
    """End what a failed test has left running in its folder."""
    yield
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(job_folder) and process.pid != os.getpid():
                process.kill()
        except psutil.Error:
            continue


def ctl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the control command to its end."""
    return subprocess.run([*CTL, *words], capture_output=True, text=True, check=False, timeout=50)


def launcher_in(said: str) -> int:
    """Read the launcher's pid from what was printed."""
    return int(said.partition("launcher ")[2].partition(":")[0])


def detached(*options: str) -> tuple[int, str]:
    """Start the job in a terminal that closes as soon as the command has returned; give what it said."""
    child, master = pty.fork()
    if not child:
        os.execv(PY, [*COMMAND, *options, PY, "-c", WORKER])
    said = b""
    while True:
        try:
            said += os.read(master, 4096)
        except OSError:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(master)
    assert code == 0, said
    return launcher_in(said.decode()), said.decode()


def test_the_terminal_closed_then_attach(job_folder: Path) -> None:
    """Job and log folder are printed; `list` finds it, `attach` shows it and ends with its code."""
    launcher, said = detached()
    assert "job away goes on" in said
    assert f"log folder: {job_folder / 'log'}" in said
    process = psutil.Process(launcher)
    assert process.terminal() is None
    assert not any(
        os.readlink(f"/proc/{launcher}/fd/{number}").startswith("/dev/pts") for number in (0, 1, 2)
    )
    assert "away" in ctl("list").stdout
    assert "ready 1" in ctl("tail", "away").stdout
    with subprocess.Popen([*CTL, "attach", "away"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as attach:
        assert attach.stdout is not None
        while b"ready" not in attach.stdout.readline():
            pass
        (job_folder / "end").touch()
        out, err = attach.communicate(timeout=50)
    assert attach.returncode == 3, err
    assert b"leaving" in out
    assert b"rank 1" in out + err
    wait_until(lambda: not is_alive(launcher))
    assert "rank 1" in (job_folder / "log" / "away-launcher.log").read_text()


def test_wait_and_stop() -> None:
    """`stop` reaches it as it does any launcher, and `wait` ends with its code."""
    launcher, _ = detached("--grace-period", "5")
    with subprocess.Popen([*CTL, "wait", "away"], stderr=subprocess.PIPE, text=True) as wait:
        assert wait.stderr is not None
        assert "waiting for job away" in wait.stderr.readline()
        assert ctl("stop", "away").returncode == 0
        wait.communicate(timeout=50)
    assert wait.returncode == 143
    wait_until(lambda: not is_alive(launcher))
    assert ctl("list").stdout.count("away") == 0


@pytest.mark.parametrize("verb", ["wait", "attach"])
def test_a_job_that_is_over_by_then(verb: str, job_folder: Path) -> None:
    """`wait` and `attach` that come late end with its code and report; a stranger's name is still no job."""
    (job_folder / "end").touch()
    launcher, _ = detached()
    wait_until(lambda: not is_alive(launcher))
    for name in ("away", "log", str(job_folder / "log")):
        late = ctl(verb, name)
        assert late.returncode == 3, late.stderr
        assert "is over" in late.stderr
        assert "rank 1 is the root cause" in late.stderr
    assert "rank 1 is the root cause" in ctl("report", "away").stdout
    nobody = ctl(verb, "awa")
    assert nobody.returncode == 1
    assert "no job 'awa' runs on this host" in nobody.stderr


def test_a_running_job_by_its_log_folder(job_folder: Path) -> None:
    """The folder that `--detach` prints stands for the job while it runs, too."""
    launcher, _ = detached()
    with subprocess.Popen([*CTL, "wait", "log"], stderr=subprocess.PIPE, text=True) as wait:
        assert wait.stderr is not None
        assert "waiting for job away" in wait.stderr.readline()
        (job_folder / "end").touch()
        wait.communicate(timeout=50)
    assert wait.returncode == 3
    wait_until(lambda: not is_alive(launcher))


def test_its_output_may_be_captured(job_folder: Path) -> None:
    """Whoever reads standard output and error to their ends has them when the command returns."""
    words = [*COMMAND, PY, "-c", WORKER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    launcher = launcher_in(done.stdout)
    assert is_alive(launcher)
    (job_folder / "end").touch()
    wait_until(lambda: not is_alive(launcher))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["./no-such-program"], 127, "command not found"),
        (["--rank-table", "no-table.json", "true"], 3, "no-table.json"),
        (["--max-restarts", "1", "--keep-going", "true"], 2, "keep"),
    ],
)
def test_a_start_that_fails(words: list[str], code: int, text: str) -> None:
    """Its error and its code are those of the command, and nothing goes on."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert done.stdout == ""


def test_control_c_during_the_start(job_folder: Path) -> None:
    """A stop before the workers run reaches the child, whose code is the command's."""
    table = job_folder / "table.json"
    table.write_text('{"status": "initializing"}')
    words = [*COMMAND, "--rank-table", str(table), "true"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "table" in process.stderr.readline()
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=50)
    assert process.returncode == 130
    assert not is_alive(child.pid)
