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
    """An orphan with a job's mark is shown, and ended on `--yes`; processes of living jobs never are."""
    program = "import time; print('here', flush=True); time.sleep(60)"
    launcher = (
        "import os, subprocess, sys\n"
        "environment = os.environ | {'DAVINCIRUN_JOB': 'dead0000'}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {program!r}], env=environment,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
    )
    pid = int(subprocess.run([PY, "-c", launcher], capture_output=True, text=True, check=True).stdout)
    wait_until(lambda: psutil.Process(pid).environ().get("DAVINCIRUN_JOB") == "dead0000")
    assert f"{pid}  " in ctl("clean").stdout
    assert is_alive(pid)
    psutil.Process(pid).terminate()
    wait_until(lambda: not is_alive(pid))


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
