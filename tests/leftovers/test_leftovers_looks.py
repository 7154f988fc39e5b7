"""Looks at processes: what they find, and that none of them can hold the end of a job."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_alive, wait_until

from davincirunsdk.leftovers import proc as proc_module
from davincirunsdk.leftovers.ending import Ending
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.leftovers.pass_on import pass_on, reached_by_sender
from davincirunsdk.leftovers.proc import LOOK_PATIENCE, Proc, send, since_boot
from davincirunsdk.leftovers.process_tree import ProcessTree, Top, reap_orphans

PY = [sys.executable, "-S", "-E", "-c"]


class Child:
    """A process of this test, started with a mark."""

    def __init__(self, code: str, *, mark: str | None = None, words: list[str] | None = None) -> None:
        env = dict(os.environ)
        if mark is not None:
            env[JOB_MARK] = mark
        self.process = subprocess.Popen(
            words or [*PY, code],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.pid = self.process.pid

    def line(self) -> str:
        """Read the next line that it prints."""
        return self.output.readline().decode().strip()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


REST = "print('ready', flush=True)\nimport time\ntime.sleep(600)\n"


def ending(mark: str, grace: float, *tops: Top, proc: Proc | None = None) -> Ending:
    """Make the end of a job with a deadline."""
    deadline = time.monotonic() + grace
    return Ending(ProcessTree(mark, proc=proc), tops=lambda: tops, deadline=lambda: deadline)


class StuckProc(Proc):
    """Shows everything but environments: a FIFO stands for those, so that reading them never ends."""

    def __init__(self, folder: Path, stuck: int) -> None:
        super().__init__(str(folder))
        for pid in os.listdir("/proc"):
            if pid.isdigit() and int(pid) != stuck:
                (folder / pid).symlink_to(f"/proc/{pid}")
        (folder / str(stuck)).mkdir()
        os.mkfifo(folder / str(stuck) / "environ")
        for name in ("stat", "status", "limits", "fd", "wchan", "task"):
            (folder / str(stuck) / name).symlink_to(f"/proc/{stuck}/{name}")


@pytest.mark.parametrize("number", [1, 3])
def test_a_process_that_cannot_be_looked_at_holds_nobody(tmp_path: Path, number: int) -> None:
    """A read of an environment that never ends is given up, and the rest of the job is ended."""
    mark = os.urandom(8).hex()
    with Child(REST) as stuck, Child(REST, mark=mark) as ours:
        assert (stuck.line(), ours.line()) == ("ready", "ready")
        stuck_proc = StuckProc(tmp_path, stuck.pid)
        tree = ProcessTree(mark, proc=stuck_proc)
        began = time.monotonic()
        for _ in range(number):
            assert [process.pid for process in tree.find()] == [ours.pid]
        # Given up once, and not tried again.
        assert time.monotonic() - began < LOOK_PATIENCE + 2.0
        end = Ending(tree, tops=lambda: [Top(ours.pid)], deadline=lambda: time.monotonic() + 5)
        end.end()
        end.close()
        assert ours.process.wait(5) == -signal.SIGTERM
        assert is_alive(stuck.pid)
        # Whoever reads the FIFO goes on when somebody opens it: no thread stays behind.
        os.close(os.open(tmp_path / str(stuck.pid) / "environ", os.O_WRONLY))


def test_a_stuck_process_of_the_job_is_ended_too(tmp_path: Path) -> None:
    """It is found by its worker's session, and by what it inherits beside the environment."""
    with Child(REST) as stuck:
        assert stuck.line() == "ready"
        end = ending("0" * 16, 5.0, Top(stuck.pid), proc=StuckProc(tmp_path, stuck.pid))
        end.end()
        end.close()
        assert stuck.process.wait(5) == -signal.SIGTERM
        os.close(os.open(tmp_path / str(stuck.pid) / "environ", os.O_WRONLY))


def test_without_proc_nothing_is_found_and_nothing_breaks(tmp_path: Path) -> None:
    """A container may hide all of it."""
    end = ending("0" * 16, 5.0, Top(os.getpid()), proc=Proc(str(tmp_path)))
    end.stop()
    assert end.end() == ()
    end.close()


