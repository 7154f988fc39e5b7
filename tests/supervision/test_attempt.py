"""The workers together: no end unseen, no stop without its cause, nothing that holds the job for ever."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import is_alive, wait_until

import davincirunsdk
from davincirunsdk import DistributedRuntimeError, FMKManager, JobState, WorkerSpawnError, WorkerState
from davincirunsdk.supervision import spawn as spawn_module
from davincirunsdk.supervision import worker as worker_module
from davincirunsdk.supervision.last_words import ends_with_exception, is_traceback_open
from davincirunsdk.supervision.messages import Inbox, Message, Nudge

if TYPE_CHECKING:
    from collections.abc import Iterator

PY = sys.executable
COMMAND = [PY, "-m", "davincirunsdk", "--log-dir", "log"]

pytestmark = pytest.mark.usefixtures("job_folder")


class TestFailuresThatStopNobody:
    """Without `fail_fast` a failure is told and the others go on."""

    @pytest.mark.parametrize("apart", [0.0, 0.001, 0.003, 0.01, 0.05])
    async def test_two_ranks_that_fail_close_together(self, apart: float) -> None:
        """However close: supervision ends, and the last word names both."""
        program = (
            "import os, sys, time\n"
            "while not os.path.exists('go'): time.sleep(0.0005)\n"
            f"time.sleep({apart} * int(os.environ['RANK']))\n"
            "os._exit(3 + int(os.environ['RANK']))"
        )
        async with FMKManager([PY, "-S", "-E", "-c", program], nproc_per_node=2, fail_fast=False) as job:
            Path("go").touch()
            with pytest.raises(DistributedRuntimeError):
                await asyncio.wait_for(job.wait(), 20)
            events = [event async for event in job.events()]
            with pytest.raises(DistributedRuntimeError) as caught:
                await job.wait()
        assert sorted(failure.exit_code or 0 for failure in caught.value.failures) == [3, 4]
        assert [event.kind for event in events].count("exited") == 2

    async def test_a_survivor_that_fails_later_is_in_the_last_word(self) -> None:
        """The verdict of the first failure is judged again when all is over."""
        program = (
            "import os, sys, time\n"
            "while os.environ['RANK'] == '1' and not os.path.exists('go'): time.sleep(0.01)\n"
            "sys.exit(3 + int(os.environ['RANK']))"
        )
        async with FMKManager([PY, "-c", program], nproc_per_node=2, fail_fast=False) as job:
            with pytest.raises(DistributedRuntimeError) as first:
                await job.wait()
            assert [failure.rank for failure in first.value.failures] == [0]
            Path("go").touch()
            async for _ in job.events():
                pass
            with pytest.raises(DistributedRuntimeError) as last:
                await job.wait()
        assert [failure.rank for failure in last.value.failures] == [0, 1]

    @pytest.mark.parametrize("code", [0, 3])
    async def test_helpers_that_survive_and_end_by_themselves(self, code: int) -> None:
        """The end of the last of them, and of what it starts before, is the end of the job."""
        script = (
            "setsid sh -c 'touch runs; while [ ! -e go ]; do sleep 0.02; done; setsid sleep 0.3 & exit 0' "
            f">/dev/null 2>&1 & while [ ! -e runs ]; do sleep 0.02; done; exit {code}"
        )
        async with FMKManager(["sh", "-c", script], nproc_per_node=1, fail_fast=False) as job:
            if code:
                with pytest.raises(DistributedRuntimeError):
                    await job.wait()
            else:
                await job.wait()
            assert job.workers[0].exit_code == code
            Path("go").touch()

            async def read() -> list[str]:
                return [event.kind async for event in job.events()]

            kinds = await asyncio.wait_for(read(), 20)
            assert "stopping" not in kinds
            assert "leftover" not in kinds


async def test_no_message_is_lost_to_a_cancellation() -> None:
    """A task that is cancelled in the very moment of a delivery takes the message all the same."""
    cancelled = 0

    def note() -> None:
        nonlocal cancelled
        cancelled += 1

    inbox, sent = Inbox(on_cancel=note), [Nudge() for _ in range(200)]
    got: list[Message] = []

    async def read() -> None:
        while len(got) < len(sent):
            await inbox.filled()
            got.extend(inbox.posted())

    reader = asyncio.create_task(read())
    for number, message in enumerate(sent):
        await asyncio.sleep(0)
        if number % 3 == 0:
            reader.cancel()
        inbox.post(message)
        if number % 3 == 1:
            reader.cancel()
    await asyncio.wait_for(asyncio.shield(reader), 20)
    inbox.close()
    assert [id(one) for one in got] == [id(one) for one in sent]
    assert cancelled
    assert isinstance(inbox.cancellation, asyncio.CancelledError)


class TestStrays:
    """Whoever holds the output of a worker that has ended does not hold the job."""

    @pytest.fixture
    def stranger(self) -> Iterator[Path]:
        """A file for the pid of a process that is not the job's any more; it is ended afterwards."""
        path = Path("stranger").absolute()
        yield path
        os.killpg(int(path.read_text()), signal.SIGKILL)

    @pytest.mark.parametrize("code", [0, 3])
    async def test_one_that_keeps_writing(self, code: int) -> None:
        """A helper of the job that never falls silent is ended when its grace period is over."""
        script = f"setsid sh -c 'while :; do echo more; sleep 0.02; done' & sleep 0.2; exit {code}"
        async with FMKManager(["sh", "-c", script], nproc_per_node=1, grace_period=1) as job:
            waiting = asyncio.ensure_future(asyncio.wait_for(job.wait(), 20))
            await asyncio.wait({waiting})
            assert job.workers[0].exit_code == code
            assert (waiting.exception() is None) == (code == 0)
        result = job.workers[0]
        assert result.ended is not None
        assert time.time() - result.ended < 8

    @pytest.mark.parametrize("words", ["echo more; sleep 0.02", "sleep 600"])
    async def test_a_stranger(self, words: str, stranger: Path) -> None:
        """One that nobody can tell to be the job's is not waited for either, whatever it writes."""
        # Without the mark, without a parent, in a session of its own.
        script = (
            f"setsid env -i setsid sh -c 'echo $$ > {stranger}; while :; do {words}; done' & "
            f"while [ ! -s {stranger} ]; do sleep 0.02; done; sleep 0.1; exit 0"
        )
        async with FMKManager(["setsid", "-w", "sh", "-c", script], nproc_per_node=1, grace_period=1) as job:
            result = await asyncio.wait_for(job.wait(), 20)
        assert result.exit_code == 0


