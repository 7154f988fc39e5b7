"""The last output of workers that have ended, up to the end of their pipes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.supervision.message_loop import MessageLoop
    from davincirunsdk.supervision.worker import Worker

_STRANGER_PATIENCE = 2.0
"""Seconds that a pipe is read when nothing of the job is left, whoever writes to it."""

_STRANGER_SILENCE = 0.5
"""Seconds without output after which such a pipe is no longer read."""

_DISK_PATIENCE = 10.0
"""Seconds that a write to a stuck disk may take after the last process has ended."""


async def drain(loop: MessageLoop, workers: Sequence[Worker], warn: Callable[[str], None]) -> None:
    """Wait for the last output, but not for a stranger that holds a pipe or a disk that is stuck.

    Args:
        loop: Of the attempt.
        workers: All of it.
        warn: Takes a line for people.
    """
    limit = time.monotonic() + _STRANGER_PATIENCE
    await _until_silent(loop, workers, limit)
    for worker in _carried(workers):
        worker.pump.give_up()
    while pending := _carried(workers):
        written = [worker.pump.file.progress for worker in pending]
        limit = time.monotonic() + _DISK_PATIENCE
        if await loop.until(lambda: not _carried(workers), limit):
            return
        if written == [worker.pump.file.progress for worker in pending]:
            for worker in pending:
                worker.give_up_output()
                warn(f"the disk of {worker.spec.log_path} is stuck: the end of its output is lost")
            return


async def _until_silent(loop: MessageLoop, workers: Sequence[Worker], limit: float) -> None:
    """Wait until each output that is left has ended or has brought nothing for a while."""

    def loud() -> list[float]:
        now = time.monotonic()
        since = {
            worker: max(worker.ended_at, worker.pump.active) + _STRANGER_SILENCE
            for worker in _carried(workers)
        }
        # A disk takes its time: that is no silence.
        return [max(end, now + 0.05) for w, end in since.items() if end > now or w.pump.writing]

    while ends := loud():
        if time.monotonic() >= limit:
            return
        await loop.until(lambda: not loud(), min(*ends, limit))


def _carried(workers: Sequence[Worker]) -> list[Worker]:
    """List the workers whose output has not ended."""
    return [worker for worker in workers if worker.pid is not None and not worker.pump_ended]
