"""See the processes of a job to their end: told in order, killed together, until none is left.

Blocking, for a thread or for the guardian. Whoever waits here waits for the exits themselves; the
other moments are half the grace period, its end, and the end of a helper's silence.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

from davincirunsdk.leftovers.proc import open_handle, send, since_boot
from davincirunsdk.leftovers.stop_order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from davincirunsdk.leftovers.proc import MarkedProcess
    from davincirunsdk.leftovers.process_tree import ProcessTree, Top
    from davincirunsdk.leftovers.stop_order import Seen

SILENCE = 2.0
"""Seconds without output after which a helper that holds a worker's output is asked to end."""

_SETTLING = 0.3
"""Seconds for helpers that end by themselves right after their worker, as Python's resource trackers do."""

_GATHERING = 0.01
"""Seconds in which further exits are taken together with a first one: every look costs."""

_AFTER_KILL = 0.2
"""Seconds between looks after SIGKILL: a child forked in the last moment raises no event."""

_STEP = 0.05
"""Seconds between looks where exits cannot be awaited: kernels before 5.3, some containers."""

_UNKILLABLE_AFTER = 10.0
"""Seconds after SIGKILL until a process counts as stuck in the kernel and is given up."""


class Ending:
    """The end of one job, or of several that end together.

    Args:
        tree: Finds the processes; nobody else uses it meanwhile.
        tops: Gives the workers that have been started, as they stand now.
        deadline: Gives the monotonic second of SIGKILL; `hasten` has it asked again.
        number: The signal that they are told by.
        told: Keys of processes that somebody else has told already.
        note: Takes the keys of those that are told here, for whoever may have to go on with it.
        began: Clock tick since boot at which the end began, None for now.

    Attributes:
        refused: Processes that may not be signalled, by key.
        left: Processes that `end` has given up: refused ones, and those stuck in the kernel.
    """

    def __init__(
        self,
        tree: ProcessTree,
        *,
        tops: Callable[[], Sequence[Top]],
        deadline: Callable[[], float],
        number: int = signal.SIGTERM,
        told: Collection[tuple[int, int]] = (),
        note: Callable[[Collection[tuple[int, int]]], object] = len,
        began: int | None = None,
    ) -> None:
        self.refused: dict[tuple[int, int], MarkedProcess] = {}
        self.left: tuple[MarkedProcess, ...] = ()
        self._tree = tree
        self._tops = tops
        self._deadline = deadline
        self._number = number
        self._told = set(told)
        self._told_tops: set[int] = set()
        self._note = note
        self._began = since_boot() if began is None else began
        self._filters: set[tuple[int, int]] = set()
        self._half = math.inf
        self._busy = threading.Lock()
        self._lock = threading.Lock()
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        """Give the descriptors back, unless a thread that was left behind still waits by them."""
        if not self._busy.acquire(blocking=False):
            return
        with self._lock:
            for end in self._wake:
                os.close(end)
            self._wake = (-1, -1)

    def hasten(self) -> None:
        """Have the deadline asked again; from any thread."""
        with self._lock:
            if self._wake[1] >= 0:
                try:
                    os.write(self._wake[1], b".")
                except BlockingIOError:
                    # It has been asked often enough.
                    return

    def stop(self) -> None:
        """Tell everybody in order; returns when no worker runs, or at the deadline.

        A last look before the deadline finds descendants by their parents while those live. A shell
        may have died of the signal before the first look: its child is told even then.
        """
        with self._busy:
            while True:
                living = self._tree.find(self._tops())
                if time.monotonic() >= self._deadline():
                    return
                until = self._tell(living)
                if not self._have_tops(living):
                    return
                self._wait(living, until)

    def end(self) -> tuple[MarkedProcess, ...]:
        """End whatever of the job is still there.

        After a moment for those that are ending, everybody is told in order, and after the deadline
        killed, again and again until a look finds nothing: a process may fork while it is ended.

        Returns:
            Every process that was found and has ended.
        """
        with self._busy:
            return tuple(self._end().values())

    def _end(self) -> dict[tuple[int, int], MarkedProcess]:
        found: dict[tuple[int, int], MarkedProcess] = {}
        settled = min(time.monotonic() + _SETTLING, self._deadline())
        while living := self._tree.find(self._tops()):
            now, limit = time.monotonic(), self._deadline()
            if now < settled:
                self._wait(living, settled)
            else:
                if now > limit + _UNKILLABLE_AFTER or all(one.key in self.refused for one in living):
                    self.left = tuple(living)
                    break
                found.update({process.key: process for process in living})
                if now >= limit:
                    for process in living:
                        self._send(process, signal.SIGKILL)
                    self._wait(living, now + _AFTER_KILL)
                else:
                    self._wait(living, self._tell(living))
            self._tree.reap_adopted(living)
        for process in self.left:
            found.pop(process.key, None)
        return found

    def _tell(self, living: Collection[MarkedProcess]) -> float:
        """Tell those whose turn it is.

        Returns:
            The monotonic second of the next look, if no exit comes before.
        """
        now, limit = time.monotonic(), self._deadline()
        # Half of what is left when the end begins; a shorter deadline comes with its own half.
        self._half = min(self._half, now + (limit - now) / 2)
        tops = {top.pid: top for top in self._tops()}
        self._told_tops |= {top.pid for top in tops.values() if top.told}
        self._told |= {one.key for one in living if one.pid in self._told_tops}
        seen = self._tree.see(living)
        ended = {top.pipe: top for top in tops.values() if top.pipe and top.pid not in seen}
        self._filters |= _filters_without_writer(seen, ended)
        order = Order(
            seen,
            told=self._told,
            half_over=now >= self._half,
            filters=self._filters,
            number=self._number,
            began=self._began,
        )
        self._filters |= set(order.filters)
        looks = [limit] if now >= self._half else [limit, self._half]
        now_told = []
        for process in order.due():
            holds = [ended[pipe] for pipe in seen[process.pid].writes if pipe in ended]
            if own := [top for top in holds if top.pid not in self._told_tops]:
                # Its worker has ended by itself: it may pass on what it holds.
                if order.is_filter(process):
                    continue
                left = SILENCE - min(top.silence() for top in own)
                if left > 0:
                    looks.append(now + left)
                    continue
            now_told.append(process.key)
            if process.pid in tops:
                self._told_tops.add(process.pid)
            self._send(process, self._number)
            if process.state in "Tt":
                # A stopped process takes no signal before it is continued.
                self._send(process, signal.SIGCONT)
        if now_told:
            self._told.update(now_told)
            self._note(now_told)
        return min(looks)

    def _have_tops(self, living: Collection[MarkedProcess]) -> bool:
        pids = {process.pid for process in living}
        return any(top.pid in pids for top in self._tops())

    def _send(self, process: MarkedProcess, number: int) -> None:
        try:
            send(self._tree.proc, process, number)
        except PermissionError:
            self.refused[process.key] = process

    def _wait(self, processes: Collection[MarkedProcess], until: float) -> None:
        """Wait for the first exit, at most until a monotonic second."""
        handles = [open_handle(process.pid) for process in processes]
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        for handle in handles:
            if handle is not None:
                poll.register(handle, select.POLLIN)
        blind = [process for process, handle in zip(processes, handles, strict=True) if handle is None]
        try:
            while (left := until - time.monotonic()) > 0:
                ready = poll.poll(math.ceil(1000 * (min(left, _STEP) if blind else left)))
                if any(descriptor == self._wake[0] for descriptor, _ in ready):
                    os.read(self._wake[0], 4096)
                    return
                if ready or any(self._is_gone(process) for process in blind):
                    time.sleep(min(_GATHERING, max(0.0, until - time.monotonic())))
                    return
        finally:
            for handle in handles:
                if handle is not None:
                    os.close(handle)

    def _is_gone(self, process: MarkedProcess) -> bool:
        seen = self._tree.proc.look(process.pid)
        return seen is None or seen.started != process.started or seen.is_dead


def _filters_without_writer(seen: Mapping[int, Seen], ended: Mapping[int, Top]) -> set[tuple[int, int]]:
    """Find those that carry a worker's output whose writer had ended before the first look."""
    written = {pipe for one in seen.values() for pipe in one.writes | one.also_writes}
    return {
        one.process.key
        for one in seen.values()
        if one.reads and one.reads not in written and any(pipe in ended for pipe in one.writes)
    }
