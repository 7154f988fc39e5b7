"""The guardian: small, alone with its pipe, deaf, gone with the last job, there again when killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import is_alive, wait_until
from recorded import PY, WORKERS, Recorded, in_time

from davincirunsdk import FMKManager
from davincirunsdk.leftovers.guardian import guardian

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("job_folder")

SLEEPER = [PY, "-S", "-E", "-c", "import time; time.sleep(600)"]
LIMIT = 3.0
"""Seconds after a supervisor's death in which a job has ended whose workers obey."""


def sleepers(count: int = 1) -> FMKManager:
    """Make a job of workers that sleep."""
    return FMKManager(SLEEPER, nproc_per_node=count, grace_period=5)


def guardian_process() -> psutil.Process:
    """Return the guardian of this process."""
    return psutil.Process(guardian.pids()[0])


def has_settled(process: psutil.Process) -> bool:
    """Tell whether it has loaded what its clean-up needs, which it does when its pipe is quiet."""
    return any("_queue" in region.path for region in process.memory_maps())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait in the loop until a condition holds."""
    await asyncio.to_thread(wait_until, condition, 20.0, what)


async def test_it_is_small() -> None:
    """It takes less than 15 MB beside every job, ready for its work."""
    async with sleepers():
        process = guardian_process()
        await until(lambda: has_settled(process), "the guardian has loaded all")
        assert process.memory_info().rss < 15_000_000


async def test_it_holds_nothing_but_its_own() -> None:
    """It has its sockets, the workers' pipes and log files; nothing inherited, and no folder."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        async with sleepers(), sleepers():
            process = guardian_process()
            await until(lambda: has_settled(process), "the guardian has loaded all")
            folder = f"/proc/{process.pid}/fd"
            held = {int(fd): os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
            assert process.cwd() == "/"
    finally:
        os.close(read)
        os.close(write)
    assert {held.pop(1), held.pop(2)} == {"/dev/null"}
    kinds = Counter(what.partition(":")[0] for what in held.values())
    assert kinds.pop("anon_inode") <= 2
    assert (kinds.pop("socket"), kinds.pop("pipe")) == (1, 2)
    assert sorted(kinds) == sorted(str(path) for path in Path("log").absolute().glob("*-proc-*.txt"))


async def test_it_is_deaf_and_apart() -> None:
    """Ctrl-C, hang-up and a batch system's signals to all do not end it; its session is its own."""
    async with sleepers():
        process = guardian_process()
        await until(lambda: has_settled(process), "the guardian runs")
        assert os.getsid(process.pid) == process.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            process.send_signal(number)
        await asyncio.sleep(0.2)
        assert guardian_process().pid == process.pid
        assert is_alive(process.pid)


async def test_one_serves_all_jobs_and_leaves_with_the_last() -> None:
    """There is one per process; it goes when the last job has ended and not before."""
    assert guardian.pids() == ()
    async with sleepers():
        pid = guardian_process().pid
        async with sleepers(2):
            assert guardian_process().pid == pid
        assert guardian_process().pid == pid
        assert is_alive(pid)
    assert guardian.pids() == ()
    assert not psutil.pid_exists(pid)


async def test_it_is_started_again_when_it_was_killed() -> None:
    """Killed while jobs run, it is there again at once; the loop is not held up by that."""
    async with sleepers(), sleepers():
        for _ in range(3):
            process = guardian_process()
            process.kill()
            await until(lambda pid=process.pid: pid not in guardian.pids(), "a new guardian")  # type: ignore[misc]
            assert is_alive(guardian_process().pid)
    assert guardian.pids() == ()


def program(code: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a program that prints what the test waits for."""
    return subprocess.Popen([PY, "-c", code, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)


START = """
import ctypes, os, sys, time
from davincirunsdk import start_distributed_train
manager = start_distributed_train(sys.argv[1:], nproc_per_node=2)
"""
FORKS = """
# A fork that no handler of Python's hears of: this child keeps every descriptor.
if ctypes.CDLL(None).fork() == 0 or os.fork() == 0:
    time.sleep(600)
"""
TELL = """
print(*(worker.pid for worker in manager.workers), flush=True)
time.sleep(600)
"""


def pids_from(supervisor: subprocess.Popen[bytes]) -> list[int]:
    """Read the workers' pids, which it prints when all have been started."""
    assert supervisor.stdout is not None
    with supervisor.stdout as lines:
        return [int(word) for word in lines.readline().split()]


def test_forked_children_of_the_program_do_not_hold_it_off() -> None:
    """Children that the supervisor forked keep the pipe open: its death counts all the same."""
    supervisor = program(START + FORKS + TELL, *SLEEPER)
    workers = pids_from(supervisor)
    children = psutil.Process(supervisor.pid).children()
    forked = [child for child in children if child.cmdline()[1:3] == ["-c", START + FORKS + TELL]]
    try:
        assert len(forked) == 2
        supervisor.kill()
        supervisor.wait()
        wait_until(lambda: not any(map(is_alive, workers)), in_time(LIMIT), "the workers are gone")
        assert all(child.is_running() for child in forked)
    finally:
        for child in forked:
            child.kill()


@pytest.mark.parametrize("recorded", [("obedient", "deaf", "setsid", "bare")], indirect=True)
def test_no_moment_of_the_start_is_without_it(recorded: Recorded) -> None:
    """A supervisor that is killed 0 to 50 ms after it began to start workers leaves none."""
    folder = recorded.folder.parent
    for moment in range(0, 60, 10):
        log = folder / "log"
        shutil.rmtree(log, ignore_errors=True)
        words = ["wait", str(folder), "0.5", str(recorded.count), *recorded.command]
        supervisor = subprocess.Popen([PY, str(WORKERS / "host.py"), *words], stderr=subprocess.DEVNULL)
        # The log folder is made just before the guardian and the first worker.
        wait_until(log.exists, what="the job begins")
        time.sleep(moment / 1000)
        supervisor.kill()
        supervisor.wait()
    recorded.assert_gone_by(time.monotonic() + in_time(0.5 + LIMIT))
    # Those that were killed before they could record themselves are found by the fixture of every test.


def test_it_ends_a_job_whose_supervisor_was_stopped_and_killed() -> None:
    """A supervisor that hangs and is then killed by the OOM killer is no different."""
    supervisor = program(START + TELL, *SLEEPER)
    workers = pids_from(supervisor)
    supervisor.send_signal(signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not any(map(is_alive, workers)), in_time(LIMIT), "the workers are gone")


ORPHANS = """
import os, sys, time
ended, held = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.2)
        os._exit(0)
    os.wait()
os.close(held)
os.read(ended, 1)
def is_zombie(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
deadline = time.monotonic() + 20
while any(map(is_zombie, filter(str.isdigit, os.listdir("/proc")))):
    assert time.monotonic() < deadline, "zombies stay"
    time.sleep(0.05)
print("no zombies, supervisor:", os.getppid(), flush=True)
"""

AS_PID_1 = ["unshare", "--pid", "--fork", "--mount-proc"]
needs_pid_namespace = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*AS_PID_1, "true"], check=False).returncode != 0,
    reason="needs the right to make a pid namespace",
)


