"""The launcher's end of `davincirunsdk.progress`: memory that workers write their step to."""

from __future__ import annotations

import json
import mmap
import os
import zlib

from davincirunsdk.script.progress import HEAD, MAGIC, SLOT_BYTES
from davincirunsdk.steps.shapes import Reading


class Channel:
    """Shared memory with a place for each worker of this node.

    It has no name in any file system: workers open it through this process's descriptor, so nothing is left
    of it however this process ends.

    Args:
        places: How many workers.

    Raises:
        OSError: The kernel has none; a job goes on without.
    """

    def __init__(self, places: int) -> None:
        self._file = os.memfd_create("davincirun-progress", os.MFD_CLOEXEC)
        try:
            os.truncate(self._file, (1 + places) * SLOT_BYTES)
            os.pwrite(self._file, MAGIC, 0)
            self._memory = mmap.mmap(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise

    def variable(self, place: int) -> str:
        """Value of the variable by which a worker finds its place."""
        return f"/proc/{os.getpid()}/fd/{self._file}:{place}"

    def slot(self, place: int) -> Slot:
        """Return a reader of one worker's place."""
        return Slot(self, place)

    def read(self, place: int) -> bytes:
        """Read a place as it is now; b"" when the channel is closed."""
        if self._memory.closed:
            return b""
        return self._memory[(1 + place) * SLOT_BYTES : (2 + place) * SLOT_BYTES]

    def close(self) -> None:
        """Give the memory back; workers that still write write into nothing."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._file)


class Slot:
    """Reads one worker's place."""

    def __init__(self, channel: Channel, place: int) -> None:
        self._channel = channel
        self._place = place
        self._last = 0

    def read(self) -> tuple[Reading, float] | None:
        """Return what the script said last and when, None where there is nothing new."""
        # It may be written meanwhile: the sum tells.
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
    try:
        values: dict[str, float] = json.loads(text) if text else {}
    except ValueError:
        values = {}
    loss = values.pop("loss", None)
    return Reading(
        shape="script",
        trust=5,
        absolute=True,
        step=step,
        total=total if total >= 0 else None,
        loss=loss,
        values=tuple(values.items()),
    )
