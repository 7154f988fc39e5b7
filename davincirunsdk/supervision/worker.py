"""One worker process, from its spawn to its reaping, in one coroutine.

The process is started with `subprocess` in a thread and awaited through a pidfd, not with asyncio's
own subprocess calls. Those fork in the loop's thread; before Python 3.12 they depend on a child
watcher that belongs to the host program; they report an exit status that the host took away as
255; and on some versions their wait ends only when the last holder of the pipe has closed it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import Patience, in_thread, resolve
from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.types import WorkerState, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from davincirunsdk.cluster import WorkerSpec
    from davincirunsdk.logs.pump import LogPump

logger: logging.Logger = logging.getLogger("davincirunsdk")

_CLEAN_START = (
    "import os, signal, sys\n"
    "trouble, *command = sys.argv[1:]\n"
    "os.set_inheritable(int(trouble), False)\n"
    "for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP}:\n"
    "    try: signal.signal(number, signal.SIG_DFL)\n"
    "    except OSError: pass\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"
    "try: os.execvp(command[0], command)\n"
    "except OSError as error: os.write(int(trouble), b'%d' % error.errno)\n"
)
"""Runs a command with default signals, which `subprocess` cannot; its first argument is a pipe that closes
when the command runs, or takes the number of the error why it cannot."""

_ADVICE = {
    errno.EAGAIN: "the limit on processes is reached: see `ulimit -u` and the container's pids limit",
    errno.EMFILE: "the limit on open files is reached: see `ulimit -n`",
    errno.ENOEXEC: "a script needs a first line such as `#!/bin/sh`",
}

_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info` of linux/pidfd.h, first version, 64 bytes; the exit status is its last field."""


