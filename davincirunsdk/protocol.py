"""A job as its user and the command see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import signal
    from types import TracebackType

    from davincirunsdk.cluster import Fact
    from davincirunsdk.ending import Ending
    from davincirunsdk.types import JobState, RunResult, WorkerStatus


class Job(Protocol):
    """What `FMKManager` and `NodesManager` both are."""

    async def __aenter__(self) -> Job:
        """Start all workers."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop what still runs."""

    def wait(self) -> Ending[RunResult]:
        """Wait for the end of the job; see `JobBody.wait`."""

    def stop(self, *, now: bool = False) -> Ending[None]:
        """Stop the job; see `JobBody.stop`."""

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to every running worker."""

    def note_signal(self, number: signal.Signals) -> None:
        """Learn which signal is the reason of the stop that comes next."""

    @property
    def state(self) -> JobState:
        """Where the job stands."""

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The workers as they stand now, in rank order."""

    @property
    def auxiliaries(self) -> tuple[WorkerStatus, ...]:
        """Processes that serve the workers and are not ranks."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Host names of the nodes of which this job starts the workers; () where it is this host alone."""

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Which source said what about size and place of the job."""

    @property
    def error(self) -> BaseException | None:
        """What `wait` raises, None while there is no failure."""

    @property
    def job_id(self) -> str:
        """Name of the job, as in its log files; "" before the start."""
