"""One worker's bytes: from its pipe to its log file, to the tail for the report, to whoever watches.

Bytes move in a thread of their own per worker, with plain reads and writes. Measured beside it, an
executor hop for each piece needed two to three times the processor time, and a host program that
blocks its loop would have stopped the training. The loop only learns of the end.

A flood that nobody watches is not even read: the kernel moves its pages from the worker's pipe to one
of ours and from there to the file, for two thirds of the processor time. Not straight to the file: a
stuck disk would hold the lock of the worker's pipe, and a worker that waits for that cannot be killed.

Where a write does not come back, another thread reads on into memory (`spare`), until the write has come
back: no worker is held by a disk for longer than a second.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.logs.spare import SPARE_BYTES
from davincirunsdk.logs.timeline import Timeline
from davincirunsdk.types import LogBlock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from davincirunsdk.logs.file import LogFile
    from davincirunsdk.logs.streams import LogHub
    from davincirunsdk.steps.scan import StepScanner
    from davincirunsdk.types import Progress

_PIPE_BYTES = 1 << 20
_READ_BYTES = (1 << 16, 1 << 20)
"""Smallest and largest read."""
_TAIL_BYTES = 1 << 16
_PIECE_COST = 64
"""Bytes that a piece held in memory needs beside its data."""
_LOOK_BACK = 0.2
"""Seconds of an unseen flood until its end so far is read back from the file."""


class LogPump:
    """Carries one worker's output; everything it holds may be read from any thread.

    Args:
        rank: The worker.
        file: Its log file, which the pump closes at the end.
        hub: Takes what the pump carried.
        steps: Looks for the worker's steps in it.

    Attributes:
        source: The end of the pipe that the worker writes to.
        last_output: Wall-clock second of the last output, None before any.
        active: The same as a monotonic second, minus infinity before any.
        write_began: Monotonic second in which the present write began, None while there is none.
    """

    def __init__(self, rank: int, file: LogFile, hub: LogHub, steps: StepScanner | None = None) -> None:
        self.rank = rank
        self.file = file
        self.last_output: float | None = None
        self.active: float = -math.inf
        self.write_began: float | None = None
        self._hub = hub
        self._spare = hub.spare
        self._steps = steps
        self._tail = bytearray()
        self._timeline = Timeline()
        self._lock = threading.Lock()
        self.source: int
        self._pipe, self.source = os.pipe()
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            os.close(self._pipe)
            os.close(self.source)
            raise
        self.inode: int = os.fstat(self._pipe).st_ino
        try:
            fcntl.fcntl(self.source, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            # The user's share of pipe memory is used up; the default size works as well, slower.
            pass
        os.set_blocking(self._pipe, False)
        self._given_up = False
        self._relay: tuple[int, int] | None = None
        self._unseen = 0
        self._looked_back = 0.0
        self._in_flight = 0
        self._moving = False
        self._blind = False
        self._helper: threading.Thread | None = None
        self._helper_is_done = False
        self._held: deque[bytes] = deque()
        self._not_kept = 0

    @property
    def lost(self) -> int:
        """Bytes that did not reach the file, and never will."""
        return self.file.lost + self._not_kept

    @property
    def writing(self) -> bool:
        """True while bytes are on their way to the disk."""
        return self.write_began is not None or bool(self._held)

    def start(self) -> asyncio.Future[None]:
        """Begin to carry.

        Returns:
            A future that is done when the pipe is at its end and the log file is closed.

        Raises:
            OSError: There is no thread to be had; everything is closed.
        """
        try:
            return in_thread(self._carry)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close everything instead of starting."""
        os.close(self._pipe)
        os.close(self.source)
        os.close(self._wake)
        self._wake = -1
        self.file.close()

    def close_source(self) -> None:
        """Close our copy of the worker's end, so that the pipe ends with the worker."""
        os.close(self.source)

    def give_up(self) -> None:
        """Read what the pipe holds now and then no more, although somebody keeps it open."""
        self._given_up = True
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def share(self) -> list[int]:
        """Give new descriptors for the pipe and the log file, for whoever outlives this process.

        Returns:
            The pipe's read end, and the file, open for appending, where it can be opened; nothing when
            the output has ended. The caller closes them.

        Raises:
            OSError: There is no descriptor left.
        """
        with self._lock:
            if self._wake < 0:
                return []
            pipe = os.dup(self._pipe)
        try:
            # Opened anew: a duplicate would hold the lock that keeps the file's name taken.
            return [pipe, os.open(self.file.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)]
        except OSError:
            return [pipe]

    def count_unwritten(self) -> None:
        """Count what is on its way to a disk that nobody waits for any longer as lost."""
        self._not_kept += sum(map(len, tuple(self._held))) + self._in_flight

    def tail(self, size: int = _TAIL_BYTES) -> bytes:
        """Return the last output, at most `size` bytes and some 64 KiB of it."""
        return bytes(self._tail[-min(size, _TAIL_BYTES) :])

    def tail_times(self, size: int) -> tuple[tuple[int, float], ...]:
        """Return when the last `size` bytes came: pairs of a number of them and a wall-clock second."""
        return self._timeline.of_last(size)

    def progress(self) -> Progress | None:
        """Return how far the worker's training is, None while nothing tells."""
        return None if self._steps is None else self._steps.progress

    def last_line(self) -> str:
        """Return the last line that is not empty, at most 200 characters of it."""
        for line in reversed(bytes(self._tail[-2000:]).replace(b"\r", b"\n").split(b"\n")):
            if text := line.decode(errors="replace").strip():
                return text[:200]
        return ""

    def _carry(self) -> None:
        self._spare.add(self)
        try:
            smallest, largest = _READ_BYTES
            size = smallest
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            while not self._given_up:
                try:
                    if size == largest and not self._hub.watched and self._can_move():
                        count = self._move(size)
                    else:
                        self._look_back()
                        data = os.read(self._pipe, size)
                        count = len(data)
                        if data:
                            self._take(data)
                except BlockingIOError:
                    self._look_back()
                    poll.poll()
                    continue
                if not count:
                    break
                size = min(2 * size, largest) if count == size else max(smallest, size // 2)
            else:
                self._take_rest(self._take)
        finally:
            self._look_back()
            self._spare.remove(self)
            if self._steps is not None:
                self._steps.announce(last=True)
            os.close(self._pipe)
            for end in self._relay or ():
                os.close(end)
            with self._lock:
                os.close(self._wake)
                self._wake = -1
            self.file.close()

    def _take_rest(self, take: Callable[[bytes], None]) -> None:
        """Read what is in the pipe now: whoever holds it may write for ever."""
        left = _PIPE_BYTES
        while left > 0:
            try:
                data = os.read(self._pipe, min(left, _READ_BYTES[0]))
            except BlockingIOError:
                return
            if not data:
                return
            left -= len(data)
            take(data)

    def _can_move(self) -> bool:
        if self._relay is None and self.file.movable:
            if not hasattr(os, "splice"):
                self.file.movable = False
                return False
            try:
                self._relay = os.pipe()
                fcntl.fcntl(self._relay[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:
                # No more descriptors or pipe memory for this user: reading works as well, dearer.
                self.file.movable = False
        return self.file.movable

    def _move(self, size: int) -> int:
        """Carry up to `size` bytes unseen; 0 at the end of the pipe."""
        assert self._relay is not None
        out, into = self._relay
        try:
            count = left = os.splice(self._pipe, into, size, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            raise
        except OSError:
            # Some sandboxes do not know this call: from now on everything is read.
            self.file.movable = False
            raise BlockingIOError from None
        self._note_output(count)
        self._moving = True
        self._begin_write(left)
        while left:
            try:
                moved = self.file.move(out, left)
            except OSError:
                with self._lock:
                    self._moving, seen_by_helper = False, self._blind
                self._look_back()
                data = os.read(out, left)
                if not seen_by_helper:
                    self._see(data)
                self.file.write(data)
                left -= len(data)
            else:
                left -= moved
                with self._lock:
                    if not self._blind:
                        self._unseen += moved
                    self._in_flight = left
        self._moving = False
        self._end_write()
        if time.time() > self._looked_back + _LOOK_BACK:
            self._look_back()
        return count

    def _look_back(self) -> None:
        """Read the end of what went by unseen."""
        if not self._unseen:
            return
        data = self.file.last(min(self._unseen, _TAIL_BYTES))
        if missing := self._unseen - len(data):
            self._pass_over(missing)
        self._unseen = 0
        self._looked_back = time.time()
        self._see(data)

    def _take(self, data: bytes) -> None:
        self._note_output(len(data))
        # Before the write, which may take its time.
        self._see(data)
        self._begin_write(len(data))
        self.file.write(data)
        self._end_write()

    def _note_output(self, size: int) -> None:
        self.last_output, self.active = time.time(), time.monotonic()
        self._timeline.note(size, self.last_output)

    def _begin_write(self, size: int) -> None:
        self._in_flight = size
        self.write_began = time.monotonic()
        if not self._spare.awake:
            self._spare.wake()

    def _end_write(self) -> None:
        """Take the pipe back from a helper, and write what that has read meanwhile."""
        self.write_began, self._in_flight = None, 0
        while True:
            while self._held:
                data = self._held.popleft()
                self._spare.give_back(len(data) + _PIECE_COST)
                self._in_flight, self.write_began = len(data), time.monotonic()
                self.file.write(data)
                self.write_began, self._in_flight = None, 0
            with self._lock:
                helper = self._helper
                if helper is None:
                    self._blind = False
                    return
                self._helper_is_done = True
                os.eventfd_write(self._wake, 1)
            helper.join()
            with self._lock:
                self._helper, self._helper_is_done = None, False
                if not self._given_up:
                    os.eventfd_read(self._wake)

    def read_on(self) -> None:
        """Have another thread read the pipe while a write does not come back; see `spare`."""
        with self._lock:
            if self._helper is not None or self.write_began is None or self._wake < 0:
                return
            helper = threading.Thread(target=self._hold, name="davincirun-hold", daemon=True)
            unseen = 0
            if self._moving and not self._blind:
                # What the kernel moves cannot be read before it is in the file.
                unseen, self._unseen = self._unseen + self._in_flight, 0
            self._blind = True
            try:
                helper.start()
            except RuntimeError:
                return
            self._helper = helper
        if unseen:
            self._pass_over(unseen)

    def _hold(self) -> None:
        """Read into memory until the write has come back or the pipe is at its end."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._helper_is_done:
            try:
                data = os.read(self._pipe, _READ_BYTES[0])
            except BlockingIOError:
                if self._given_up:
                    return
                poll.poll()
                continue
            if not data:
                return
            self._keep(data)
            if self._given_up:
                self._take_rest(self._keep)
                return

    def _keep(self, data: bytes) -> None:
        self._note_output(len(data))
        self._see(data)
        if self._spare.take(len(data) + _PIECE_COST):
            self._held.append(data)
        else:
            self._not_kept += len(data)
            self._spare.say_once(
                self.file.on_trouble,
                f"the disk of {self.file.path} stands still and {SPARE_BYTES >> 20} MiB of output are held "
                "in memory: the workers go on, what they print is not kept until the disk goes on",
            )

    def _pass_over(self, size: int) -> None:
        self._tail = bytearray()
        self._hub.skip(self.rank, size)
        if self._steps is not None:
            self._steps.skip()

    def _see(self, data: bytes) -> None:
        self._tail += data[-_TAIL_BYTES:]
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        self._hub.publish(LogBlock(rank=self.rank, data=data, time=self.last_output or time.time()))
        if self._steps is not None:
            self._steps.see(data)