class Worker:
    """One process of a job. All methods belong to the loop's thread.

    Args:
        spec: What to start.
        pump: Carries its output.
        on_exit: Called in the moment its end is known, before it is reaped.
        on_cancel: Called when the coroutine is cancelled, to have the job stopped: the coroutine
            goes on until the process has ended.

    Attributes:
        pid: None before the start.
        exit_code: As in `subprocess`; None while it runs, and when nobody could learn it.
        running: True from the start to the end.
        told: True once its process group was asked to end.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        pump: LogPump,
        *,
        on_exit: Callable[[Worker], None],
        on_cancel: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.pump = pump
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.running: bool = False
        self.told: bool = False
        self.started: float | None = None
        self.ended: float | None = None
        self.state: WorkerState = WorkerState.PENDING
        self.pump_ended: bool = False
        self._on_exit = on_exit
        self._on_cancel = on_cancel
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: int | None = None
        self._abandon: asyncio.Future[None] | None = None

    async def run(self, started: asyncio.Future[None]) -> None:
        """Start the process, wait for its end, reap it, and wait for the end of its output.

        Cancelling has the job stopped, and goes on when this process is gone.

        Args:
            started: Gets its result when the process runs, or the `WorkerSpawnError`.
        """
        waits = Patience(self._on_cancel)
        loop = asyncio.get_running_loop()
        self._abandon = loop.create_future()
        try:
            output = self.pump.start()
        except OSError as error:
            resolve_error(started, spawn_error(self.spec, error))
            return
        try:
            try:
                process, handle = await waits.wait(in_thread(_spawn, self.spec, self.pump.source))
            except OSError as error:
                self.pump.close_source()
                resolve_error(started, spawn_error(self.spec, error))
            else:
                self.pump.close_source()
                self._process, self._handle = process, handle
                self.pid = process.pid
                self.started = time.time()
                self.running = True
                self.state = WorkerState.RUNNING
                resolve(started, None)
                await self._wait_for_exit(waits)
                self.exit_code = self._peek()
                self.ended = time.time()
                self.running = False
                self._on_exit(self)
                self._reap()
            # A stuck disk or a stranger that holds the pipe must not hold the job.
            await waits.until_any(output, self._abandon)
        finally:
            self.pump_ended = True
        waits.settle()

    async def _wait_for_exit(self, waits: Patience) -> None:
        assert self._abandon is not None
        if self._handle is None:
            assert self.pid is not None
            await waits.until_any(in_thread(_wait_without_handle, self.pid), self._abandon)
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._handle, resolve, ended, None)
        try:
            await waits.until_any(ended, self._abandon)
        finally:
            loop.remove_reader(self._handle)

    def _peek(self) -> int | None:
        """Learn the exit status and leave the zombie, so that its group's number stays taken."""
        try:
            found = os.waitid(*self._identity(), os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return None if self._handle is None else _status_kept_by_kernel(self._handle)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _reap(self) -> None:
        try:
            os.waitid(*self._identity(), os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            # The host program reaps every child: nothing is left to do.
            pass
        assert self._process is not None
        self._process.returncode = self.exit_code or 0
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _identity(self) -> tuple[int, int]:
        assert self.pid is not None
        return (os.P_PID, self.pid) if self._handle is None else (os.P_PIDFD, self._handle)

    def signal(self, number: int) -> bool:
        """Signal the process group.

        Returns:
            False when that cannot be: the process has been reaped, and the group's number may be
            another's.
        """
        if self.pid is None or not self._is_ours():
            return False
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError) as error:
            logger.debug("signal %d to group %d: %s", number, self.pid, error)
            return False
        return True

    def _is_ours(self) -> bool:
        """Tell whether the number is still this process's: a host program may have reaped it."""
        if self._process is None or self._process.returncode is not None:
            return False
        if self._handle is None:
            return True
        try:
            signal.pidfd_send_signal(self._handle, 0)
        except OSError as error:
            return error.errno != errno.ESRCH
        return True

    def terminate(self) -> None:
        """Ask the process group to end: SIGTERM, and SIGCONT since a stopped process takes no other."""
        self.state = WorkerState.STOPPING
        self.terminate_rest()

    def terminate_rest(self) -> None:
        """Ask what it leaves in its group to end; from `on_exit`, while the group's number is taken."""
        self.told = self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process group at once."""
        self.state = WorkerState.KILLED
        self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Wait no longer, neither for the end of a process that nothing ends nor for that of its output."""
        self.pump.give_up()
        if self._abandon is not None:
            resolve(self._abandon, None)

    def status(self) -> WorkerStatus:
        """Return how it stands now."""
        return WorkerStatus(
            rank=self.spec.rank,
            local_rank=self.spec.local_rank,
            device_id=self.spec.device_id,
            npu_id=self.spec.npu_id,
            pid=self.pid,
            state=self.state,
            exit_code=self.exit_code,
            started=self.started,
            ended=self.ended,
            log_path=self.spec.log_path,
            log_bytes=self.pump.file.size,
            last_output=self.pump.last_output,
            last_line=self.pump.last_line(),
            lost_bytes=self.pump.file.lost,
            name=self.spec.name,
            progress=self.pump.progress(),
        )


def resolve_error(future: asyncio.Future[None], error: Exception) -> None:
    """Set a future's exception unless it is done."""
    if not future.done():
        future.set_exception(error)


def _spawn(spec: WorkerSpec, output: int) -> tuple[subprocess.Popen[bytes], int | None]:
    if not (sys.executable and _signals_are_odd()):
        process = _start(spec, spec.command, output)
        return process, _open_handle(process.pid)
    source, trouble = os.pipe()
    with open(source, "rb") as found:
        try:
            command = [sys.executable, "-I", "-S", "-c", _CLEAN_START, str(trouble), *spec.command]
            process = _start(spec, command, output, trouble)
        finally:
            os.close(trouble)
        number = found.read()
    if number:
        process.wait()
        raise OSError(int(number), os.strerror(int(number)))
    return process, _open_handle(process.pid)


def _start(spec: WorkerSpec, command: Sequence[str], output: int, *inherited: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=spec.work_dir,
        env=spec.env,
        start_new_session=True,
        pass_fds=inherited,
    )


def _signals_are_odd() -> bool:
    """Tell whether the host program ignores or blocks signals that a worker would inherit so.

    `subprocess` resets what Python itself ignores, and exec resets handlers. An ignored hang-up is
    passed on: it is the meaning of nohup.
    """
    # The kernel knows better than `signal`, which does not hear of what C code ignores.
    with open("/proc/thread-self/status", encoding="ascii", errors="replace") as status:
        masks = {line[:6]: int(line[7:], 16) for line in status if line.startswith(("SigBlk", "SigIgn"))}
    passed_on = {signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ}
    # Two more are the C library's own; its posix_spawn() has children ignore them.
    valid = signal.valid_signals()
    return bool(masks["SigBlk"] & _mask(valid) | masks["SigIgn"] & _mask(valid - passed_on))


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << (number - 1) for number in numbers)


def spawn_error(spec: WorkerSpec, error: OSError) -> WorkerSpawnError:
    """Say that, and why, a worker cannot be started."""
    # The command itself was found before: what is missing is what its first line names.
    advice = "; is the interpreter in its first line there?" if error.errno == errno.ENOENT else ""
    return WorkerSpawnError(
        f"{spec.name} cannot be started: {spec.command[0]}: {explain(error)}{advice}",
        errno=error.errno,
        rank=spec.rank,
    )


def explain(error: OSError) -> str:
    """Say why something cannot be started or opened, and what to do where a limit is reached."""
    why = os.strerror(error.errno) if error.errno else str(error)
    return "; ".join(filter(None, [why, _ADVICE.get(error.errno or 0)]))


def _open_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        # Kernels before 5.3, or a host program that ignores SIGCHLD and a process that is gone.
        return None


def _wait_without_handle(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return


def _status_kept_by_kernel(handle: int) -> int | None:
    """Ask the kernel for the status of a process that somebody else has reaped (since Linux 6.15)."""
    query = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, query)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(query)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None
