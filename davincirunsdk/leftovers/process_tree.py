"""Find and end every process that carries a job's mark, wherever it has moved.

The mark is an environment variable. The kernel keeps the environment of a process as it was at
its exec, so a descendant is found after `setsid`, after a double fork and after the death of all
its ancestors. Two kinds carry no mark and are found beside it: processes in the session of a
worker or of any marked process, and children of a marked process that were started with another
environment. What was found once stays known when it loses the parent it was found by. A supervisor
that inherits the orphans of its job finds those as well that nobody saw while their parent lived.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import psutil

from davincirunsdk.leftovers.mark import JOB_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_SETTLING = 0.3
"""Seconds for helpers that end by themselves right after their worker, as Python's resource trackers do."""

_ROUNDS = 5
"""Rounds of a look at most: on a busy machine there are always new processes."""

_UNKILLABLE_AFTER = 10.0
"""Seconds after SIGKILL until a process counts as stuck in the kernel and is given up."""


class MarkedProcess(NamedTuple):
    """A process of a job, told from a later one with the same pid by its start time.

    A named tuple and no dataclass: the guardian, which loads this module, has to stay small.
    """

    pid: int
    created: float
    parent: int
    group: int
    session: int
    command: str

    @property
    def key(self) -> tuple[int, float]:
        """What no later process has in common with it."""
        return self.pid, self.created