@needs_pid_namespace
def test_the_command_as_pid_1_reaps_orphans() -> None:
    """As the first process of a container the command reaps what workers orphan."""
    words = ["--nproc-per-node", "2", "--echo", "0", "--", PY, "-S", "-c", ORPHANS]
    done = subprocess.run(
        [*AS_PID_1, PY, "-m", "davincirunsdk", *words],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] no zombies, supervisor: 1" in done.stdout


@needs_pid_namespace
def test_exit_codes_are_right_as_pid_1() -> None:
    """Reaping orphans steals no worker's exit status, however soon it ends."""
    for _ in range(3):
        words = ["--nproc-per-node", "4", "--", "sh", "-c", "(sleep 0.01 &) ; exit 7"]
        done = subprocess.run(
            [*AS_PID_1, PY, "-m", "davincirunsdk", *words],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 7, done.stderr


MANY_JOBS = """
import asyncio, os, sys, time
import psutil
from davincirunsdk import FMKManager
code = "import os, time\\nif os.fork() == 0: time.sleep(0.2)"
async def main():
    for _ in range(5):
        async with FMKManager([sys.executable, "-S", "-c", code], nproc_per_node=2) as manager:
            await manager.wait()
asyncio.run(main())
print(os.getpid(), [child.status() for child in psutil.Process().children()], flush=True)
"""


BE_SUB_REAPER = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*AS_PID_1, PY, "-c", MANY_JOBS], id="pid 1", marks=needs_pid_namespace),
        pytest.param([PY, "-c", f"{BE_SUB_REAPER}\n{MANY_JOBS}"], id="sub-reaper"),
    ],
)
def test_a_service_that_inherits_orphans_keeps_no_zombies(words: list[str]) -> None:
    """A program that runs jobs as pid 1 or as a sub-reaper has no child when they are over."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.stdout.endswith(" []\n"), done.stdout + done.stderr


@pytest.mark.parametrize("wrapper", [["setsid", "--wait"], ["nohup"]])
def test_wrappers_change_nothing(wrapper: list[str]) -> None:
    """Under setsid and nohup the command works and gives the worker's exit code."""
    words = [*wrapper, sys.executable, "-m", "davincirunsdk", "--nproc-per-node", "2", "sh", "-c", "exit 9"]
    done = subprocess.run(words, capture_output=True, timeout=30)
    assert done.returncode == 9, done.stderr


