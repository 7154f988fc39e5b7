"""Carry on with the workers' output when their supervisor is gone: from the pipes to the log files."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATIENCE = 1.0
"""Seconds that the last bytes of a job may take to reach a disk."""


class Drain:
    """Reads pipes until all have ended.

    Args:
        outputs: For each worker its pid, the read end of its pipe and its log file; descriptors may
            be missing, without the file what comes is dropped.
    """

    def __init__(self, outputs: Sequence[tuple[int, ...]]) -> None:
        self._files = {
            output[1]: output[2] if len(output) > 2 else -1 for output in outputs if len(output) > 1
        }
        self._inodes = {output[0]: os.fstat(output[1]).st_ino for output in outputs if len(output) > 1}
        self._pipes = {output[0]: output[1] for output in outputs if len(output) > 1}
        # How long it has been silent before cannot be known.
        self._active = dict.fromkeys(self._files, time.monotonic())
        self._wake = os.pipe()
        self._done = threading.Event()

    def inode(self, pid: int) -> int:
        """Inode of a worker's pipe, 0 where there is none."""
        return self._inodes.get(pid, 0)

    def silence(self, pid: int) -> float:
        """Seconds since a worker's last output; from any thread."""
        return time.monotonic() - self._active.get(self._pipes.get(pid, -1), -math.inf)

    def run(self) -> None:
        """Carry; for a thread."""
        poll = select.poll()
        for pipe in (*self._files, self._wake[0]):
            os.set_blocking(pipe, False)
            poll.register(pipe, select.POLLIN)
        open_pipes = set(self._files)
        while open_pipes:
            ready = {descriptor for descriptor, _ in poll.poll()}
            for pipe in ready & open_pipes:
                if not self._carry(pipe):
                    poll.unregister(pipe)
                    open_pipes.remove(pipe)
            if self._wake[0] in ready and not ready & open_pipes:
                break
        self._done.set()

    def finish(self) -> None:
        """Let what has been written come to the files; those who still hold a pipe are strangers."""
        os.write(self._wake[1], b".")
        self._done.wait(_PATIENCE)

    def _carry(self, pipe: int) -> bool:
        """Carry one piece; False at the end of the pipe."""
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return True
        self._active[pipe] = time.monotonic()
        file = self._files[pipe]
        view = memoryview(data)
        while view and file >= 0:
            try:
                view = view[os.write(file, view) :]
            except OSError:
                # A full disk: the worker goes on to save, perhaps elsewhere.
                break
        return bool(data)