class ProcessTree:
    """Every process of one job, or of several that are ended together.

    It remembers what it has found and what it has asked to end, so one is used for the whole of a
    job, from one thread at a time.

    Args:
        marks: The jobs' marks, as in the workers' environment.
        guardian: Given where this process inherits orphans and has no children but those of the
            job and this one: its pid.
    """

    def __init__(self, *marks: str, guardian: Callable[[], int | None] | None = None) -> None:
        self._marks = marks
        self._guardian = guardian
        self._sessions: dict[int, float] = {}
        self._known: set[tuple[int, float]] = set()
        self._asked: set[tuple[int, float]] = set()

    def find(self, sessions: Mapping[int, float] | None = None) -> list[MarkedProcess]:
        """List the job's living processes.

        Args:
            sessions: Pid of each worker, to the wall-clock second in which it ended (infinity
                while it runs). A worker leads a session; a process of that session which is older
                than the worker's end cannot be anybody else's.

        Returns:
            Processes that are not zombies; those of other users are never among them.
        """
        if sessions:
            self._sessions.update(sessions)
        alive: dict[int, MarkedProcess] = {}
        ours: dict[int, MarkedProcess] = {}
        listed = {os.getpid()}
        for _ in range(_ROUNDS):
            # One that was listed may fork and end before it is looked at: its child came meanwhile.
            new = set(psutil.pids()) - listed
            if not new:
                break
            listed |= new
            for pid in new:
                self._look_at(pid, alive, ours)
        self._add_sessions(ours, alive)
        ours.update({pid: process for pid, process in alive.items() if self._is_inherited(process)})
        self._add_children(ours, alive)
        self._known.update(process.key for process in ours.values())
        return list(ours.values())

    def _look_at(self, pid: int, alive: dict[int, MarkedProcess], ours: dict[int, MarkedProcess]) -> None:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                seen = MarkedProcess(
                    pid=pid,
                    created=process.create_time(),
                    parent=process.ppid(),
                    group=os.getpgid(pid),
                    session=os.getsid(pid),
                    command=process.name(),
                )
                if process.status() == psutil.STATUS_ZOMBIE:
                    self._reap_orphan(seen)
                    return
        except (psutil.Error, OSError):
            return
        alive[pid] = seen
        if seen.key in self._known or self._is_in_session(seen) or self._is_marked(process):
            ours[pid] = seen

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            value = process.environ().get(JOB_MARK, "")
        except (psutil.Error, OSError):
            return False
        return any(value == mark or value.startswith(mark + "/") for mark in self._marks)

    def _is_in_session(self, process: MarkedProcess) -> bool:
        ended = self._sessions.get(process.session)
        return ended is not None and process.created < ended

    def _is_inherited(self, process: MarkedProcess) -> bool:
        return (
            self._guardian is not None
            and process.parent == os.getpid()
            and process.pid not in self._sessions
            and process.pid != self._guardian()
        )

    def _reap_orphan(self, zombie: MarkedProcess) -> None:
        # As pid 1 or sub-reaper we inherit orphans. A worker itself is reaped by its own coroutine.
        if zombie.parent == os.getpid() and zombie.pid not in self._sessions and self._is_in_session(zombie):
            os.waitpid(zombie.pid, os.WNOHANG)

    @staticmethod
    def _add_sessions(ours: dict[int, MarkedProcess], alive: Mapping[int, MarkedProcess]) -> None:
        """A session can be left but not joined: whoever is in one descends from its leader."""
        led = {process.pid for process in ours.values() if process.session == process.pid}
        ours.update({pid: process for pid, process in alive.items() if process.session in led})

    @staticmethod
    def _add_children(ours: dict[int, MarkedProcess], alive: Mapping[int, MarkedProcess]) -> None:
        children: dict[int, list[MarkedProcess]] = {}
        for process in alive.values():
            children.setdefault(process.parent, []).append(process)
        queue = list(ours.values())
        while queue:
            parent = queue.pop()
            for child in children.get(parent.pid, ()):
                # A pid may have been reused between two reads: a child is never older.
                if child.pid not in ours and child.created >= parent.created:
                    ours[child.pid] = child
                    queue.append(child)

    def terminate(
        self, *, told_groups: Iterable[int] = (), sessions: Mapping[int, float] | None = None
    ) -> None:
        """Ask every process to end, once.

        Args:
            told_groups: Process groups that were signalled already; their members are not asked
                again, here or by `end`: a second SIGTERM may cut short what the first one began.
            sessions: As in `find`.
        """
        told = frozenset(told_groups)
        for process in self.find(sessions):
            if process.group in told:
                self._asked.add(process.key)
            else:
                self._ask(process)

    def _ask(self, process: MarkedProcess) -> None:
        if process.key in self._asked:
            return
        self._asked.add(process.key)
        _send(process, signal.SIGTERM)
        # A stopped process takes no SIGTERM before it is continued.
        _send(process, signal.SIGCONT)

    def end(
        self, deadline: Callable[[], float], *, sessions: Mapping[int, float] | None = None
    ) -> tuple[MarkedProcess, ...]:
        """End whatever of the job is still there; blocking, for a thread.

        After a moment for those that are ending: SIGTERM to each process that was not asked yet,
        SIGKILL after the deadline, again and again until a look finds nothing: a process may fork
        while it is ended.

        Args:
            deadline: Gives the monotonic second of SIGKILL; asked again at every look, for
                somebody may lose patience.
            sessions: As in `find`.

        Returns:
            Every process that was found; one that is stuck in the kernel may still be there.
        """
        found: dict[tuple[int, float], MarkedProcess] = {}
        if settling := self.find(sessions):
            _wait_for_exit(settling, min(_SETTLING, max(0.0, deadline() - time.monotonic())))
            _reap_adopted(settling)
        while living := self.find(sessions):
            now, limit = time.monotonic(), deadline()
            if now > limit + _UNKILLABLE_AFTER:
                break
            for process in living:
                if now >= limit:
                    _send(process, signal.SIGKILL)
                else:
                    self._ask(process)
                found[process.key] = process
            # After SIGKILL look again soon: a child forked in the last moment raises no event.
            _wait_for_exit(living, 0.2 if now >= limit else min(0.5, limit - now))
            _reap_adopted(living)
        return tuple(found.values())


def _send(process: MarkedProcess, number: int) -> None:
    """Signal exactly this process: its start time is checked while a pidfd holds its identity."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        handle = None
    try:
        if psutil.Process(process.pid).create_time() != process.created:
            return
        if handle is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except (psutil.Error, OSError):
        return
    finally:
        if handle is not None:
            os.close(handle)


def _wait_for_exit(processes: Iterable[MarkedProcess], timeout: float) -> None:
    """Wait until all have ended, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for process in processes:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) != errno.ENOSYS:
                continue
            # Kernels before 5.3: psutil looks in short steps.
            psutil.wait_procs([psutil.Process(process.pid)] if psutil.pid_exists(process.pid) else [], left)
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(left * 1000)
        finally:
            os.close(handle)


def _reap_adopted(processes: Iterable[MarkedProcess]) -> None:
    """Reap those that became our own children: as pid 1 or sub-reaper we inherit orphans."""
    for process in processes:
        try:
            if psutil.Process(process.pid).ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.Error, OSError):
            continue


def reap_orphans(*, but: Collection[int | None]) -> None:
    """Reap every dead child of this process except those that somebody awaits.

    Args:
        but: Pids to leave alone.
    """
    for child in psutil.Process().children():
        try:
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, OSError):
            continue
