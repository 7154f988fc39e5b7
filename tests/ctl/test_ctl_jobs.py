"""`davincirunctl` with real jobs: listed, followed, signalled, stopped, waited for from elsewhere."""

from __future__ import annotations

import json
import os
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
WORKER = """
import os, signal, sys, time
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
signal.signal(signal.SIGUSR1, heard)
print("ready", os.environ["RANK"], flush=True)
while True:
    time.sleep(0.05)
    if os.path.exists("end"):
        sys.exit(int(open("end").read() or 0) if os.environ["RANK"] == "1" else 0)
"""

HOLDS = """
import ctypes, os, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
for thread in map(int, os.listdir(f"/proc/{pid}/task")):
    if libc.ptrace(16, thread, None, None) == 0:  # PTRACE_ATTACH; one that has just ended cannot be held
        os.waitpid(thread, 0x40000000)  # __WALL
print("held", flush=True)
sys.stdin.read()
"""

CLEANS = """
import os, signal, subprocess, sys, time
CTL = [sys.executable, "-c", "from davincirunsdk.ctl.main import main; main()"]
SLEEPS = "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print(1, flush=True); time.sleep(600)"

def start(action, **variables):
    child = subprocess.Popen([sys.executable, "-c", SLEEPS.format(action)], env=os.environ | variables,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    child.stdout.readline()
    return child

# The orphans of a launcher and of its guardian; and two that are nobody's: no job's, and a living job's.
launcher = subprocess.Popen([sys.executable, "-m", "davincirunsdk", "--nproc-per-node", "2", sys.executable,
                             "-c", "import time; open(str(time.time_ns()), 'w'); time.sleep(600)"],
                            stdout=subprocess.PIPE, cwd="left")
def children():
    return open(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read().split()
while len(os.listdir("left")) < 3:
    time.sleep(0.02)
orphans = [int(pid) for pid in children() if b"time_ns" in open(f"/proc/{pid}/cmdline", "rb").read()]
guardians = [int(pid) for pid in children() if int(pid) not in orphans]
stranger = start("signal.SIG_DFL")
living = subprocess.Popen([sys.executable, "-m", "davincirunsdk", "--nproc-per-node", "1", sys.executable,
                           "-c", "import time; print('on', flush=True); time.sleep(600)"],
                          stdout=subprocess.PIPE, cwd="right")
assert b"on" in living.stdout.readline()
for pid in [*guardians, launcher.pid]:
    os.kill(pid, signal.SIGKILL)
launcher.wait()

shown = subprocess.run([*CTL, "clean"], capture_output=True, text=True, check=True).stdout
assert [int(line.split()[0]) for line in shown.splitlines()[:-1]] == sorted(orphans), shown
assert all(os.path.exists(f"/proc/{pid}") for pid in orphans)
said = subprocess.run([*CTL, "clean", "--yes"], capture_output=True, text=True, check=True).stdout
assert "2 processes ended" in said, said
def runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
assert not any(map(runs, orphans))
assert stranger.poll() is None
assert living.poll() is None
assert "nothing is left" in subprocess.run([*CTL, "clean"], capture_output=True, text=True, check=True).stdout
"""


def ctl(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the control command to its end."""
    return subprocess.run([*CTL, *words], capture_output=True, text=True, check=check, timeout=50)


class Job:
    """A job of the command in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        (folder / "worker.py").write_text(WORKER)
        self.process = subprocess.Popen(
            [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", "--grace-period", "5", "--name", name,
             "worker.py"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        logs = [folder / "log" / f"{name}-proc-rank-{rank}-device-{rank}.txt" for rank in range(2)]
        wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), what="ready")
        self.logs = logs

    def end(self, code: int = 0) -> None:
        """Have the workers end, rank 1 with this code."""
        (self.folder / "next").write_text(str(code))
        (self.folder / "next").rename(self.folder / "end")

    def close(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)


@pytest.fixture
def job(job_folder: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A running job of two workers, with a name that no other test's has."""
    made = Job(job_folder, f"ctl-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}")
    yield made
    made.close()


def listed(job: Job) -> dict[str, object]:
    """What `list` says of a job."""
    rows: list[dict[str, object]] = [json.loads(line) for line in ctl("list", "--json").stdout.splitlines()]
    (found,) = [row for row in rows if row["job"] == job.name]
    return found


def test_list_and_status(job: Job) -> None:
    """A job is listed with its ranks and folder; its workers with pid and last line."""
    row = listed(job)
    assert (row["ranks"], row["state"], row["launcher"]) == (2, "RUNNING", job.process.pid)
    assert row["logs"] == str(job.folder / "log")
    assert job.name in ctl("list").stdout
    workers = json.loads(ctl("status", job.name, "--json").stdout)["workers"]
    assert [worker["last_line"] for worker in workers] == ["ready 0", "ready 1"]
    assert all(is_alive(worker["pid"]) for worker in workers)
    assert f"job {job.name} ({row['mark']})" in ctl("status", str(row["mark"])).stdout


def test_a_launcher_that_is_stopped_keeps_nobody_from_looking(job: Job) -> None:
    """SIGSTOP of the launcher is seen, and the job can be looked at all the same."""
    wait_until(lambda: listed(job)["ranks"] == 2, what="both ranks in the events, which follow their logs")
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED)
    assert listed(job)["state"] == "LAUNCHER STOPPED"
    assert "ready 1" in ctl("status", job.name).stdout
    assert "rank" in ctl("stacks", job.name).stdout


@pytest.mark.parametrize("options", [[], ["--now"]])
def test_a_launcher_that_is_stopped_is_woken_to_stop(options: list[str], job: Job) -> None:
    """A suspended launcher would not hear of it."""
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED)
    assert "is told to stop" in ctl("stop", job.name, *options).stdout
    assert job.process.wait(30) == 143


