"""The stop of an attempt: its cause, the signals to the workers, and by when they have to have ended."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from davincirunsdk.supervision.cause import StopWanted, WorkerFailed
from davincirunsdk.supervision.last_words import is_traceback_open
from davincirunsdk.supervision.messages import TracebackWaited
from davincirunsdk.types import Event

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

    from davincirunsdk.supervision.cause import Cause
    from davincirunsdk.supervision.messages import Message
    from davincirunsdk.supervision.worker import Worker

_TRACEBACK_PATIENCE = 0.3
"""Seconds that a worker gets to finish its traceback before it is stopped for another one's failure."""

_WORDS = 4096
"""Bytes of a worker's last output that are looked at for that."""


class Stop:
    """All methods belong to the loop's thread.

    Args:
        number: The signal that asks workers to end.
        grace_period: Seconds between it and SIGKILL, for all workers together.
        post: Takes a message to the attempt's supervisor.
        emit: Takes every event.
        warn: Takes a line for people.

    Attributes:
        cause: Why the workers are to end, None while they go on by themselves.
        ordered: Somebody has asked for it.
        wanted: Wall-clock second in which somebody first wished for the end, None before.
        began: Wall-clock second of the first signal, None before.
        deadline: Monotonic second of SIGKILL.
        spared: Workers that are told later, for they are about to say why they end.
    """

    def __init__(
        self,
        number: signal.Signals,
        grace_period: float,
        *,
        post: Callable[[Message], None],
        emit: Callable[[Event], None],
        warn: Callable[[str], None],
    ) -> None:
        self.cause: Cause | None = None
        self.ordered: bool = False
        self.wanted: float | None = None
        self.began: float | None = None
        self.deadline: float = math.inf
        self.spared: set[Worker] = set()
        self._number = number
        self._grace_period = grace_period
        self._post = post
        self._emit = emit
        self._warn = warn
        self._said_refused: set[Worker] = set()

    @property
    def has_begun(self) -> bool:
        """The signals have been sent, or there was nobody to send one to."""
        return self.deadline < math.inf

    def until_deadline(self) -> float:
        """Give the deadline as it stands, for waits that go by it."""
        return self.deadline

    def order(self, cause: Cause) -> None:
        """Note that it is asked for: what follows is a message away."""
        self.ordered = True
        if isinstance(cause, StopWanted) and self.wanted is None:
            self.wanted = time.time()

    def begin(self, cause: Cause, running: Sequence[Worker], *, now: bool) -> None:
        """Tell the workers, once; later calls can only hasten it.

        Args:
            cause: Why; the first cause is the one that counts.
            running: The workers that run.
            now: SIGKILL at once.
        """
        limit = time.monotonic() + (0.0 if now else self._grace_period)
        if not self.has_begun:
            self.deadline = limit
            self.began = time.time()
            for worker in running:
                if isinstance(cause, WorkerFailed) and is_traceback_open(worker.pump.tail(_WORDS)):
                    self._spare(worker)
                else:
                    worker.terminate(self._number)
            self.cause = cause
            going = ", ".join(worker.spec.name for worker in running)
            detail = f"{cause.words}; still running: {going}" if running else cause.words
            self._emit(Event(kind="stopping", time=time.time(), detail=detail))
            for worker in running:
                self._say_if_refused(worker)
        self.deadline = min(self.deadline, limit)

    def begin_grace_period(self) -> None:
        """Bound what outlived the workers as they were."""
        self.deadline = min(self.deadline, time.monotonic() + self._grace_period)

    def tell_late(self, worker: Worker) -> None:
        """Tell a worker that was spared, or still being started, when the others were told."""
        self.spared.discard(worker)
        if worker.running:
            worker.terminate(self._number)

    def kill(self, worker: Worker) -> bool:
        """End a worker with SIGKILL; False where that is not permitted, and nobody waits for it then."""
        worker.kill()
        if worker.refused:
            self._say_if_refused(worker)
            worker.give_up()
            worker.give_up_output()
        return not worker.refused

    def _spare(self, worker: Worker) -> None:
        """Let it finish its traceback: a signal now would take its last words, and with them the cause."""
        self.spared.add(worker)
        asyncio.get_running_loop().call_later(_TRACEBACK_PATIENCE, self._post, TracebackWaited(worker=worker))

    def _say_if_refused(self, worker: Worker) -> None:
        if worker.refused and worker not in self._said_refused:
            self._said_refused.add(worker)
            self._warn(
                f"{worker.spec.name}, pid {worker.pid}, cannot be signalled (operation not permitted): it "
                "runs as another user; end it as that user or as root"
            )
