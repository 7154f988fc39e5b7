"""What all sinks share: a bounded backlog and one thread that shows it."""

from __future__ import annotations

import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from davincirunsdk.output.backlog import Backlog, Gap
from davincirunsdk.phrases import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.output.types import Snapshot
    from davincirunsdk.types import LogBlock

HELD_BYTES = 8 << 20
_TAKEN_BYTES = 1 << 20

logger: logging.Logger = logging.getLogger("davincirunsdk")


class ThreadedSink(ABC):
    """A sink whose display may be as slow as it likes.

    Args:
        echo: Ranks to show, None for all.
        snapshot: Tells how the job stands; called in the sink's thread.
        held: Bytes of output that may wait for the display.
    """

    def __init__(
        self, *, echo: frozenset[int] | None, snapshot: Callable[[], Snapshot], held: int = HELD_BYTES
    ) -> None:
        self.snapshot = snapshot
        self.progress: int = 0
        self.given_up: bool = False
        self._echo = echo
        self._backlog = Backlog(held)
        self._thread = threading.Thread(target=self._run, name="davincirun-display", daemon=True)

    def write(self, block: LogBlock) -> None:
        """Take output of one worker; see `Sink`."""
        if block.data and (self._echo is None or block.rank in self._echo):
            self._backlog.put(block)

    def close(self, timeout: float) -> None:
        """Show all that is still held, then the end; see `Sink`."""
        self._backlog.close()
        moved = time.monotonic()
        seen = (self.progress, self.queued())
        while self._thread.is_alive() and not self.given_up:
            self._thread.join(timeout / 8)
            if (now := (self.progress, self.queued())) != seen:
                seen, moved = now, time.monotonic()
            elif time.monotonic() - moved >= timeout:
                self.given_up = True
                lines = self.unwritten_lines() + self._backlog.clear()
                logger.warning(
                    "%s of output %s not shown, for nobody reads where they go; all is in %s",
                    count(lines, "line"),
                    "were" if lines != 1 else "was",
                    self.snapshot().log_dir,
                )

    def queued(self) -> int:
        """Bytes that are written and that the reader has not taken yet: one that takes some is not stuck."""
        return 0

    def unwritten_lines(self) -> int:
        """Lines that are being written."""
        return 0

    def note_progress(self) -> None:
        """Say that the display is not stuck; called in the sink's thread after every write."""
        self.progress += 1

    def start(self) -> None:
        """Begin to show; called once, when the sink is complete.

        Raises:
            OSError: No thread can be started.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None

    @abstractmethod
    def show(self, output: list[LogBlock | Gap]) -> float | None:
        """Show output, in the sink's thread.

        Args:
            output: What came; empty when the time asked for has passed.

        Returns:
            Seconds after which to be called again even if nothing comes, None for never.
        """

    @abstractmethod
    def finish(self) -> None:
        """Show the end, in the sink's thread."""

    def _run(self) -> None:
        pause: float | None = self.show([])
        try:
            while (output := self._backlog.take(_TAKEN_BYTES, pause)) is not None:
                pause = self.show(output)
                self.progress += 1
            if not self.given_up:
                self.finish()
        except DisplayGoneError:
            pass
        except Exception:
            logger.exception("the display of the workers' output failed; the job and its log files go on")
        finally:
            self._backlog.clear()


class DisplayGoneError(Exception):
    """Nobody can be shown anything any more."""


def log_path_of(rank: int, snapshot: Snapshot) -> str:
    """Name the file that has all of a rank's output."""
    for worker in snapshot.workers:
        if worker.rank == rank:
            return str(worker.log_path)
    return str(snapshot.log_dir)