def test_a_launcher_that_does_not_react(job: Job) -> None:
    """It is named with what can be done; `--now` ends the job without it, and nothing is left."""
    pids = [worker["pid"] for worker in json.loads(ctl("status", job.name, "--json").stdout)["workers"]]
    # A debugger holds it: the kernel takes signals for it, and it handles none.
    holder = subprocess.Popen([PY, "-c", HOLDS, str(job.process.pid)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        done = ctl("stop", job.name, check=False)
        assert done.returncode == 3
        assert "stop --now" in done.stderr
        assert ctl("stop", job.name, "--now").stdout
        holder.communicate(b"")
    assert job.process.wait(30) == -signal.SIGKILL
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), what="the workers' end")


def test_a_signal_passes_a_stopped_launcher_by(job: Job) -> None:
    """Who handles it gets it from us; where nobody does, that is said."""
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED)
    assert "is passed on" in ctl("signal", job.name, "USR1").stdout
    job.process.send_signal(signal.SIGCONT)
    wait_until(lambda: all("heard SIGUSR1" in log.read_text() for log in job.logs), what="the signal")
    assert "nobody is told" in ctl("signal", job.name, "WINCH").stdout


def test_tail_follows_into_the_next_attempt(job_folder: Path) -> None:
    """A restarted rank writes a new file: what it prints is shown as well, each line once."""
    program = (
        "import os, sys, time\n"
        "attempt = os.environ['DAVINCIRUN_RESTART_COUNT']\n"
        "sys.stdout.write(f'attempt {attempt} begins\\nand ends')\n"
        "while not os.path.exists(f'go{attempt}'): time.sleep(0.02)\n"
        "sys.exit(attempt == '0')\n"
    )
    name = f"ctl-restart-{os.getpid()}"
    words = ["--nproc-per-node", "1", "--name", name, "--max-restarts", "1", "--restart-delay", "1"]
    with subprocess.Popen(
        [PY, "-m", "davincirunsdk", *words, PY, "-c", program], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        log = job_folder / "log" / f"{name}-proc-rank-0-device-0.txt"
        wait_until(lambda: log.exists() and "and ends" in log.read_text(), what="the first attempt")
        with subprocess.Popen([*CTL, "tail", name, "-f"], stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline() == "[rank 0] attempt 0 begins\n"
            (job_folder / "go0").touch()
            assert follower.stdout.readline() == "[rank 0] and ends\n"
            assert follower.stdout.readline() == "[rank 0] attempt 1 begins\n"
            (job_folder / "go1").touch()
            assert follower.communicate(timeout=30)[0] == "[rank 0] and ends\n"
        assert launcher.wait(30) == 0


def test_report_of_one_of_two_jobs_of_a_folder(job: Job) -> None:
    """The job that is named is meant, not the newest of the folder; one that runs has not failed."""
    (job.folder / "log/newer-proc-rank-0-device-0.txt").write_text("ValueError: no\n")
    (job.folder / "log/newer-events.jsonl").write_text('{"time": 1, "kind": "about", "job": "newer"}\n')
    os.utime(job.folder / "log/newer-proc-rank-0-device-0.txt", (2e9, 2e9))
    os.utime(job.folder / "log/newer-events.jsonl", (2e9, 2e9))
    assert f"job {job.name} (" in ctl("report", job.name).stdout
    assert "runs, and none of its workers has failed so far" in ctl("report", job.name).stdout
    ctl("report", job.name, "--html", "run.html")
    assert f"<title>{job.name}: " in (job.folder / "run.html").read_text()


def test_tail_shows_last_lines_and_follows_to_the_end(job: Job) -> None:
    """Lines stand behind their rank; `-f` goes on until the job has ended."""
    assert ctl("tail", job.name, "1").stdout == "[rank 1] ready 1\n"
    with subprocess.Popen([*CTL, "tail", job.name, "-f"], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert {follower.stdout.readline() for _ in range(2)} == {"[rank 0] ready 0\n", "[rank 1] ready 1\n"}
        ctl("signal", job.name, "USR1")
        assert {follower.stdout.readline() for _ in range(2)} == {
            f"[rank {rank}] heard SIGUSR1\n" for rank in range(2)
        }
        job.end()
        assert follower.wait(30) == 0


@pytest.mark.parametrize("name", ["TERM", "SIGKILL", "int", "STOP"])
def test_signals_that_end_are_refused(name: str, job: Job) -> None:
    """What would end workers behind the launcher's back is a usage error that names `stop`."""
    done = ctl("signal", job.name, name, check=False)
    assert done.returncode == 2
    assert "use `stop`" in done.stderr
    assert job.process.poll() is None


@pytest.mark.parametrize("code", [0, 7])
def test_wait_ends_as_the_job_does(code: int, job: Job) -> None:
    """The exit code is the job's own, and a failure's report is printed."""
    with subprocess.Popen([*CTL, "wait", job.name], stderr=subprocess.PIPE, text=True) as waiter:
        assert waiter.stderr is not None
        assert "waiting for job" in waiter.stderr.readline()
        job.end(code)
        _, said = waiter.communicate(timeout=30)
    assert waiter.returncode == code
    assert job.process.wait(30) == code
    assert ("rank 1" in said) is bool(code)


def test_stop(job: Job) -> None:
    """`stop` acts as SIGTERM to the launcher."""
    assert "told to stop" in ctl("stop", job.name).stdout
    assert job.process.wait(30) == 143
    assert ctl("status", job.name, check=False).returncode == 1


@pytest.mark.parametrize("words", ["attach", "wait", "tail -f", "events -f"])
def test_control_c_leaves_the_job_alone(words: str, job: Job) -> None:
    """Ctrl-C ends the looking, not the job, and says so; its code is not one that a job may end with."""
    with subprocess.Popen(
        [*CTL, *words.split(), job.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as looker:
        assert looker.stdout is not None
        looker.stdout.readline()
        looker.send_signal(signal.SIGINT)
        said, _ = looker.communicate(timeout=30)
    assert looker.returncode == 130
    assert "goes on" in said
    assert job.process.poll() is None


def test_events(job: Job) -> None:
    """The events file is printed as it stands."""
    kinds = [json.loads(line)["kind"] for line in ctl("events", job.name).stdout.splitlines()]
    assert kinds[:3] == ["about", "started", "started"]


def test_a_name_that_fits_several(job: Job, tmp_path: Path) -> None:
    """Two jobs of one name are told apart by their marks; the name alone asks which."""
    (tmp_path / "other").mkdir()
    other = Job(tmp_path / "other", job.name)
    try:
        done = ctl("status", job.name, check=False)
        assert done.returncode == 2
        assert str(other.process.pid) in done.stderr
        assert str(job.process.pid) in done.stderr
    finally:
        other.close()


def test_a_job_of_a_program_is_stopped_without_its_program(job_folder: Path) -> None:
    """The launcher is somebody's service: `stop` ends this job and leaves the service alone."""
    (job_folder / "worker.py").write_text(WORKER)
    program = (
        "import asyncio, sys\nfrom davincirunsdk import DistributedRuntimeError, FMKManager\n"
        "async def main():\n"
        "    async with FMKManager([sys.executable, 'worker.py'], nproc_per_node=2, name='of-it') as m:\n"
        "        print('started', flush=True)\n"
        "        try: await m.wait()\n"
        "        except DistributedRuntimeError: pass\n"
        "    print('over', flush=True)\n"
        "    sys.stdin.readline()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [PY, "-c", program], cwd=job_folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "started\n"
        log = job_folder / "log" / "of-it-proc-rank-1-device-1.txt"
        wait_until(lambda: log.exists() and "ready" in log.read_text(), what="ready")
        ctl("stop", "of-it")
        assert service.stdout.readline() == "over\n"
        assert service.poll() is None
        service.communicate("end\n", timeout=30)
    assert service.returncode == 0


def test_clean_shows_first_and_ends_on_yes(job_folder: Path) -> None:
    """What is left of a job is shown, and ended on `--yes`, and only that; deaf ones get SIGKILL."""
    if os.geteuid() != 0:
        pytest.fail("this test needs root, for a process namespace in which no other test's jobs are")
    (job_folder / "inside.py").write_text(CLEANS)
    (job_folder / "left").mkdir()
    (job_folder / "right").mkdir()
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", PY, "inside.py"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_nobody_else_can_be_steered(job: Job) -> None:
    """Another user sees no job of root's and stops none."""
    if os.geteuid() != 0:
        pytest.fail("this test needs root, to become another user")
    # The other user need not be able to read this Python: it becomes him when all is loaded.
    program = (
        "import os, sys, psutil\nfrom davincirunsdk.ctl.main import main\n"
        f"os.setgid(65534); os.setuid(65534); sys.argv = ['davincirunctl', 'stop', {job.name!r}]; main()"
    )
    done = subprocess.run([PY, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no job" in done.stderr
    assert job.process.poll() is None
