"""Every exception class of the package."""

from __future__ import annotations

import errno as numbers
import os
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from davincirunsdk.types import FailureReport, RunResult, WorkerFailure


class DavinciRunError(Exception):
    """Base of all errors that are this package's own."""


class DistributedRuntimeError(DavinciRunError, RuntimeError):
    """A worker failed.

    Its text is the failure report: root cause first, then the other failures.

    Attributes:
        report: The report as data; its `verdict` says how sure the root cause is.
        failures: Workers that failed by themselves, the most telling first.
        exit_code: The root cause's own exit code, 128 + n if signal n ended it; without a sure
            culprit that of the worker that failed first.
        result: The whole result of the job.
    """

    def __init__(self, text: str, *, report: FailureReport, result: RunResult | None = None) -> None:
        super().__init__(text)
        self.report = report
        self.failures: tuple[WorkerFailure, ...] = report.failures
        self.exit_code: int = report.exit_code
        self.result = result

    @property
    def root_cause(self) -> WorkerFailure:
        """Who failed first by itself, or the best suspect; rank -1 for a node, the scheduler or nobody."""
        return self.report.root_cause

    def __reduce__(self) -> tuple[partial[DistributedRuntimeError], tuple[object, ...]]:
        # Exceptions are pickled by their positional arguments, and so would lose all others.
        return partial(type(self), report=self.report, result=self.result), self.args


class JobTimeoutError(DistributedRuntimeError, TimeoutError):
    """A job was stopped because it had stalled, or because its time was over; exit code 124.

    Its report says who was where, and what each worker said last.
    """


class RankTableError(DavinciRunError, ValueError):
    """A rank table is wrong.

    Attributes:
        path: The file, or None for text that came from no file.
        where: JSON path of the first fault, such as `server_list[0].device[3].rank_id`, or "".
    """

    def __init__(self, message: str, *, path: str | None = None, where: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.where = where


class RankTableTimeoutError(RankTableError, TimeoutError):
    """A rank table did not become complete in time."""


class RankTableMissingError(RankTableError, FileNotFoundError):
    """There is no file where a rank table was named."""


class PlatformError(DavinciRunError, RuntimeError):
    """This node, its devices or its place in the job cannot be told."""


class WorkerSpawnError(DavinciRunError, OSError):
    """A worker process could not be started.

    One whose command is missing is a `FileNotFoundError` too, one whose command may not be executed
    a `PermissionError`.

    Attributes:
        rank: The worker that could not be started, or None when the check before the start failed.
        errno: As in `OSError`.
    """

    def __new__(cls, message: str, *, errno: int | None = None, rank: int | None = None) -> WorkerSpawnError:
        """Choose the kind by the number, as `OSError` does."""
        return super().__new__(_SPAWN_ERRORS.get(errno, cls) if cls is WorkerSpawnError else cls, message)

    def __init__(self, message: str, *, errno: int | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def exit_code(self) -> int:
        """What a command line should exit with: 127 if something was not found, else 126."""
        return 127 if self.errno == numbers.ENOENT else 126

    def __reduce__(self) -> tuple[partial[WorkerSpawnError], tuple[object, ...]]:
        # An `OSError` with one argument would lose its number.
        return partial(type(self), errno=self.errno, rank=self.rank), self.args


_ADVICE = {
    numbers.EAGAIN: "the limit on processes is reached: see `ulimit -u` and the container's pids limit",
    numbers.EMFILE: "the limit on open files is reached: raise it with `ulimit -n` or resource.setrlimit",
    numbers.ENOEXEC: "a script needs a first line such as `#!/bin/sh`",
}


def explain(error: OSError) -> str:
    """Say why something cannot be started or opened, and what to do where a limit is reached."""
    why = os.strerror(error.errno) if error.errno else str(error)
    return "; ".join(filter(None, [why, _ADVICE.get(error.errno or 0)]))


class CommandNotFoundError(WorkerSpawnError, FileNotFoundError):
    """The command, or a part of what it names, is not there."""


class CommandNotExecutableError(WorkerSpawnError, PermissionError):
    """The command is there, but may not be executed."""


_SPAWN_ERRORS: dict[int | None, type[WorkerSpawnError]] = {
    numbers.ENOENT: CommandNotFoundError,
    numbers.EACCES: CommandNotExecutableError,
    numbers.EPERM: CommandNotExecutableError,
}
