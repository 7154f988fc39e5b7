"""What the launcher itself says, on standard error."""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
import time

from davincirunsdk.cli.spelling import with_options

_PIECE = 1 << 12
"""Largest write: a slow reader must show as slow, not as stuck."""


class Words:
    """Writes lines from a thread of its own: a stuck terminal must not stop the job.

    Args:
        stream: Descriptor to write to.
    """

    def __init__(self, stream: int = 2) -> None:
        self._stream = stream
        self._progress = 0
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="davincirun-words", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Say one or more lines, each with the command's name in front."""
        for line in text.splitlines():
            self._queue.put(f"davincirun: {line}\n")

    def show(self, text: str) -> None:
        """Say something that stands for itself, such as the failure report."""
        self._queue.put(text.rstrip("\n") + "\n")

    def show_report(self, text: str) -> None:
        """Say a failure report, in colour on a terminal that wants it."""
        if os.isatty(self._stream) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
            from davincirunsdk.diagnosis.colour import coloured

            text = coloured(text)
        self.show(text)

    def close(self, timeout: float) -> None:
        """Wait until all is written, or nothing has moved for `timeout` seconds."""
        self._queue.put(None)
        seen, moved = self._progress, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - moved < timeout:
            self._thread.join(timeout / 8)
            if self._progress != seen:
                seen, moved = self._progress, time.monotonic()

    def _write(self) -> None:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        while (text := self._queue.get()) is not None:
            rest = memoryview(text.encode(encoding, "backslashreplace"))
            while rest:
                try:
                    rest = rest[os.write(self._stream, rest[:_PIECE]) :]
                    self._progress += 1
                except BlockingIOError:
                    # Another program has made the shared terminal non-blocking, and it is full.
                    poll = select.poll()
                    poll.register(self._stream, select.POLLOUT)
                    poll.poll()
                except OSError:
                    # Nobody reads any more.
                    break


class LogHandler(logging.Handler):
    """Says what the package logs."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        """Say one record, with its traceback if it has one."""
        self._words.say(f"{record.levelname.lower()}: {with_options(record.getMessage())}")
        if record.exc_info:
            self._words.show(logging.Formatter().formatException(record.exc_info))
