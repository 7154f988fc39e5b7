"""Find every process of a job, wherever it has moved.

The mark is an environment variable. The kernel keeps the environment of a process as it was at
its exec, so a descendant is found after `setsid`, after a double fork and after the death of all
its ancestors. Three kinds are found beside it: processes in the session of a worker or of any
marked process, children of a marked process that were started with another environment, and those
whose environment may not be read, by a limit that they have inherited (see `mark`). What was found
once stays known when it loses the parent it was found by. A supervisor that inherits the orphans of
its job finds those as well that nobody saw while their parent lived.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from davincirunsdk.leftovers.mark import JOB_MARK, limit_of
from davincirunsdk.leftovers.proc import Environments, MarkedProcess, Proc, since_boot
from davincirunsdk.leftovers.stop_order import Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_ROUNDS = 5
"""Rounds of a look at most: on a busy machine there are always new processes."""

_STARTING = 100
"""Clock ticks in which a process may still be on its way to its own environment."""

_PLACE = (JOB_MARK, "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""What launchers set for each of their children."""


class Top(NamedTuple):
    """A worker, as those see it who end what is below it.

    Attributes:
        pid: The worker's own process, which leads its session.
        rank: The worker's rank, as in its environment.
        ended: The `since_boot` tick at which its end was known, None while it runs.
        told: It was told to end.
        pipe: Inode of its output pipe, 0 if unknown.
        silence: Gives the seconds since its last output.
    """

    pid: int
    rank: int = -1
    ended: int | None = None
    told: bool = False
    pipe: int = 0
    silence: Callable[[], float] = float


