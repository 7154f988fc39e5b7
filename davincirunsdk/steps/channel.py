"""The launcher's end of `davincirunsdk.progress`: memory that workers write their step to, and a bell."""

from __future__ import annotations

import json
import mmap
import os
import zlib

from davincirunsdk.script.progress import HEAD, MEMORY_NAME, SLOT_BYTES
from davincirunsdk.steps.shapes import Reading
from davincirunsdk.steps.tracker import SCRIPT


class Channel:
    """Shared memory with a place for each worker of this node.

    It has no name in any file system: workers open it through this process's descriptors, so nothing is
    left of it however this process ends.

    Args:
        places: How many workers.

    Attributes:
        bell: Descriptor that can be read when a worker has written, at most once a second and worker.

    Raises:
        OSError: The kernel has none; a job goes on without.
    """

    def __init__(self, places: int) -> None:
        self._file = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        try:
            os.truncate(self._file, places * SLOT_BYTES)
            self._memory = mmap.mmap(self._file, 0)
            bell, self._bell_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except BaseException:
            os.close(self._file)
            raise
        self.bell: int = bell

    def variable(self, place: int) -> str:
        """Value of the variable by which a worker finds its place."""
        return f"{os.getpid()}:{self._file}:{self._bell_end}:{place}"

    def answer_bell(self) -> None:
        """Empty the bell's pipe."""
        try:
            while len(os.read(self.bell, 4096)) == 4096:
                pass
        except BlockingIOError:
            return

    def read(self, place: int) -> bytes:
        """Read a place as it is now; b"" when the channel is closed."""
        try:
            return self._memory[place * SLOT_BYTES : (1 + place) * SLOT_BYTES]
        except ValueError:
            return b""

    def close(self) -> None:
        """Give the memory back; workers that still write write into nothing."""
        self._memory.close()
        for file in (self._file, self.bell, self._bell_end):
            os.close(file)


class Slot:
    """Reads one worker's place.

    Args:
        channel: The node's.
        place: The worker's number in it.
    """

    def __init__(self, channel: Channel, place: int) -> None:
        self._channel = channel
        self._place = place
        self._last = 0

    def read(self) -> tuple[Reading, float] | None:
        """Return what the script said last and when, None where there is nothing new."""
        # It may be written in this moment: the sum tells.
        for _ in range(3):
            data = self._channel.read(self._place)
            if not data:
                return None
            check, size, moment, step, total = HEAD.unpack_from(data)
            if check in (0, self._last):
                return None
            if size <= SLOT_BYTES - HEAD.size and zlib.crc32(data[4 : HEAD.size + size]) == check:
                self._last = check
                return _reading(step, total, data[HEAD.size : HEAD.size + size]), moment
        return None


def _reading(step: int, total: int, text: bytes) -> Reading:
    values: dict[str, float] = json.loads(text) if text else {}
    loss = values.pop("loss", None)
    return Reading(
        shape=SCRIPT,
        trust=5,
        absolute=True,
        step=step,
        total=total if total >= 0 else None,
        loss=loss,
        values=tuple(values.items()),
    )
