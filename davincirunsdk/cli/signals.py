"""Signals to the command: what each wish means, and when another one counts.

Wrappers and `timeout` deliver one wish twice, to the process and to its group: a signal counts only a
second after the last one that counted. The first stops the job with its grace period, the next one
kills at once; one more, or two seconds in which nothing moves, leaves without waiting for anything,
and the guardian ends what is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.cli.words import Words
    from davincirunsdk.protocol import Job

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

_COUNTS_AFTER = 1.0
"""Seconds after a signal that counted in which no other one counts."""

_STANDSTILL = 2.0
"""Seconds without progress after the second signal until we leave."""

_LAST_WORDS = 0.5
"""Seconds that a stuck terminal may take for what is still to be said."""


class Signals:
    """The signals of one run.

    Args:
        job: The job that they are about.
        words: Takes what there is to say.
        grace_period: Seconds that the workers have after the first.
        stop: Called at the first: cancels the task that holds the job.
    """

    def __init__(self, job: Job, words: Words, *, grace_period: float, stop: Callable[[], object]) -> None:
        self._job = job
        self._words = words
        self._grace_period = grace_period
        self._stop = stop
        self._counted: list[signal.Signals] = []
        self._last = 0.0
        self._seen: object = None

    @property
    def first(self) -> signal.Signals | None:
        """The first stop signal, None before it."""
        return self._counted[0] if self._counted else None

    def handle(self) -> None:
        """Handle signals from now on; called in the loop."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            # An ignored hang-up stays ignored: somebody used nohup.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._on_stop, number)
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._job.signal_workers, number)
        loop.add_signal_handler(signal.SIGTSTP, self._on_suspend)

    def ignore(self) -> None:
        """Ignore stop signals from now on; called when the exit code is settled.

        The interpreter still needs a moment to end, and `srun --kill-on-bad-exit` signals launchers just
        then: the signal's default action would hide the exit code.
        """
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_stop(self, number: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        if self._counted and loop.time() - self._last < _COUNTS_AFTER:
            return
        self._last = loop.time()
        self._counted.append(number)
        if len(self._counted) == 1:
            self._words.say(f"{number.name}: stopping{self._what_comes()}")
            self._job.note_signal(number)
            self._stop()
        elif len(self._counted) == 2:
            self._words.say(f"{number.name}: killing at once")
            self._job.stop(now=True)
            self._watch()
        else:
            self._leave(f"{number.name}: leaving at once")

    def _what_comes(self) -> str:
        again = f"; another signal counts from {_COUNTS_AFTER:g} s from now on and kills at once"
        return f", workers have {self._grace_period:g} s{again}" if self._job.workers else again

    def _watch(self) -> None:
        """Leave when nothing has moved between two looks."""
        now = (self._job.state, tuple((worker.pid, worker.state) for worker in self._job.workers))
        if now == self._seen:
            self._leave(f"nothing has moved for {_STANDSTILL:g} s: leaving")
        self._seen = now
        asyncio.get_running_loop().call_later(_STANDSTILL, self._watch)

    def _leave(self, why: str) -> None:
        self._words.say(f"{why}; what is left of the job is ended by its guardian")
        self._words.close(_LAST_WORDS)
        os._exit(128 + self._counted[0])

    def _on_suspend(self) -> None:
        # Stopped, we would supervise nothing, while workers, in sessions of their own, went on.
        self._words.say(
            "SIGTSTP (Ctrl-Z) changes nothing: the job goes on, and its supervision; Ctrl-C stops it. "
            "To keep the terminal free, start davincirun with nohup or in tmux"
        )