@pytest.mark.parametrize("which", [0, 1])
def test_supervisor_and_guardian_killed_together(which: int) -> None:
    """Neither has a moment to act, however young they are: the other one ends the job."""
    supervisor = program(START + TELL, *SLEEPER)
    workers = pids_from(supervisor)
    process = psutil.Process(supervisor.pid)
    guardians = [child for child in process.children() if child.cmdline()[1:4] == ["-I", "-S", "-c"]]
    assert len(guardians) == 2
    pair = [process, guardians[which]]
    for each in pair:
        each.suspend()
    for each in pair:
        each.kill()
    supervisor.wait()
    wait_until(lambda: not any(map(is_alive, workers)), in_time(LIMIT), "the workers are gone")


async def test_both_guardians_carry_no_name_of_ours() -> None:
    """Who kills by the product's name picks the supervisor, and neither of them."""
    async with sleepers():
        names = []
        for process in map(psutil.Process, guardian.pids()):
            await until(lambda process=process: has_settled(process), "it has loaded all")  # type: ignore[misc]
            assert "davincirun" not in " ".join(process.cmdline()[1:])
            assert process.memory_info().rss < 15_000_000
            names.append(process.name())
    assert names == ["job-guardian", "job-standby"]


@pytest.mark.parametrize("which", [0, 1])
async def test_a_killed_one_is_replaced(which: int) -> None:
    """There are two again soon, whichever was killed."""
    async with sleepers():
        for _ in range(3):
            before = guardian.pids()
            os.kill(before[which], signal.SIGKILL)
            await until(lambda before=before: not {*before} & {*guardian.pids()}, "new ones")  # type: ignore[misc]
            assert all(map(is_alive, guardian.pids()))
    assert guardian.pids() == ()


SHADOWED = """
import os, sys, time
sys.path[:] = [path for path in sys.path if "site-packages" not in path]
sys.path += [sys.argv[1], sys.argv[2]]
import davincirunsdk
from davincirunsdk import start_distributed_train
assert davincirunsdk.__file__.startswith(sys.argv[1])
manager = start_distributed_train(sys.argv[3:], nproc_per_node=1)
print(*(worker.pid for worker in manager.workers), flush=True)
time.sleep(600)
"""