class TestLastWords:
    """A rank that is about to say why it fails is let finish, for a moment."""

    PROGRAM = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists('begun'): time.sleep(0.01)\n"
        "    time.sleep(0.1)\n"
        "    sys.exit(3)\n"
        "sys.stderr.write('Traceback (most recent call last):\\n  File \"train.py\", line 1\\n')\n"
        "open('begun', 'w').close()\n"
        "while not os.path.exists('told'): time.sleep(0.01)\n"
        "sys.stderr.write('ValueError: boom\\n')\n"
        "os._exit(1)\n"
    )

    async def test_an_unfinished_traceback_is_finished(self) -> None:
        """The sibling's last line is in its log, and its end is its own."""
        async with FMKManager([PY, "-c", self.PROGRAM], nproc_per_node=2) as job:
            async for event in job.events():
                if event.kind == "stopping":
                    Path("told").touch()
            with pytest.raises(DistributedRuntimeError) as caught:
                await job.wait()
        assert job.workers[1].log_path.read_text().endswith("ValueError: boom\n")
        assert job.workers[1].exit_code == 1
        assert {failure.rank for failure in caught.value.failures} == {0, 1}

    async def test_one_that_is_never_finished_is_not_waited_for(self) -> None:
        """After its moment it is stopped like the others."""
        async with FMKManager([PY, "-c", self.PROGRAM], nproc_per_node=2) as job:
            with pytest.raises(DistributedRuntimeError):
                await asyncio.wait_for(job.wait(), 10)
        assert job.workers[1].exit_code == -signal.SIGTERM

    @pytest.mark.parametrize(
        ("text", "is_open", "raised"),
        [
            ("", False, False),
            ("step 3\n", False, False),
            ("Traceback (most recent call last):\n", True, False),
            ('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n', True, False),
            ("Traceback (most recent call last):\n  File\nValueError: bo", True, False),
            ("Traceback (most recent call last):\n  File\nValueError: boom\n", False, True),
            ("Traceback (most recent call last):\n  File\nValueError: boom\ngoing on\n", False, False),
            ("[rank1]: Traceback (most recent call last):\n[rank1]:   File\n", True, False),
            ("[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: OSError\n", False, True),
            (
                (
                    "Traceback (most recent call last):\n  File\nKeyError: 1\n\n"
                    "During handling of the above exception, another exception occurred:\n\n"
                ),
                True,
                False,
            ),
        ],
    )
    def test_what_the_end_of_output_says(self, text: str, is_open: bool, raised: bool) -> None:
        """Open is a traceback without its exception; raised is output that ends with one."""
        assert is_traceback_open(text.encode()) == is_open
        assert ends_with_exception(text.encode()) == raised


