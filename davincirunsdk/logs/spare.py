"""What keeps a standing disk from holding a worker: a watch over the writes, and memory to read on into."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

SPARE_BYTES = 64 << 20
"""What a job may hold in memory of output that a disk does not take."""

_PATIENCE = 0.4
"""Seconds that a write may take before somebody else reads on; it is noticed within twice that."""


class Writer(Protocol):
    """Whoever writes to a disk that may stand."""

    @property
    def write_began(self) -> float | None:
        """Monotonic second in which the write that is under way began, None while there is none."""

    def read_on(self) -> None:
        """Have somebody else read meanwhile; called in the watch's thread, again at every look."""


class Spare:
    """One job's watch and its memory.

    The watch sleeps while nothing is written: a job that prints nothing wakes nobody.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writers: list[Writer] = []
        self._free = SPARE_BYTES
        self._said = False
        self._thread: threading.Thread | None = None
        self._ended = False
        self.awake: bool = False

    def add(self, writer: Writer) -> None:
        """Watch a writer from now on."""
        with self._changed:
            self._writers.append(writer)
            self._ended = False

    def remove(self, writer: Writer) -> None:
        """Watch it no longer; the watch itself ends with the last one."""
        with self._changed:
            self._writers.remove(writer)
            if not self._writers and self._thread is not None:
                self._ended = True
                self._changed.notify()

    def wake(self) -> None:
        """Begin to look; called before a write while `awake` is False."""
        with self._changed:
            self.awake = True
            if self._thread is not None:
                self._changed.notify()
                return
            thread = threading.Thread(target=self._watch, name="davincirun-disk-watch", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No thread to be had: a standing disk holds its worker, as it would without us.
                return
            self._thread = thread

    def take(self, size: int) -> bool:
        """Reserve memory; False when there is not enough left."""
        with self._changed:
            if size > self._free:
                return False
            self._free -= size
            return True

    def give_back(self, size: int) -> None:
        """Give reserved memory back."""
        with self._changed:
            self._free += size

    def say_once(self, say: Callable[[str], None], text: str) -> None:
        """Say once a job that the memory is used up."""
        with self._changed:
            said, self._said = self._said, True
        if not said:
            say(text)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self.awake and not self._ended:
                    self._changed.wait()
                if self._ended:
                    self._thread, self._ended, self.awake = None, False, False
                    return
                self.awake = False
                # A new write wakes nobody before this look: it is seen by it, or by the next.
                self._changed.wait_for(lambda: self._ended, _PATIENCE)
                writers = tuple(self._writers)
            now = time.monotonic()
            for writer in writers:
                if (began := writer.write_began) is not None:
                    self.awake = True
                    if now - began >= _PATIENCE:
                        writer.read_on()
