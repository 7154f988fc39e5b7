"""The types between the core and the display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.types import JobState, LogBlock, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The job as it stands at the moment of asking, for the tables of a display.

    Attributes:
        job_id: Name of the job, as in its log files.
        state: Where the job stands.
        workers: One status per worker of this node, auxiliary processes last.
        log_dir: Folder of the log files.
        report: The failure report, "" while there is none.
        page: File of the run report that is written at the end, None for none.
    """

    job_id: str
    state: JobState
    workers: tuple[WorkerStatus, ...]
    log_dir: Path
    report: str = ""
    page: Path | None = None


class Sink(Protocol):
    """Where displayed output goes."""

    def write(self, block: LogBlock) -> None:
        """Take output of one worker; called from the pumps' threads, any of them.

        Returns at once whatever the display does, never raises, and holds a bounded number of bytes:
        what does not fit is left out and counted. Blocks may end anywhere, in the middle of a line
        or of a character too: a progress bar is live only if its unfinished line is handed on.
        """

    def close(self, timeout: float) -> None:
        """Show all that is still held, then the end; blocks, so call it in a thread.

        Args:
            timeout: Seconds without any progress after which a stuck display is given up.
        """


@runtime_checkable
class AttachableSink(Protocol):
    """A sink that can move to whoever waits for the job."""

    def attach(self) -> None:
        """Show the job where the calling thread's output goes; called when a blocking wait begins."""
