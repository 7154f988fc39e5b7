"""Who is told to end now, and who later: a stop goes from the top down.

A data loader that dies before its rank costs the checkpoint, a `tee` that dies before its writer costs
the last words. So a process is told when the one above it has ended, or when half the grace period is
over, but for these, which are told by what /proc shows of them:

- A process that only waits for its child (a shell, `conda run`, numactl) is told together with it.
- One that passes signals on by itself (`timeout`, a launcher within a job) is told alone, and whatever is
  below it is left to it.
- A filter is told after its writers have ended, and then only if it handles the signal: the end of its
  input is what it ends by, and the signal would take what it has not written yet.

Nothing here looks or signals; `Ending` does.
"""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from davincirunsdk.leftovers.proc import Disposition, MarkedProcess

_PASS_ON = frozenset(
    "timeout tini docker-init dumb-init catatonit uv sudo srun mpirun mpiexec orterun prterun prte".split()
)
"""Programs that pass signals on and give their children no place of their own by which that could be seen."""

_SHELLS = frozenset("sh bash dash ash busybox zsh ksh ksh93 mksh yash".split())
"""Shells run a trap only when the command in the foreground has ended."""


class Seen(NamedTuple):
    """What one look shows of one process of a job.

    Attributes:
        above: Pid of the process it is below: its parent, or its worker's own process where the
            parent has ended; 0 where there is none.
        place: The values of the variables that launchers set anew for each of their children.
        signals: What it does with signals; None if that cannot be known.
        waits: It only waits for a child.
        reads: The pipe at its standard input, 0 for none.
        writes: The pipes at its standard output and standard error.
        also_writes: The pipes it writes to at other descriptors.
    """

    process: MarkedProcess
    above: int = 0
    place: tuple[bytes, ...] = ()
    signals: Disposition | None = None
    waits: bool = False
    reads: int = 0
    writes: frozenset[int] = frozenset()
    also_writes: frozenset[int] = frozenset()


class Order:
    """Judges one look at a job.

    Args:
        seen: Every living process of the job, by pid.
        told: Keys of those that have been told.
        half_over: Half the grace period is over.
        filters: Keys of processes that an earlier look showed as filters.
        number: The signal that they are told by.
        began: Clock tick since boot at which the stop began: what a trap starts is not told with its shell.
    """

    def __init__(
        self,
        seen: Mapping[int, Seen],
        *,
        told: Collection[tuple[int, int]] = (),
        half_over: bool = False,
        filters: Collection[tuple[int, int]] = (),
        number: int = signal.SIGTERM,
        began: float = math.inf,
    ) -> None:
        self._began = began
        self._seen = seen
        self._told = told
        self._half_over = half_over
        self._number = number
        self._writers = _writers(seen, filters)
        self._filters = {*filters, *(seen[pid].process.key for pid in self._writers)}
        self._launchers = {one.above for one in seen.values() if self._passes_on(one.above, one)}

    @property
    def filters(self) -> Collection[tuple[int, int]]:
        """Keys of all that are, or were, filters."""
        return self._filters

    def due(self) -> list[MarkedProcess]:
        """List those that are to be told now."""
        return [
            one.process
            for pid, one in self._seen.items()
            if one.process.key not in self._told and not self._may_finish(pid) and self._is_released(pid)
        ]

    def is_filter(self, process: MarkedProcess) -> bool:
        """Tell whether a process ends by the end of its input."""
        return process.key in self._filters

    def is_left_to_launcher(self, process: MarkedProcess) -> bool:
        """Tell whether something above passes the signal on to a process."""
        return any(above.process.pid in self._launchers for _, above in self._upwards(process.pid))

    def _may_finish(self, pid: int) -> bool:
        one = self._seen[pid]
        if pid in self._writers:
            return True
        return one.process.key in self._filters and not self._catches(one)

    def _is_released(self, pid: int) -> bool:
        """Tell whether nothing above holds a process off."""
        for below, above in self._upwards(pid):
            if above.process.pid in self._launchers:
                return False
            if above.process.pid in self._writers or self._together(above, below):
                continue
            if not self._half_over:
                return False
        return True

    def _upwards(self, pid: int) -> Iterator[tuple[Seen, Seen]]:
        """Step from a process to the top; pids may be reused between two reads, so never in a circle."""
        passed = {pid}
        below = self._seen[pid]
        while below.above not in passed and (above := self._seen.get(below.above)) is not None:
            yield below, above
            passed.add(below.above)
            below = above

    def _together(self, above: Seen, below: Seen) -> bool:
        if not above.waits:
            return False
        if not self._catches(above):
            return True
        # Shells start what runs in the background with these two ignored (POSIX); a trap that passes
        # the signal on has to wait for such a child.
        in_background = below.signals is None or (
            below.signals.ignores(signal.SIGINT) and below.signals.ignores(signal.SIGQUIT)
        )
        of_trap = below.process.started >= self._began
        return above.process.command in _SHELLS and not in_background and not of_trap

    def _passes_on(self, pid: int, child: Seen) -> bool:
        above = self._seen.get(pid)
        if above is None or not self._catches(above):
            return False
        return above.process.command in _PASS_ON or bool(
            child.place and above.place and child.place != above.place
        )

    def _catches(self, one: Seen) -> bool:
        return one.signals is not None and (
            one.signals.catches(self._number) or one.signals.blocks(self._number)
        )


def _writers(seen: Mapping[int, Seen], filters: Collection[tuple[int, int]]) -> dict[int, set[int]]:
    """Map each process whose input is another one's output to those that write it.

    Two that write to each other are in conversation, and neither is a filter.
    """
    writers: dict[int, set[int]] = {}
    readers: dict[int, list[int]] = {}
    for pid, one in seen.items():
        if one.reads:
            readers.setdefault(one.reads, []).append(pid)

    def connect(writer: int, pipes: frozenset[int]) -> list[int]:
        reached = [reader for pipe in pipes for reader in readers.get(pipe, ()) if reader != writer]
        for reader in reached:
            writers.setdefault(reader, set()).add(writer)
        return reached

    queue = [pid for pid, one in seen.items() if one.process.key in filters]
    queue.extend(reader for pid, one in seen.items() for reader in connect(pid, one.writes))
    connected = set()
    while queue:
        # What a filter such as `tee >(gzip)` writes to is a filter, too, at whatever descriptor.
        pid = queue.pop()
        if pid not in connected:
            connected.add(pid)
            queue.extend(connect(pid, seen[pid].also_writes))
    return {pid: found for pid, found in writers.items() if pid not in _upstream(pid, writers)}


def _upstream(pid: int, writers: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    queue = list(writers[pid])
    while queue:
        writer = queue.pop()
        if writer not in found:
            found.add(writer)
            queue.extend(writers.get(writer, ()))
    return found