class TestExitCodesThatAreTaken:
    """A host program that reaps or ignores its children keeps exit codes from us."""

    @pytest.fixture
    def unknown(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Kernels before 6.15 do not tell either."""
        monkeypatch.setattr(worker_module, "_status_kept_by_kernel", lambda handle: None)
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        yield
        signal.signal(signal.SIGCHLD, before)

    @pytest.mark.usefixtures("unknown")
    async def test_an_unknown_end_is_no_failure(self) -> None:
        """A good rank stops nobody; what is known and what is not is said, before the start as well."""
        async with FMKManager(["sh", "-c", "sleep 0.$RANK; echo done"], nproc_per_node=3) as job:
            result = await job.wait()
            events = [event async for event in job.events()]
        assert (result.state, result.exit_code) == (JobState.SUCCEEDED, 0)
        assert [worker.exit_code for worker in result.workers] == [None] * 3
        assert [worker.log_path.read_text() for worker in result.workers] == ["done\n"] * 3
        kinds = [event.kind for event in events]
        assert kinds.index("warning") < kinds.index("started")
        assert "SIGCHLD is ignored" in events[kinds.index("warning")].detail

    @pytest.mark.usefixtures("unknown")
    async def test_an_unknown_end_with_a_traceback_is_a_failure(self) -> None:
        """Its own output says so."""
        program = "import os, time\nif os.environ['RANK'] == '0': time.sleep(600)\nraise ValueError('boom')"
        with pytest.raises(DistributedRuntimeError, match="ValueError: boom") as caught:
            async with FMKManager([PY, "-c", program], nproc_per_node=2) as job:
                await asyncio.wait_for(job.wait(), 20)
        assert caught.value.root_cause.rank == 1

    @pytest.mark.usefixtures("unknown")
    async def test_its_last_words_may_come_behind_its_end(self) -> None:
        """As through a filter that holds them a little longer than it lives."""
        worker = ["bash", "-c", 'exec "$0" -c "raise ValueError(\'boom\')" 2> >(sleep 0.3; cat)', PY]
        with pytest.raises(DistributedRuntimeError, match="ValueError: boom"):
            async with FMKManager(worker, nproc_per_node=1) as job:
                await asyncio.wait_for(job.wait(), 20)


NO_PIDFD = """
import ctypes, os, resource, struct, sys
# A seccomp filter of an older container: EPERM for pidfd_open and pidfd_send_signal.
numbers = [434, 424]
def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
program = op(0x20, 0, 0, 0)
for place, number in enumerate(numbers):
    program += op(0x15, len(numbers) - place, 0, number)
program += op(0x06, 0, 0, 0x7FFF0000) + op(0x06, 0, 0, 0x00050000 | 1)
text = ctypes.create_string_buffer(program)
filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(filter_), 0, 0) == 0
try:
    os.pidfd_open(os.getpid())
except PermissionError:
    pass
else:
    raise SystemExit("the filter does not work")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter is written for one machine's calls")
