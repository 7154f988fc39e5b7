"""What is known of how a job ends, and what its user is told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk.errors import DavinciRunError, DistributedRuntimeError, JobTimeoutError
from davincirunsdk.supervision.cause import InternalError
from davincirunsdk.supervision.verdict import INTERNAL_ERROR, must_raise
from davincirunsdk.types import JobState, RunResult, Verdict

if TYPE_CHECKING:
    from typing import NoReturn


class Outcome:
    """How one job ends.

    Attributes:
        result: Without a failure, once it is decided; None before.
        final: The whole result, failed or not, when nothing of the job runs any more; None before.
        failure: That of the workers, None without one.
        start_error: Why the workers could not be started, None while they could.
        fault: An error of our own, None without one.
        told: Somebody has been given the outcome.
    """

    def __init__(self) -> None:
        self.result: RunResult | None = None
        self.final: RunResult | None = None
        self.failure: DistributedRuntimeError | None = None
        self.start_error: DavinciRunError | None = None
        self.fault: Exception | None = None
        self.told: bool = False

    @property
    def error(self) -> BaseException | None:
        """What is raised, None while there is no failure."""
        return self.fault or self.start_error or self.failure

    def take(self) -> RunResult:
        """Give the result, once that is decided.

        Raises:
            BaseException: `error`, where there is one.
        """
        if self.error is not None:
            self.throw(self.error)
        self.told = True
        assert self.result is not None
        return self.result

    def throw(self, error: BaseException) -> NoReturn:
        """Raise an error of the job, which is told by that."""
        self.told = True
        raise error

    def note_start_error(self, error: DavinciRunError) -> None:
        """Keep the first reason why the job could not be."""
        self.start_error = self.start_error or error

    def decide(self, result: RunResult) -> None:
        """Take a result that is known though survivors may still run."""
        self._know(result)
        self.result = None if self.failure is not None else result

    def conclude(self, result: RunResult) -> str:
        """Take the last result.

        Returns:
            The end in words.
        """
        self._know(result)
        blamed = result.report.root_cause if result.report is not None else None
        cause = f": {blamed.name}, {blamed.reason}" if result.failures and blamed is not None else ""
        if self.start_error is not None:
            code = getattr(self.start_error, "exit_code", 1)
            result, cause = replace(result, state=JobState.FAILED, exit_code=code), f": {self.start_error}"
        if self.fault is not None:
            result = replace(result, state=JobState.FAILED, exit_code=INTERNAL_ERROR)
            cause = f": {InternalError.of(self.fault).words}"
        self.result = self.final = result
        return f"{result.state}{cause}"

    def _know(self, result: RunResult) -> None:
        report = result.report
        if report is not None and must_raise(report) and self.start_error is None:
            too_long = report.verdict in (Verdict.STALLED, Verdict.TIME_LIMIT)
            kind = JobTimeoutError if too_long else DistributedRuntimeError
            self.failure = kind(report.text, report=report, result=result)
