"""What the workers said and the display has not shown yet: bounded, and fair between ranks."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from davincirunsdk.logs.streams import BLOCK_COST

if TYPE_CHECKING:
    from davincirunsdk.types import LogBlock


@dataclass(frozen=True, slots=True)
class Gap:
    """Output that the display leaves out, for it could not keep up.

    Attributes:
        rank: Whose output.
        lines: Lines that end in it.
        size: Bytes of it.
        torn: It ended in the middle of a line.
    """

    rank: int
    lines: int
    size: int
    torn: bool


@dataclass(slots=True)
class _Queue:
    """One rank's blocks, oldest first, each with its place in the order of arrival."""

    blocks: deque[tuple[int, LogBlock]] = field(default_factory=deque)
    size: int = 0
    left_out: Gap | None = None
    gap_place: int = 0

    def place(self) -> int | None:
        """Place of the first thing to show, None when there is nothing."""
        if self.left_out is not None:
            return self.gap_place
        return self.blocks[0][0] if self.blocks else None


class Backlog:
    """Blocks on their way to the display.

    When it is full, the rank that holds most loses its oldest block: a quiet rank's lines survive
    another one's flood, and of a flood its newest part, which tells how it went on.

    Args:
        bound: Bytes in all.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._size = 0
        self._arrived = 0
        self._queues: dict[int, _Queue] = {}
        self._closed = False
        self._wanted = threading.Condition(threading.Lock())

    def put(self, block: LogBlock) -> None:
        """Add a block; never waits for the display."""
        with self._wanted:
            if self._closed:
                return
            queue = self._queues.get(block.rank)
            if queue is None:
                queue = self._queues[block.rank] = _Queue()
            self._arrived += 1
            queue.blocks.append((self._arrived, block))
            self._grow(queue, _cost(block))
            while self._size > self._bound:
                self._leave_out()
            self._wanted.notify()

    def take(self, limit: int, timeout: float | None) -> list[LogBlock | Gap] | None:
        """Wait for output and take it, in the order of arrival.

        Args:
            limit: About how many bytes to take at most.
            timeout: Seconds to wait, None for as long as it takes.

        Returns:
            What there is, nothing after `timeout`; None when the backlog is closed and empty.
        """
        with self._wanted:
            if not self._closed and not self._any():
                self._wanted.wait(timeout)
            if self._closed and not self._any():
                return None
            return self._pop(limit)

    def close(self) -> None:
        """Take nothing more; what is held can still be taken."""
        with self._wanted:
            self._closed = True
            self._wanted.notify()

    def clear(self) -> int:
        """Take nothing more and forget what is held.

        Returns:
            How many lines that was.
        """
        with self._wanted:
            self._closed = True
            lines = sum(
                _count_lines(block.data) for queue in self._queues.values() for _, block in queue.blocks
            )
            lines += sum(
                queue.left_out.lines for queue in self._queues.values() if queue.left_out is not None
            )
            self._queues.clear()
            self._size = 0
            self._wanted.notify()
            return lines

    def poke(self) -> None:
        """Let `take` return before its time."""
        with self._wanted:
            self._wanted.notify()

    def _any(self) -> bool:
        return any(queue.place() is not None for queue in self._queues.values())

    def _grow(self, queue: _Queue, cost: int) -> None:
        queue.size += cost
        self._size += cost

    def _leave_out(self) -> None:
        queue = max(self._queues.values(), key=lambda each: each.size)
        queue.gap_place, block = queue.blocks.popleft()
        self._grow(queue, -_cost(block))
        gone = block.data
        if not queue.blocks:
            # The newest lines are what a reader wants most, so of a rank's only block some stay.
            least = max(self._size + _cost(block) - self._bound, len(gone) // 2)
            if cut := gone.find(b"\n", least) + 1:
                gone, rest = gone[:cut], replace(block, data=gone[cut:])
                if rest.data:
                    queue.blocks.append((queue.gap_place, rest))
                    self._grow(queue, _cost(rest))
        before = queue.left_out or Gap(block.rank, 0, 0, torn=False)
        queue.left_out = Gap(
            block.rank,
            before.lines + _count_lines(gone),
            before.size + len(gone),
            torn=not gone.endswith(b"\n"),
        )

    def _pop(self, limit: int) -> list[LogBlock | Gap]:
        taken: list[LogBlock | Gap] = []
        places = [
            (place, rank) for rank, queue in self._queues.items() if (place := queue.place()) is not None
        ]
        heapq.heapify(places)
        while places and limit > 0:
            _, rank = places[0]
            queue = self._queues[rank]
            if queue.left_out is not None:
                taken.append(queue.left_out)
                queue.left_out = None
            else:
                _, block = queue.blocks.popleft()
                taken.append(block)
                self._grow(queue, -_cost(block))
                limit -= _cost(block)
            if (place := queue.place()) is not None:
                heapq.heapreplace(places, (place, rank))
            else:
                heapq.heappop(places)
        return taken


def _cost(block: LogBlock) -> int:
    return len(block.data) + BLOCK_COST


def _count_lines(data: bytes) -> int:
    # Counting looks at every byte, taking out jumps from hit to hit: for lines of usual length three
    # times as fast, and this runs in the pump's thread, in the middle of a flood.
    if data.count(b"\n", 0, 4096) < 64:
        return len(data) - len(data.replace(b"\n", b""))
    return data.count(b"\n")
