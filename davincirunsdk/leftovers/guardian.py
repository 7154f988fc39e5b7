"""The small processes that end a job's processes when their supervisor can no longer do it.

One pair serves all jobs of a supervising process: the guardian, and its standby, which is there for
the moment in which somebody kills supervisor and guardian together. Each learns through a socket of
its own what there is to end: the jobs' marks, the workers with the read ends of their pipes, and the
folders that are to go with them. Both watch the supervisor itself (not only the socket: a child that
the supervisor forked may hold its other end open), and once it is gone one of them ends everything
that carries a registered mark, with the job's grace period. Until then it writes into the log files
what workers print: one that lost its pipe would die of its last words before it has saved.

They are started before the first worker and read their orders from the sockets' buffers when they are
ready, so no worker waits for them and there is no moment without them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.leftovers.proc import Proc, since_boot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

logger: logging.Logger = logging.getLogger("davincirunsdk")

# What is installed beside us must not hide a module of the standard library: its folder comes last.
_PROGRAM = """
import sys
sys.path.append({root!r})
from davincirunsdk.leftovers.guardian_main import main
main({supervisor}, {first}, {first_started})
"""

_BOOTSTRAP = "import os; exec(os.read(0, 65536))"
"""The command line carries no name of ours: who kills by that name means the supervisor."""

_PATIENCE = 0.2
"""Seconds that orders wait for a guardian whose buffer is full; one that is held up, only once."""

_KEYS = 1000
"""Processes named in one order at most, which has to fit into the guardian's buffer."""


class _Output(NamedTuple):
    mark: str
    rank: int
    share: Callable[[], list[int]]