@pytest.mark.parametrize("error", [PermissionError, OSError, AttributeError])
def test_without_handles_the_end_is_seen_and_the_processor_rests(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pidfd calls are refused or missing, a helper with a handler has its time, and no core burns."""

    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    mark = os.urandom(8).hex()
    slow = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(1), sys.exit(7)))\n" + REST
    with Child(slow, mark=mark) as child:
        assert child.line() == "ready"
        used = time.thread_time()
        end = ending(mark, 10.0, Top(child.pid))
        end.end()
        end.close()
        assert time.thread_time() - used < 0.5
        assert child.process.wait(5) == 7


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    """Another start time is another process: it gets no signal."""
    with Child(REST) as child:
        assert child.line() == "ready"
        seen = Proc().look(child.pid)
        assert seen is not None
        assert seen.started <= since_boot()
        assert not send(Proc(), seen._replace(started=seen.started - 1), signal.SIGKILL)
        assert child.process.poll() is None
        assert send(Proc(), seen, signal.SIGKILL)
        assert child.process.wait(5) == -9


@pytest.mark.parametrize("name", ["a b", "((x))", ") S 1 1 1", "\xff\xfe"])
def test_names_of_any_kind_are_read(name: str) -> None:
    """A process may call itself what it likes."""
    code = f"open('/proc/self/comm', 'wb').write({name.encode('latin-1')!r})\n" + REST
    with Child(code) as child:
        assert child.line() == "ready"
        seen = Proc().look(child.pid)
        assert seen is not None
        assert (seen.parent, seen.session, seen.threads) == (os.getpid(), child.pid, 1)
        assert seen.command == name.encode("latin-1").decode(errors="replace")


HANDLERS = {
    "handler": "signal.signal(signal.SIGUSR1, lambda *_: print('got', flush=True))\n",
    "waits": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    "print('ready', flush=True)\nsignal.sigwait([signal.SIGUSR1])\nprint('got', flush=True)\n",
    "ignores": "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n",
    "default": "",
    "blocks": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n",
}


@pytest.mark.parametrize(("kind", "gets"), [(kind, kind in ("handler", "waits")) for kind in HANDLERS])
def test_a_signal_is_passed_on_to_who_handles_it(kind: str, gets: bool) -> None:
    """To one that has a handler or waits for it; never to one that it would kill."""
    mark = os.urandom(8).hex()
    with Child("import signal\n" + HANDLERS[kind] + REST, mark=mark) as child:
        assert child.line() == "ready"
        if kind == "waits":
            wait_until(lambda: Proc().awaits_signal(child.pid, signal.SIGUSR1))
        told = pass_on(signal.SIGUSR1, ProcessTree(mark), [Top(child.pid)])
        assert [process.pid for process in told] == ([child.pid] if gets else [])
        if gets:
            assert child.line() == "got"
        assert child.process.poll() is None
        if kind == "blocks":
            status = Path(f"/proc/{child.pid}/status").read_text()
            assert "ShdPnd:\t0000000000000000" in status


def test_a_signal_is_passed_on_below_wrappers_and_not_below_launchers() -> None:
    """`bash | tee` in front of a rank live on; what a nested launcher starts is that launcher's to tell."""
    mark = os.urandom(8).hex()
    rank = (
        "import signal, time\nsignal.signal(10, lambda *_: print('got', flush=True))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    line = f"{sys.executable} -S -E -c {shlex.quote(rank)} | cat"
    with Child("", words=["bash", "-c", line], mark=mark) as wrapped:
        assert wrapped.line() == "ready"
        told = pass_on(signal.SIGUSR1, ProcessTree(mark), [Top(wrapped.pid)])
        assert len(told) == 1
        assert wrapped.line() == "got"
        assert wrapped.process.poll() is None
        end = ending(mark, 0.0, Top(wrapped.pid))
        end.end()
        end.close()
    launcher = (
        "import os, signal, subprocess, sys\nsignal.signal(10, lambda *_: None)\n"
        f"child = subprocess.Popen([*{PY!r}, {rank!r}], "
        f"env={{**os.environ, {JOB_MARK!r}: {mark + '/0'!r}}})\nchild.wait()"
    )
    with Child(launcher, mark=mark) as outer:
        assert outer.line() == "ready"
        told = pass_on(signal.SIGUSR1, ProcessTree(mark), [Top(outer.pid)])
        assert [process.pid for process in told] == [outer.pid]
        end = ending(mark, 0.0, Top(outer.pid))
        end.end()
        end.close()


@pytest.mark.parametrize(
    ("environment", "reached"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, False),
        ({"SLURM_STEP_ID": "batch", "SLURM_PROCID": "0"}, False),
        ({}, False),
    ],
)
def test_who_is_reached_by_slurm(environment: dict[str, str], reached: bool) -> None:
    """In a step Slurm signals every process; a batch script's own children it does not."""
    assert reached_by_sender(environment) is reached


def test_dead_children_are_reaped_without_a_look_at_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that somebody awaits are left alone."""
    monkeypatch.setattr(proc_module.Proc, "pids", lambda _: pytest.fail("it has read all of /proc"))
    awaited, orphan = (subprocess.Popen([*PY, "raise SystemExit(3)"]) for _ in range(2))
    for process in (awaited, orphan):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    reap_orphans(but=[awaited.pid, None])
    assert not Path(f"/proc/{orphan.pid}").exists()
    orphan.returncode = 0
    assert awaited.wait() == 3


def test_a_leader_whose_other_threads_run_is_not_dead() -> None:
    """The main thread may end by itself; the kernel then calls the process a zombie."""
    code = (
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print('ready', flush=True)\nctypes.CDLL(None).pthread_exit(0)\n"
    )
    with Child(code) as child:
        assert child.line() == "ready"
        wait_until(lambda: (seen := Proc().look(child.pid)) is not None and seen.state == "Z")
        seen = Proc().look(child.pid)
        assert seen is not None
        assert not seen.is_dead


HIDDEN = """
import ctypes, os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        print("hidden", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
if sys.argv[1] == "killed":
    time.sleep(600)
time.sleep(1)
sys.exit(int(sys.argv[1]))
"""

JOB = f"""
import asyncio, sys
import davincirunsdk
async def main():
    command = [sys.executable, "-S", "-c", {HIDDEN!r}, sys.argv[1]]
    options = dict(nproc_per_node=2, grace_period=2, log_dir=sys.argv[2])
    async with davincirunsdk.FMKManager(command, **options) as manager:
        try:
            await manager.wait()
        except davincirunsdk.DistributedRuntimeError:
            pass
asyncio.run(main())
"""
_RIGHTS = "-sys_ptrace,-sys_admin,-perfmon"
# Who is root may read everything, unless this right is taken away.
WITHOUT_RIGHTS = ["setpriv", f"--bounding-set={_RIGHTS}", "--inh-caps=-all"] if os.getuid() == 0 else []


@pytest.mark.skipif(WITHOUT_RIGHTS != [] and shutil.which("setpriv") is None, reason="needs setpriv as root")
@pytest.mark.parametrize("way", ["0", "3", "killed"])
def test_a_job_ends_what_hides_its_environment(way: str, tmp_path: Path) -> None:
    """After a good and a bad end and by the guardian: daemons that are not dumpable, as ssh-agent."""
    words = [*WITHOUT_RIGHTS, sys.executable, "-c", JOB, way, str(tmp_path)]
    with subprocess.Popen(words, cwd=tmp_path, start_new_session=True) as supervisor:
        pids: list[int] = []

        def hidden() -> list[int]:
            lines = [path.read_text() for path in tmp_path.glob("*-proc-*.txt")]
            pids[:] = [int(line.split()[1]) for line in lines if line.endswith("\n")]
            return pids

        wait_until(lambda: len(hidden()) == 2)
        try:
            if way == "killed":
                assert not _is_readable(pids[0])
                supervisor.kill()
            assert supervisor.wait(30) == (-9 if way == "killed" else 0)
            wait_until(lambda: not any(map(is_alive, pids)), 10.0 if way == "killed" else 0.1)
        finally:
            supervisor.kill()
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)


def _is_readable(pid: int) -> bool:
    """Tell whether somebody without special rights may read a process's environment."""
    words = [*WITHOUT_RIGHTS, "cat", f"/proc/{pid}/environ"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
