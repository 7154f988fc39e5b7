"""One worker process, from its spawn to its reaping, in one coroutine.

The process is started with `subprocess` in a thread (`spawn`) and awaited through a pidfd, not with
asyncio's own subprocess calls. Those fork in the loop's thread; before Python 3.12 they depend on a
child watcher that belongs to the host program; they report an exit status that the host took away as
255; and on some versions their wait ends only when the last holder of the pipe has closed it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import signal
import struct
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import Patience, in_thread_or_here, resolve, until_readable
from davincirunsdk.leftovers import mark
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.leftovers.proc import Proc, since_boot
from davincirunsdk.supervision.messages import Exited, Message, Nudge, PumpEnded, Spawned, SpawnFailed
from davincirunsdk.supervision.spawn import Start, spawn_error
from davincirunsdk.types import WorkerState, WorkerStatus

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from davincirunsdk.cluster import WorkerSpec
    from davincirunsdk.logs.pump import LogPump

_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info` of linux/pidfd.h, first version, 64 bytes; the exit status is its last field."""

_LAST_WORDS = 1.0
"""Seconds that the end of its output may be behind the end of a worker whose exit code nobody knows."""


class Worker:
    """One process of a job. All methods belong to the loop's thread.

    Args:
        spec: What to start.
        pump: Carries its output.
        post: Takes what happens to it.
        on_cancel: Called when its task is cancelled, to have the job stopped: the task goes on until
            the process has ended.

    Attributes:
        pid: None before the start.
        exit_code: As in `subprocess`; None while it runs, and when nobody could learn it.
        begun: True once it was tried to start it or its pump.
        settled: True once it runs or cannot be started.
        running: True from the start to the end.
        exit_tick: The `since_boot` tick at which its end was known.
        told: True once it was asked to end.
        refused: True once the system refused to let us signal it.
        pump_ended: True when its output has ended or is waited for no longer.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        pump: LogPump,
        *,
        post: Callable[[Message], None],
        on_cancel: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.pump = pump
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.begun: bool = False
        self.settled: bool = False
        self.running: bool = False
        self.told: bool = False
        self.refused: bool = False
        self.started: float | None = None
        self.ended: float | None = None
        self.ended_at: float = math.inf
        self.exit_tick: int | None = None
        self.state: WorkerState = WorkerState.PENDING
        self.pump_ended: bool = False
        self._post = post
        self._waits = Patience(on_cancel)
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: int | None = None
        loop = asyncio.get_running_loop()
        self._given_up: asyncio.Future[None] = loop.create_future()
        self._output_given_up: asyncio.Future[None] = loop.create_future()
        self._dealt_with: asyncio.Future[None] = loop.create_future()
        self._silent: asyncio.Future[None] = loop.create_future()

    async def run(self) -> None:
        """Start the process, wait for its end, have that dealt with, and reap it."""
        start = Start(self.spec, self.pump)
        try:
            await self._waits.until_any(start.in_thread(), self._given_up)
            started = start.take()
        except OSError as error:
            self.settled = True
            self._post(SpawnFailed(worker=self, error=spawn_error(self.spec, error)))
            return
        self._process, self._handle = started
        self.pid = self._process.pid
        self.started = time.time()
        self.running = self.settled = True
        self.state = WorkerState.RUNNING
        self._post(Spawned(worker=self))
        if not await self._wait_for_exit():
            self.running = False
            self._let_go()
            self._post(Nudge())
            return
        self.exit_code = self._peek()
        self.ended, self.ended_at, self.exit_tick = time.time(), time.monotonic(), since_boot()
        if self.exit_code is None:
            # Its last words are all that tells how it ended.
            await self._waits.within(_LAST_WORDS, self._silent)
        self.running = False
        self._post(Exited(worker=self))
        # Until it is reaped, the number of its group stays taken: whoever deals with its end may signal it.
        await self._waits.until_any(self._dealt_with)
        self._reap()

    async def carry(self, output: asyncio.Future[None]) -> None:
        """Wait for the end of the output: a stuck disk or a stranger that holds the pipe may be given up.

        Args:
            output: What the pump's `start` returned.
        """
        await self._waits.until_any(output, self._output_given_up)
        self.pump_ended = True
        resolve(self._silent, None)
        self._post(PumpEnded(worker=self))
        if output.done():
            output.result()

    async def _wait_for_exit(self) -> bool:
        """Wait until it has ended; False when it was given up before."""
        if self._handle is None:
            assert self.pid is not None
            ended = in_thread_or_here(_wait_without_handle, self.pid)
            await self._waits.until_any(ended, self._given_up)
            return ended.done()
        return await until_readable(self._handle, self._waits, self._given_up)

    async def end_unwatched(self) -> None:
        """End the process when an error of ours has ended the watch over it."""
        if self._process is not None:
            self.kill()
            await self._waits.until_any(in_thread_or_here(self._process.wait, 5.0))
            self._let_go()
        self.settled, self.running = True, False

    def deal_with_end(self) -> None:
        """Let it be reaped: whatever had to be done before has been done, and the guardian knows of it."""
        resolve(self._dealt_with, None)

    def _peek(self) -> int | None:
        """Learn the exit status and leave the zombie, so that its group's number stays taken."""
        found = self._ask_for_status(os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if isinstance(found, ChildProcessError):
            return None if self._handle is None else _status_kept_by_kernel(self._handle)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def has_ended(self) -> bool:
        """Tell whether it has ended, though its end may not be known yet."""
        if not self.running:
            return self.ended is not None
        return self._ask_for_status(os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _ask_for_status(self, options: int) -> os.waitid_result | ChildProcessError | None:
        assert self.pid is not None
        if self._handle is not None:
            try:
                return os.waitid(os.P_PIDFD, self._handle, options)
            except ChildProcessError as error:
                return error
            except OSError:
                # Linux 5.3 has the handle and not this; some sandboxes refuse it.
                pass
        try:
            return os.waitid(os.P_PID, self.pid, options)
        except ChildProcessError as error:
            # The host program reaps every child, or has the kernel do it.
            return error

    def _reap(self) -> None:
        self._ask_for_status(os.WEXITED | os.WNOHANG)
        self._let_go()

    def _let_go(self) -> None:
        assert self._process is not None
        # Or `subprocess` would complain, and keep it to reap it some day.
        if self._process.returncode is None:
            self._process.returncode = self.exit_code or 0
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _signal(self, send: Callable[[int, int], None], number: int) -> bool:
        """Signal the process, or with `os.killpg` its group.

        Returns:
            False when that cannot be: the process has been reaped, and its number may be another's, or
            the system refuses it.
        """
        if self.pid is None or not self._is_ours():
            return False
        try:
            send(self.pid, number)
            # A group takes a signal if one of its processes does: ask for this one.
            os.kill(self.pid, 0)
        except PermissionError:
            self.refused = True
            return False
        except ProcessLookupError:
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

    def terminate(self, number: signal.Signals) -> None:
        """Ask the process to end by a signal, and SIGCONT since a stopped process takes no other.

        The process itself and nothing below it, and only if it reads nobody's output: the others have
        their turn by `leftovers.stop_order`.
        """
        if self.has_ended():
            # By itself, whatever we send now.
            return
        self.state = WorkerState.STOPPING
        if self.pid is not None and not Proc().pipe_at(self.pid, 0):
            self.told = self._signal(os.kill, number)
            self._signal(os.kill, signal.SIGCONT)

    def kill(self) -> None:
        """End the process group at once."""
        ended = self.has_ended()
        if self._signal(os.killpg, signal.SIGKILL) and not ended:
            self.state = WorkerState.KILLED

    def be_guarded(self) -> None:
        """Have the guardian know the process and its output; blocking, for a thread."""
        assert self.pid is not None
        guardian.watch_worker(self.spec.env.get(mark.JOB_MARK, ""), self.pid, self.spec.rank, self.pump.share)

    def silence(self) -> float:
        """Seconds since the last output and the end; 0 while it runs. From any thread."""
        return max(0.0, time.monotonic() - max(self.ended_at, self.pump.active))

    def give_up(self) -> None:
        """Wait no longer for the start or the end of the process."""
        resolve(self._given_up, None)

    def give_up_output(self) -> None:
        """Wait no longer for the end of the output."""
        self.pump.give_up()
        self.pump.count_unwritten()
        resolve(self._output_given_up, None)

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
            lost_bytes=self.pump.lost,
            name=self.spec.name,
            progress=self.pump.progress(),
        )


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