class Guardian:
    """The supervising side: starts the guardians with the first job, lets them go with the last.

    All methods may be called from any thread, and block for a few milliseconds at most unless a
    guardian is held up, then once for a fraction of a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, list[str]] = {}
        self._outputs: dict[int, _Output] = {}
        self._told: dict[str, set[tuple[int, int]]] = {}
        self._folders: set[str] = set()
        self._processes: tuple[subprocess.Popen[bytes], ...] = ()
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._channels: tuple[socket.socket, ...] = ()
        self._held_up: set[socket.socket] = set()
        os.register_at_fork(after_in_child=self._forget)

    def watch(self, mark: str, grace_period: float, stop_signal: int = signal.SIGTERM) -> None:
        """Have everything that carries `mark` ended if this process dies.

        Args:
            mark: The job's mark, which no process carries yet.
            grace_period: Seconds from the stop signal to SIGKILL.
            stop_signal: Asks them to end.

        Raises:
            OSError: No process could be started.
        """
        with self._lock:
            self._jobs[mark] = [
                "watch",
                mark,
                repr(grace_period),
                str(since_boot() - 1),
                str(int(stop_signal)),
            ]
            if self._are_there():
                self._tell(self._jobs[mark])
            else:
                self._start()

    def watch_worker(self, mark: str, pid: int, rank: int, share: Callable[[], list[int]]) -> None:
        """Have a worker told first, and its output kept, if this process dies.

        Args:
            mark: The job's mark.
            pid: The worker's own process.
            rank: The worker's rank.
            share: Gives new descriptors, which are closed here: the read end of the worker's pipe and
                its log file, open for appending. An empty list when its output has ended.
        """
        with self._lock:
            if mark in self._jobs:
                self._outputs[pid] = output = _Output(mark, rank, share)
                self._tell_output(pid, output)

    def note_exits(self, mark: str, pids: Sequence[int]) -> None:
        """Learn that workers' processes have ended and their numbers may become others'.

        Args:
            mark: The job's mark.
            pids: Of processes that are still to be reaped.
        """
        with self._lock:
            self._tell_of_workers("exited", mark, pids, str(since_boot()))

    def release_workers(self, mark: str, pids: Sequence[int]) -> None:
        """Have the ends of workers' pipes closed: their output has ended, or is read no longer.

        Args:
            mark: The job's mark.
            pids: The workers' own processes.
        """
        with self._lock:
            self._tell_of_workers("closed", mark, pids)
            for pid in pids:
                self._outputs.pop(pid, None)

    def note_stop(self, mark: str, deadline: float) -> None:
        """Have a stop that has begun taken over as it stands, if this process dies meanwhile.

        Args:
            mark: The job's mark.
            deadline: The monotonic second of SIGKILL.
        """
        with self._lock:
            if (job := self._jobs.get(mark)) is not None:
                job[5:] = [repr(deadline)]
                self._tell(job, patience=0.0)

    def note_told(self, mark: str, keys: Collection[tuple[int, int]]) -> None:
        """Learn that processes of a job have been told to end: a second signal may cut short the first.

        Args:
            mark: The job's mark.
            keys: Pid and start tick of each.
        """
        with self._lock:
            if mark in self._jobs:
                self._told.setdefault(mark, set()).update(keys)
                self._tell_told(mark, keys)

    def release(self, mark: str) -> None:
        """End the watch over a job that has left nothing behind."""
        with self._lock:
            if self._jobs.pop(mark, None) is None:
                return
            self._told.pop(mark, None)
            self._outputs = {pid: output for pid, output in self._outputs.items() if output.mark != mark}
            self._tell(["release", mark])
            if self._jobs:
                return
            self._dismiss()
            leaving = [*self._leaving, *self._processes]
            self._processes, self._leaving = (), []
        for process in leaving:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def watch_folder(self, folder: Path) -> None:
        """Have a folder removed if this process dies while it has a job.

        Args:
            folder: An absolute path.
        """
        with self._lock:
            self._folders.add(str(folder))
            self._tell(["folder", str(folder)])

    def release_folder(self, folder: Path) -> None:
        """End the watch over a folder that is gone."""
        with self._lock:
            self._folders.discard(str(folder))
            self._tell(["no folder", str(folder)])

    def pids(self) -> tuple[int, ...]:
        """Pids of the guardian and its standby, none while there is no job."""
        return tuple(process.pid for process in self._processes)

    def revive(self) -> None:
        """Start both again if somebody ended one of them while jobs run."""
        with self._lock:
            if self._jobs and self._processes and not self._are_there():
                self._start()

    def _are_there(self) -> bool:
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    def _start(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable is empty, so no Python can be started")
        self._dismiss()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for ours, theirs in pairs:
                first = Proc().look(started[0].pid) if started else None
                program = _PROGRAM.format(
                    root=str(Path(__file__).parents[2]),
                    supervisor=os.getpid(),
                    first=started[0].pid if started else 0,
                    first_started=first.started if first is not None else 0,
                )
                ours.send(os.fsencode(program))
                started.append(_start_python(theirs))
        finally:
            for _, theirs in pairs:
                theirs.close()
            self._leaving.extend(self._processes)
            self._channels, self._processes = tuple(ours for ours, _ in pairs), tuple(started)
        # The sockets' buffers keep it until they are ready.
        self._tell(*(["folder", folder] for folder in self._folders), *self._jobs.values())
        for pid, output in tuple(self._outputs.items()):
            self._tell_output(pid, output)
        for mark, keys in self._told.items():
            self._tell_told(mark, keys)

    def _dismiss(self) -> None:
        for channel in self._channels:
            try:
                # Without jobs, or replaced: a standby whose guardian was killed would wait on.
                channel.settimeout(0.0)
                channel.send(b"bye", socket.MSG_NOSIGNAL)
            except OSError as error:
                logger.debug("a guardian is gone already: %s", error)
            channel.close()
        self._channels = ()
        self._held_up.clear()

    def _tell_output(self, pid: int, output: _Output) -> None:
        order = ["output", output.mark, str(pid), str(output.rank)]
        try:
            descriptors = output.share()
        except OSError as error:
            logger.debug("the output of pid %d is not shared: %s", pid, error)
            descriptors = []
        try:
            self._tell(order, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _tell_of_workers(self, what: str, mark: str, pids: Sequence[int], *words: str) -> None:
        known = [str(pid) for pid in pids if pid in self._outputs]
        for place in range(0, len(known), _KEYS):
            self._tell([what, mark, *words, *known[place : place + _KEYS]], patience=0.0)

    def _tell_told(self, mark: str, keys: Collection[tuple[int, int]]) -> None:
        words = [f"{pid} {started}" for pid, started in keys]
        for place in range(0, len(words), _KEYS):
            self._tell(["told", mark, *words[place : place + _KEYS]])

    def _tell(
        self, *orders: list[str], descriptors: list[int] | None = None, patience: float = _PATIENCE
    ) -> None:
        for channel in self._channels:
            channel.settimeout(0.0 if channel in self._held_up else patience)
            for order in orders:
                message = os.fsencode("\0".join(order))
                try:
                    socket.send_fds(channel, [message], descriptors or [], socket.MSG_NOSIGNAL)
                except (TimeoutError, BlockingIOError):
                    logger.debug("a guardian is held up and does not hear %s", order[0])
                    if patience:
                        self._held_up.add(channel)
                    break
                except OSError as error:
                    # It was ended from outside, and `revive` tells a new one everything.
                    logger.debug("a guardian does not hear %s: %s", order[0], error)

    def _forget(self) -> None:
        """In a forked child the guardian is the parent's, and whoever held the lock is not there."""
        for channel in self._channels:
            channel.close()
        self._lock = threading.Lock()
        self._jobs, self._outputs, self._told, self._folders = {}, {}, {}, set()
        self._processes, self._leaving, self._channels, self._held_up = (), [], (), set()


def _start_python(orders: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOTSTRAP],
        stdin=orders.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        # It is not part of an outer job, whose sweep would take it for a leftover.
        env={name: value for name, value in os.environ.items() if name != JOB_MARK},
        start_new_session=True,
    )


guardian: Guardian = Guardian()
"""The one guardian of this process."""
