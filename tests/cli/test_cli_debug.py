"""`--debug RANK` in a real terminal: pdb works in that rank, the others are quiet, Ctrl-C is the rank's."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest
from processes import wait_until

if TYPE_CHECKING:
    from pathlib import Path

PY = sys.executable
pytestmark = pytest.mark.usefixtures("job_folder")

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
print(f"rank {rank} is here", flush=True)
secret = 40 + rank
if rank == 1:
    breakpoint()
    print("after the debugger", secret, flush=True)
    open("done", "w").close()
while not os.path.exists("done"):
    time.sleep(0.02)
"""


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.pid, self.master = pty.fork()
        if not self.pid:
            os.execv(PY, [PY, "-m", "davincirunsdk", "--nproc-per-node", "4", *words])
        self.shown = ""

    def read_until(self, text: str, timeout: float = 40.0) -> None:
        """Read what is shown until a text has come."""
        end = time.monotonic() + timeout
        while text not in self.shown:
            left = end - time.monotonic()
            assert left > 0, f"no {text!r} in {self.shown}"
            if select.select([self.master], [], [], left)[0]:
                self.shown += os.read(self.master, 4096).decode()

    def type(self, keys: str) -> None:
        """Type keys, and forget what was shown before."""
        self.shown = ""
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Read to the end and give the exit code."""
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError:
                break
            self.shown += data.decode()
            if not data:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.master)
        return code


def log(folder: Path, rank: int) -> str:
    """Read a rank's log."""
    return (folder / "log" / f"dbg-proc-rank-{rank}-device-{rank}.txt").read_text()


def test_pdb_on_rank_1_of_4(job_folder: Path) -> None:
    """A breakpoint, a look at a variable, on to the end: longer than the limits that were given."""
    (job_folder / "train.py").write_text(SCRIPT)
    terminal = Terminal(
        "--name", "dbg", "--debug", "1", "--timeout", "1", "--stall-timeout", "0.3", "train.py"
    )
    terminal.read_until("(Pdb)")
    wait_until(lambda: all("is here" in log(job_folder, rank) for rank in range(4)))
    assert "rank 1 is here" in terminal.shown
    assert not re.search("rank [023] is here", terminal.shown)
    time.sleep(1.2)  # longer than both limits
    terminal.type("p secret * 100\r")
    terminal.read_until("4100")
    terminal.type("c\r")
    assert terminal.end() == 0, terminal.shown
    assert "after the debugger 41" in terminal.shown
    assert "4 workers succeeded" in terminal.shown
    assert "after the debugger 41" in log(job_folder, 1)


def test_control_c_goes_to_the_rank(job_folder: Path) -> None:
    """It interrupts what the rank does, and nothing else of the job."""
    source = (
        "import os, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    try:\n        print('waiting', flush=True); time.sleep(600)\n"
        "    except KeyboardInterrupt:\n        print('interrupted', input('why? '), flush=True)\n"
    )
    (job_folder / "train.py").write_text(source)
    terminal = Terminal("--name", "dbg", "--debug", "2", "train.py")
    terminal.read_until("waiting")
    terminal.type("\x03")
    terminal.read_until("why? ")
    terminal.type("so\r")
    assert terminal.end() == 0, terminal.shown
    assert "interrupted so" in terminal.shown
    assert "stopping" not in terminal.shown


def test_the_terminal_is_as_before(job_folder: Path) -> None:
    """Its modes are given back, also when the job fails: by quitting the debugger."""
    (job_folder / "train.py").write_text(SCRIPT)
    words = f"{PY} -m davincirunsdk --nproc-per-node 2 --name dbg --debug 1 train.py"
    child, master = pty.fork()
    if not child:
        os.execvp("sh", ["sh", "-c", f"stty -a > before; {words}; code=$?; stty -a > after; exit $code"])
    shown = b""
    while b"(Pdb)" not in shown:
        shown += os.read(master, 4096)
    assert not termios.tcgetattr(master)[3] & termios.ICANON
    os.write(master, b"q\r")
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, shown
    assert b"a debugger was left" in shown, "the rank had its terminal: this is no want of one"
    os.close(master)
    assert (job_folder / "before").read_text() == (job_folder / "after").read_text()


@pytest.mark.parametrize("source", ["breakpoint()", "input('name? ')"])
def test_without_it_a_hint_names_it(job_folder: Path, source: str) -> None:
    """A rank that dies for want of a terminal is told how to get one."""
    (job_folder / "train.py").write_text(
        f"import os\nif os.environ['RANK'] == '1':\n    {source}\n    pass\n"
    )
    words = [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--debug RANK" in done.stderr, done.stderr


def test_what_cannot_be_debugged() -> None:
    """Without a terminal, or with a rank that is not here, nothing is started."""
    words = [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", "--debug", "0", "true"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--debug is 0" in done.stderr
    terminal = Terminal("--debug", "4", "true")
    assert terminal.end() == 3
    assert "expected one of this node's, 0 to 3" in terminal.shown