class ProcessTree:
    """Every process of one job, or of several that are ended together.

    It remembers what it has found, so one is used for the whole of a job, from one thread at a time.

    Args:
        marks: The jobs' marks, as in the workers' environment.
        guardians: Given where this process inherits orphans and has no children but those of the
            job and these: their pids.
        proc: Where to look.
        since: The `since_boot` tick before which no process of the job can have been started.
    """

    def __init__(
        self,
        *marks: str,
        guardians: Callable[[], Collection[int]] | None = None,
        proc: Proc | None = None,
        since: int = 0,
    ) -> None:
        self.proc: Proc = proc or Proc()
        self._marks = marks
        self._guardians = guardians
        self._since = since
        self._tops: dict[int, Top] = {}
        self._limits = {limit_of(mark) for mark in marks}
        self._known: set[tuple[int, int]] = set()
        self._strangers: set[tuple[int, int]] = set()
        self._environments = Environments(self.proc)
        self._places: dict[int, tuple[bytes, ...]] = {}

    def find(self, tops: Sequence[Top] = ()) -> list[MarkedProcess]:
        """List the job's living processes.

        Args:
            tops: The job's workers that have been started. A worker leads a session; a process of
                that session which is older than the worker's end cannot be anybody else's.

        Returns:
            Processes that are not zombies; those of other users are never among them.
        """
        self._tops.update({top.pid: top for top in tops})
        self._places = {}
        alive: dict[int, MarkedProcess] = {}
        ours: dict[int, MarkedProcess] = {}
        listed = {os.getpid()}
        for _ in range(_ROUNDS):
            # One that was listed may fork and end before it is looked at: its child came meanwhile.
            new = self.proc.pids() - listed
            if not new:
                break
            listed |= new
            self._look_at(new, alive, ours)
        self._add_sessions(ours, alive)
        ours.update({pid: process for pid, process in alive.items() if self._is_inherited(process)})
        self._add_children(ours, alive)
        self._known.update(process.key for process in ours.values())
        return list(ours.values())

    def see(self, processes: Collection[MarkedProcess]) -> dict[int, Seen]:
        """Look closer at what `find` has just found: who is above whom, who reads from whom."""
        ours = {process.pid: process for process in processes}
        signals = {pid: self.proc.disposition(pid) for pid in ours}
        reads = {pid: self.proc.pipe_at(pid, 0) for pid in ours}
        writes = {
            pid: frozenset({self.proc.pipe_at(pid, 1), self.proc.pipe_at(pid, 2)} - {0}) for pid in ours
        }
        return {
            pid: Seen(
                process=process,
                above=self._above(process, ours),
                place=self._places.get(pid, ()),
                signals=signals[pid],
                waits=self.proc.waits_for_child(process),
                reads=reads[pid],
                writes=writes[pid],
                also_writes=self.proc.written_pipes(pid) if reads[pid] else frozenset(),
            )
            for pid, process in ours.items()
        }

    def _look_at(
        self, pids: Collection[int], alive: dict[int, MarkedProcess], ours: dict[int, MarkedProcess]
    ) -> None:
        to_read = []
        for pid in pids:
            seen = self.proc.look(pid)
            if seen is None or seen.started < self._since:
                continue
            if seen.is_dead:
                self._reap_orphan(seen)
                continue
            alive[pid] = seen
            if seen.key in self._known or self._is_in_session(seen):
                ours[pid] = seen
            if seen.key not in self._strangers:
                to_read.append(seen)
        young = since_boot() - _STARTING
        for process, data in self._environments.read(to_read):
            if self._is_marked(process, data):
                ours[process.pid] = process
            elif data and process.started < young:
                self._strangers.add(process.key)

    def _is_marked(self, process: MarkedProcess, data: bytes | None) -> bool:
        if data is None:
            return self.proc.limit_of_locks(process.pid) in self._limits
        found = dict(part.partition(b"=")[::2] for part in data.split(b"\0"))
        self._places[process.pid] = tuple(found.get(os.fsencode(name), b"") for name in _PLACE)
        value = os.fsdecode(found.get(os.fsencode(JOB_MARK), b""))
        return any(value == mark or value.startswith(mark + "/") for mark in self._marks)

    def _is_in_session(self, process: MarkedProcess) -> bool:
        top = self._tops.get(process.session)
        return top is not None and (top.ended is None or process.started <= top.ended)

    def _is_inherited(self, process: MarkedProcess) -> bool:
        return (
            self._guardians is not None
            and process.parent == os.getpid()
            and process.pid not in self._tops
            and process.pid not in self._guardians()
        )

    def _reap_orphan(self, zombie: MarkedProcess) -> None:
        # As pid 1 or sub-reaper we inherit orphans. A worker itself is reaped by its own coroutine.
        if zombie.parent == os.getpid() and zombie.pid not in self._tops and self._is_in_session(zombie):
            _reap(zombie.pid)

    def reap_adopted(self, processes: Collection[MarkedProcess]) -> None:
        """Reap those that became our own children: as pid 1 or sub-reaper we inherit orphans."""
        for process in processes:
            seen = self.proc.look(process.pid)
            if seen is not None and seen.parent == os.getpid() and seen.pid not in self._tops:
                _reap(process.pid)

    def _above(self, process: MarkedProcess, ours: Mapping[int, MarkedProcess]) -> int:
        if process.pid in self._tops:
            return 0
        parent = ours.get(process.parent)
        if parent is not None and parent.started <= process.started:
            return parent.pid
        if process.session in self._tops:
            return process.session if process.session in ours else 0
        place = self._places.get(process.pid, ())
        # A job within a job counts its ranks anew.
        if place and os.fsdecode(place[0]) in self._marks:
            for top in self._tops.values():
                if os.fsdecode(place[1]) == str(top.rank) and top.pid in ours:
                    return top.pid
        return 0

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
                if child.pid not in ours and child.started >= parent.started:
                    ours[child.pid] = child
                    queue.append(child)


def reap_orphans(*, but: Collection[int | None]) -> None:
    """Reap every dead child of this process except those that somebody awaits.

    Args:
        but: Pids to leave alone.
    """
    for pid in Proc().children(os.getpid()):
        if pid not in but:
            _reap(pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        # Somebody else was faster.
        return
