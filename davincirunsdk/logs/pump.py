"""One worker's bytes: from its pipe to its log file, to the tail for the report, to whoever watches.

Bytes move in a thread of their own per worker, with plain reads and writes. Measured beside it, an
executor hop for each piece needed two to three times the processor time, and a host program that
blocks its loop would have stopped the training. The loop only learns of the end.

A flood that nobody watches is not even read: the kernel moves its pages from the worker's pipe to one
of ours and from there to the file, for two thirds of the processor time. Not straight to the file: a
stuck disk would hold the lock of the worker's pipe, and a worker that waits for that cannot be killed.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.types import LogBlock

if TYPE_CHECKING:
    import asyncio

    from davincirunsdk.logs.file import LogFile
    from davincirunsdk.logs.streams import LogHub
    from davincirunsdk.steps.scan import StepScanner
    from davincirunsdk.types import Progress

_PIPE_BYTES = 1 << 20
_READ_BYTES = (1 << 16, 1 << 20)
"""Smallest and largest read."""
_TAIL_BYTES = 1 << 16
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
        writing: True while bytes are on their way to the disk.
    """

    def __init__(self, rank: int, file: LogFile, hub: LogHub, steps: StepScanner | None = None) -> None:
        self.rank = rank
        self.file = file
        self.last_output: float | None = None
        self.active: float = -math.inf
        self.writing: bool = False
        self._hub = hub
        self._steps = steps
        self._tail = bytearray()
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
        """Stop reading although somebody keeps the pipe open."""
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

    def tail(self, size: int = _TAIL_BYTES) -> bytes:
        """Return the last output, at most `size` bytes and some 64 KiB of it."""
        return bytes(self._tail[-min(size, _TAIL_BYTES) :])

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
        finally:
            self._look_back()
            if self._steps is not None:
                self._steps.announce(last=True)
            os.close(self._pipe)
            for end in self._relay or ():
                os.close(end)
            with self._lock:
                os.close(self._wake)
                self._wake = -1
            self.file.close()

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
        self.last_output, self.active = time.time(), time.monotonic()
        self.writing = True
        while left:
            try:
                moved = self.file.move(out, left)
            except OSError:
                self._look_back()
                data = os.read(out, left)
                self._take(data)
                left -= len(data)
            else:
                self._unseen += moved
                left -= moved
        self.writing = False
        if self.last_output > self._looked_back + _LOOK_BACK:
            self._look_back()
        return count

    def _look_back(self) -> None:
        """Read the end of what went by unseen."""
        if not self._unseen:
            return
        data = self.file.last(min(self._unseen, _TAIL_BYTES))
        if missing := self._unseen - len(data):
            self._tail = bytearray()
            self._hub.skip(self.rank, missing)
            if self._steps is not None:
                self._steps.skip()
        self._unseen = 0
        self._looked_back = time.time()
        self._see(data)

    def _take(self, data: bytes) -> None:
        self.last_output, self.active = time.time(), time.monotonic()
        self.writing = True
        self.file.write(data)
        self.writing = False
        self._see(data)

    def _see(self, data: bytes) -> None:
        self._tail += data[-_TAIL_BYTES:]
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        self._hub.publish(LogBlock(rank=self.rank, data=data, time=self.last_output or time.time()))
        if self._steps is not None:
            self._steps.see(data)
