"""The start of a worker's process, in a thread that a dead mount may hold."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import WorkerSpawnError, explain
from davincirunsdk.leftovers import mark

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from davincirunsdk.cluster import WorkerSpec
    from davincirunsdk.logs.pump import LogPump


_CLEAN_START = (
    "import os, signal, sys\n"
    "trouble, *command = sys.argv[1:]\n"
    "os.set_inheritable(int(trouble), False)\n"
    "for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP}:\n"
    "    try: signal.signal(number, signal.SIG_DFL)\n"
    "    except OSError: pass\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"
    "if os.isatty(0):\n"
    "    import fcntl, termios\n"
    "    fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "try: os.execvp(command[0], command)\n"
    "except OSError as error: os.write(int(trouble), b'%d' % error.errno)\n"
)
"""Runs a command with default signals, which `subprocess` cannot, and with the terminal at its standard
input as its own; its first argument is a pipe that closes when the command runs, or takes the number of
the error why it cannot."""


class Start:
    """The start of a process in a thread, which a dead mount may hold for ever.

    Args:
        spec: What to start.
        pump: Gives the pipe for its output; our copy of that end is closed after the start.
    """

    def __init__(self, spec: WorkerSpec, pump: LogPump) -> None:
        self._spec = spec
        self._pump = pump
        self._lock = threading.Lock()
        self._started: tuple[subprocess.Popen[bytes], int | None] | None = None
        self._error: BaseException | None = None
        self._given_up = False

    def in_thread(self) -> asyncio.Future[None]:
        """Begin to start it.

        Raises:
            OSError: There is no thread to be had.
        """
        try:
            return in_thread(self._spawn)
        except OSError:
            self._pump.close_source()
            raise

    def _spawn(self) -> None:
        # One that starts after all when nobody waits any more is ended.
        try:
            started = _spawn(self._spec, self._pump.source)
        except BaseException as error:
            with self._lock:
                self._error = error
            return
        finally:
            self._pump.close_source()
        with self._lock:
            if not self._given_up:
                self._started = started
                return
        process, handle = started
        process.kill()
        process.wait()
        if handle is not None:
            os.close(handle)

    def take(self) -> tuple[subprocess.Popen[bytes], int | None]:
        """Give what was started.

        Raises:
            OSError: It could not be, or not in time.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._started is None:
                self._given_up = True
                raise OSError(errno.ETIMEDOUT, "the system did not start it before the job was ended")
            return self._started


def _spawn(spec: WorkerSpec, output: int) -> tuple[subprocess.Popen[bytes], int | None]:
    if not (sys.executable and (spec.terminal or _signals_are_odd())):
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
    with _bound_to(spec.cpus), _streams(spec, output) as (stdin, stdout):
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stdout,
            cwd=spec.work_dir,
            env=spec.env,
            start_new_session=True,
            pass_fds=inherited,
        )
    mark.put_on(process.pid, spec.env.get(mark.JOB_MARK, ""))
    return process


@contextlib.contextmanager
def _streams(spec: WorkerSpec, output: int) -> Iterator[tuple[int, int]]:
    """Give standard input and output of a worker that is started inside."""
    if not spec.terminal:
        yield subprocess.DEVNULL, output
        return
    from davincirunsdk.supervision import terminal

    with terminal.given(output) as stream:
        yield stream, stream


def _bound_to(cpus: frozenset[int] | None) -> AbstractContextManager[None]:
    if cpus is None:
        return contextlib.nullcontext()
    from davincirunsdk.host.binding import bound_to

    return bound_to(cpus)


def _signals_are_odd() -> bool:
    """Tell whether the host program ignores or blocks signals that a worker would inherit so.

    `subprocess` resets what Python itself ignores, and exec resets handlers. An ignored hang-up is
    passed on: it is the meaning of nohup.
    """
    blocked, ignored = _blocked_and_ignored()
    return bool(blocked or ignored - {signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ})


def _blocked_and_ignored() -> tuple[set[int], set[int]]:
    """List the signals that this thread blocks and those that the process ignores."""
    # Two more are the C library's own; its posix_spawn() has children ignore them.
    valid = {int(number) for number in signal.valid_signals()}
    try:
        # The kernel knows better than `signal`, which does not hear of what C code ignores.
        # Not thread-self: kernels before 3.17 do not have it.
        path = f"/proc/self/task/{threading.get_native_id()}/status"
        with open(path, encoding="ascii", errors="replace") as status:
            masks = {line[:6]: int(line[7:], 16) for line in status if line.startswith(("SigBlk", "SigIgn"))}
    except OSError:
        blocked = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        return blocked, {number for number in valid if signal.getsignal(number) == signal.SIG_IGN}
    blocked, ignored = (
        {number for number in valid if masks[name] >> (number - 1) & 1} for name in ("SigBlk", "SigIgn")
    )
    return blocked, ignored


def children_are_reaped_by_kernel() -> bool:
    """Tell whether SIGCHLD is ignored: then the kernel throws exit statuses away."""
    return signal.SIGCHLD in _blocked_and_ignored()[1]


def spawn_error(spec: WorkerSpec, error: OSError) -> WorkerSpawnError:
    """Say that, and why, a worker cannot be started."""
    # The command itself was found before: what is missing is what its first line names.
    advice = "; is the interpreter in its first line there?" if error.errno == errno.ENOENT else ""
    return WorkerSpawnError(
        f"{spec.name} cannot be started: {spec.command[0]}: {explain(error)}{advice}",
        errno=error.errno,
        rank=spec.rank,
    )


def _open_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        # Kernels before 5.3, or a host program that ignores SIGCHLD and a process that is gone.
        return None