def test_packages_that_shadow_the_standard_library_do_not_break_it(tmp_path: Path) -> None:
    """PyPI has a typing, an enum34 and a queue: beside us in site-packages they hide nothing from it."""
    import davincirunsdk

    (tmp_path / "davincirunsdk").symlink_to(Path(davincirunsdk.__file__).parent)
    for name in ("typing", "enum", "queue", "signal", "threading", "stat"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this one is old')\n")
    site = sysconfig.get_path("purelib")
    supervisor = subprocess.Popen(
        [PY, "-S", "-c", SHADOWED, str(tmp_path), site, *SLEEPER], stdout=subprocess.PIPE
    )
    workers = pids_from(supervisor)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not any(map(is_alive, workers)), in_time(LIMIT), "the workers are gone")


LAST_WORDS = """
import signal, sys, time
def save(number, frame):
    for line in range(20000):
        print(f"{line} words that are still to be kept")
    print("saved", flush=True)
    sys.exit()
signal.signal(15, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("limit", [[], ["--log-limit", "64K"]])
def test_last_words_after_the_death_of_the_supervisor(limit: list[str], job_folder: Path) -> None:
    """More than a pipe holds comes to the log file when nobody is left but the guardian."""
    options = ["--nproc-per-node", "2", "--echo", "none", "--log-dir", "log", *limit]
    command = [PY, "-m", "davincirunsdk", *options, PY, "-c", LAST_WORDS]
    supervisor = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=job_folder)

    def words() -> list[str]:
        return [path.read_text() for path in (job_folder / "log").glob("*-proc-*.txt")]

    wait_until(lambda: words() == ["ready\n"] * 2)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: [log for log in words() if log.endswith("saved\n")][1:], in_time(LIMIT))
    assert [log.count("\n") for log in words()] == [20002, 20002]


@pytest.mark.parametrize("recorded", [("deaf", "talks")], indirect=True)
def test_the_grace_period_outlives_the_supervisor(recorded: Recorded) -> None:
    """A worker that takes its time to save has the job's grace period, and 3 s later nothing is left."""
    grace = 2.0
    words = ["wait", str(recorded.folder.parent), str(grace), str(recorded.count), *recorded.command]
    supervisor = subprocess.Popen([PY, str(WORKERS / "host.py"), *words])
    wait_until(recorded.ready)
    supervisor.kill()
    killed = time.monotonic()
    supervisor.wait()
    (deaf,) = recorded.pids("deaf")
    wait_until(lambda: not is_alive(deaf), in_time(grace + LIMIT))
    assert time.monotonic() - killed >= grace
    recorded.assert_gone_by(killed + in_time(grace + LIMIT))


SAVING_ORPHAN = """
import os, signal, subprocess, sys, time
rank, own_end = os.environ["RANK"], sys.argv[1] == "ended"
helper = '''
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open("ready." + os.environ["RANK"], "w").close()
time.sleep(600)
'''
# Its parent has ended: what is known of it is its mark, and that it holds the rank's output.
start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.run([sys.executable, "-c", start, sys.executable, "-c", helper], check=True)
if own_end and rank == "0":
    while not os.path.exists("ready.0"):
        time.sleep(0.01)
    sys.exit(0)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["told", "ended"])
def test_orphans_in_their_own_session_are_told_in_time(end: str, job_folder: Path) -> None:
    """Whether their rank is told by a guardian or had ended by itself, they have the grace period."""
    grace = 30
    options = ["--nproc-per-node", "2", "--echo", "none", "--grace-period", str(grace)]
    worker = [PY, "-c", SAVING_ORPHAN, end]
    supervisor = subprocess.Popen([PY, "-m", "davincirunsdk", *options, *worker], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(job_folder.glob("ready.*"))) == 2)
    supervisor.kill()
    supervisor.wait()
    logs = job_folder / "log"
    wait_until(
        lambda: [path.read_text() for path in logs.glob("*-proc-*.txt")] == ["saved\n"] * 2,
        in_time(grace / 4),
    )