def test_calls_that_are_refused_are_done_without() -> None:
    """EPERM instead of ENOSYS: the stop works, the helper has its grace period, and no core is burnt."""
    helper = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    )
    program = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {helper!r}])\ntime.sleep(600)\n"
    )
    words = [*COMMAND[1:], "--nproc-per-node", "1", "--grace-period", "2", PY, "-c", program]
    process = subprocess.Popen(
        [PY, "-c", NO_PIDFD, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "ready" in line, process.communicate()[1]
    before = _processor_time(process.pid)
    began = time.monotonic()
    process.terminate()
    wait_until(lambda: time.monotonic() - began > 1.5)
    used = _processor_time(process.pid) - before
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert used < 0.75, f"{used} s of processor time while waiting"


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_that_may_not_be_signalled_is_named_at_once() -> None:
    """It runs as another user: said at once, counted as nothing it is not, and not waited for."""
    program = "import os, time; os.setuid(65534); print('ready', os.getpid(), flush=True); time.sleep(600)"
    words = [*COMMAND, "--nproc-per-node", "1", "--grace-period", "1", PY, "-c", program]
    process = subprocess.Popen(
        ["setpriv", "--bounding-set=-kill", "--inh-caps=-kill", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "ready" in line, process.communicate()[1]
    pid = int(line.split()[-1])
    try:
        process.terminate()
        _, said = process.communicate(timeout=30)
        assert process.returncode == 143
        assert f"rank 0, pid {pid}, cannot be signalled" in said
        assert "stuck in the kernel" not in said
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


class TestStartsThatHang:
    """A dead mount holds a thread, not the job."""

    @pytest.mark.parametrize("way", ["cancel", "stop"])
    async def test_log_folder(self, way: str, job_folder: Path) -> None:
        """Opening a log file never comes back: the start can be given up at any moment."""
        (job_folder / "log").mkdir()
        fifo = job_folder / "log" / f"{os.uname().nodename}-proc-rank-0-device-0.txt"
        os.mkfifo(fifo)
        job = FMKManager(["true"], nproc_per_node=1)
        start = asyncio.ensure_future(job.__aenter__())
        await asyncio.wait({start}, timeout=0.3)
        if way == "cancel":
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(start), 10)
        else:
            job.stop()
            with pytest.raises(WorkerSpawnError, match="before a worker was started"):
                await asyncio.wait_for(start, 10)
        # The mount is back: what the thread opens late is closed, see the fixture `nothing_left`.
        with fifo.open("rb") as reader:
            await asyncio.to_thread(reader.read)

    async def test_executable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An exec that never comes back is given up at the end of the grace period; a late one is ended."""
        spawn, go_on, late = spawn_module._spawn, threading.Event(), []

        def held_up(*arguments: object) -> object:
            if not go_on.is_set():
                go_on.wait(30)
                late.append(spawn(*arguments))  # type: ignore[arg-type]
                return late[0]
            return spawn(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(spawn_module, "_spawn", held_up)
        job = FMKManager(["sleep", "600"], nproc_per_node=2, grace_period=0.3)
        start = asyncio.ensure_future(job.__aenter__())
        await asyncio.wait({start}, timeout=0.3)
        job.stop()
        await asyncio.wait_for(asyncio.wait({start}), 10)
        assert start.exception() is None or isinstance(start.exception(), WorkerSpawnError)
        assert {worker.state for worker in job.workers} == {WorkerState.PENDING}
        go_on.set()
        while not late or is_alive(late[0][0].pid):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("look", ["stop", "end"])
async def test_a_look_that_hangs(look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at processes that never comes back is given up and said; the job ends."""
    monkeypatch.setattr("davincirunsdk.supervision.message_loop._LOOK_LIMIT", 0.3)
    go_on = threading.Event()
    monkeypatch.setattr(f"davincirunsdk.leftovers.ending.Ending.{look}", lambda _: go_on.wait(30))
    async with FMKManager(["sleep", "600"], nproc_per_node=2, grace_period=1) as job:
        await asyncio.wait_for(job.stop(), 20)
        events = [event async for event in job.events()]
        result = await job.wait()
    go_on.set()
    assert result.state == JobState.STOPPED
    assert any("holds up the look" in event.detail for event in events)


@pytest.mark.parametrize("code", [0, 1])
async def test_a_scheduler_of_several_nodes_is_kept(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of other nodes need it when those of its own node have ended; its end is no failure."""
    monkeypatch.setattr("davincirunsdk.supervision.attempt._SCHEDULER_GRACE", 0.1)
    program = (
        "import os, sys, time\n"
        "if os.environ['MS_ROLE'] != 'MS_SCHED': sys.exit()\n"
        "while not os.path.exists('elsewhere-ended'): time.sleep(0.02)\n"
        f"sys.exit({code})"
    )
    job = FMKManager(
        [PY, "-c", program],
        nproc_per_node=1,
        framework="mindspore",
        nnodes=2,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=23456,
    )
    async with job:
        while job.workers[0].exit_code is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert job.auxiliaries[0].state == "RUNNING"
        Path("elsewhere-ended").touch()
        result = await asyncio.wait_for(job.wait(), 20)
    assert (result.state, result.exit_code) == (JobState.SUCCEEDED, 0)
    assert result.auxiliaries[0].exit_code == code


def test_the_package_moves_away_while_a_job_runs(job_folder: Path) -> None:
    """What the end needs has been loaded: exit code and report are the worker's."""
    package = job_folder / "site" / "davincirunsdk"
    shutil.copytree(Path(davincirunsdk.__file__).parent, package)
    program = (
        "import os, time\nopen('runs', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\nos._exit(9)"
    )
    process = subprocess.Popen(
        [PY, "-m", "davincirunsdk", "--nproc-per-node", "1", PY, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
    )
    wait_until(lambda: (job_folder / "runs").exists())
    package.rename(job_folder / "elsewhere")
    (job_folder / "go").touch()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 9, said
    assert "rank 0" in said
    assert "Traceback" not in said


def test_without_proc_the_start_says_so() -> None:
    """Processes of a job are found in /proc: one sentence instead of a silent end."""
    script = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *COMMAND, "--nproc-per-node", "1", "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "found no /proc file system" in done.stderr
    assert "Traceback" not in done.stderr


class TestStopsThatOthersTell:
    """Platforms signal the workers themselves, and us in the same moment."""

    READY = "import os, signal, sys, time\nprint('ready', flush=True)\n"

    @pytest.mark.parametrize("shell", [False, True])
    async def test_a_worker_that_is_told_first(self, shell: bool) -> None:
        """Its end by the signal is part of the stop: nobody failed."""
        command = [PY, "-c", self.READY + "time.sleep(600)"]
        if shell:
            command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
        async with FMKManager(command, nproc_per_node=2) as job:
            await _until_ready(job, 2)
            pid = job.workers[0].pid
            assert pid is not None
            os.killpg(pid, signal.SIGTERM) if not shell else _end_children(pid)
            async for event in job.events():
                if event.kind == "stopping":
                    break
            await job.stop()
            result = await job.wait()
        assert (result.state, result.exit_code, result.failures) == (JobState.STOPPED, 143, ())
        assert {worker.state for worker in job.workers} == {WorkerState.STOPPED}

    async def test_a_worker_that_was_ended_before(self) -> None:
        """A stop that comes later has nothing to do with it."""
        program = self.READY + (
            "if os.environ['RANK'] == '1': signal.signal(15, lambda *_: None)\nwhile True: time.sleep(0.05)"
        )
        async with FMKManager([PY, "-c", program], nproc_per_node=2, grace_period=4) as job:
            await _until_ready(job, 2)
            pid = job.workers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(1.5)
            await job.stop(now=True)
            with pytest.raises(DistributedRuntimeError) as caught:
                await job.wait()
        assert caught.value.root_cause.rank == 0

    async def test_a_failure_of_its_own_is_one_in_any_moment(self) -> None:
        """An exit code that no stop signal gives is not excused by a stop that follows."""
        program = "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(3)\ntime.sleep(600)"
        async with FMKManager([PY, "-c", program], nproc_per_node=2) as job:
            async for event in job.events():
                if event.kind == "stopping":
                    break
            await job.stop()
            with pytest.raises(DistributedRuntimeError) as caught:
                await job.wait()
        assert caught.value.exit_code == 3


async def _until_ready(job: FMKManager, count: int) -> None:
    async with job.logs() as lines:
        async for line in lines:
            count -= line.text == "ready"
            if not count:
                return


def _end_children(pid: int) -> None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)


TOGETHER = '''
import asyncio, contextlib, os, sys, threading
from davincirunsdk import DistributedRuntimeError, FMKManager

WORKER = """
import os, sys
gate = open("gate")
print("ready", flush=True)
os.close(1), os.close(2)
gate.read()
os._exit(int(sys.argv[1][int(os.environ["RANK"])]))
"""


def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


async def main(threads, codes):
    gate = os.open("gate", os.O_RDWR)
    async with FMKManager([sys.executable, "-c", WORKER, codes], nproc_per_node=4) as manager:
        for worker in manager.workers:
            while b"ready" not in open(worker.log_path, "rb").read():
                await asyncio.sleep(0.01)
            while os.path.exists(f"/proc/{worker.pid}/fd/2"):
                await asyncio.sleep(0.01)
        if threads == "none":
            threading.Thread.start = refuse
        os.close(gate)
        for worker in manager.workers:
            # The loop stands still, and then sees all ends at once.
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(DistributedRuntimeError):
            await manager.wait()
    print(*(worker.state for worker in manager.workers), *(worker.exit_code for worker in manager.workers))


asyncio.run(main(*sys.argv[1:]))
'''


@pytest.mark.parametrize("threads", ["some", "none"])
@pytest.mark.parametrize("codes", ["0000", "0307"])
def test_ends_in_one_moment_are_all_judged(threads: str, codes: str) -> None:
    """Nothing follows an end before all that is known has been judged; Python 3.12 starts no thread then."""
    os.mkfifo("gate")
    words = [PY, "-c", TOGETHER, threads, codes]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    states = ["SUCCEEDED" if code == "0" else "FAILED" for code in codes]
    assert done.stdout.split() == [*states, *codes], done.stderr
