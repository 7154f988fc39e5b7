"""Which of several failures is the root cause."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.exits import signal_behind
from davincirunsdk.diagnosis.matching import find, strip_prefix
from davincirunsdk.diagnosis.patterns import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.diagnosis.matching import Match
    from davincirunsdk.types import WorkerFailure

_EXCEPTION = re.compile(r"(?:\w+\.)*(\w+(?:Error|Exception|Interrupt))(?::|$)", re.ASCII)

# A failed collective call reaches Python as one of these, so they prove no fault of the rank's own.
_CARRIERS = frozenset({"RuntimeError", "SystemError", "DistBackendError", "DistError", "DistNetworkError",
                       "DistStoreError", "ConnectionError", "ConnectionResetError", "ConnectionAbortedError",
                       "ConnectionRefusedError", "BrokenPipeError", "TimeoutError"})  # fmt: skip


def order(failures: tuple[WorkerFailure, ...]) -> tuple[WorkerFailure, ...]:
    """Put the root cause first and leave the rest as it is.

    The root cause is the worker that failed first by itself. One thing overrules the time of
    exit: when a rank dies or hangs, the others end with time-outs of their collectives, and such
    a victim may well exit before the rank it waited for. So, if the first failure is a victim by
    its own words (EI0002, EI0006, EI0015, ERR02200, "timed out node", a lost heartbeat, ...), the
    first failure that is none goes before it: one that ended by a signal, with an exception of
    its own, with another error, or without a word. If all are victims, the first stays first.
    The rule is that of MindCluster's fault diagnosis.

    Args:
        failures: Workers that failed by themselves, in the order in which their ends were seen.
            Their time stamps are not compared: clocks of different hosts differ.

    Returns:
        The same failures, root cause first.
    """
    first = next((f for f in failures if not is_victim(f)), None)
    if first is None or first is failures[0]:
        return failures
    return (first, *(f for f in failures if f is not first))


def is_victim(failure: WorkerFailure) -> bool:
    """Tell whether a worker failed because it waited for another one.

    Args:
        failure: A worker that failed by itself.

    Returns:
        True when its first error is of a secondary kind. A signal is never secondary, except
        SIGABRT, with which communication watchdogs and a shutdown after a failed collective end.
    """
    match = find(failure.tail)
    return match is not None and match.shows_victim and _has_no_error_before(failure, match)


def may_be_victim(failure: WorkerFailure) -> bool:
    """Tell whether a worker may have failed because of another one, such as by a broken connection.

    Args:
        failure: A worker that failed by itself.
    """
    match = find(failure.tail)
    return (
        match is not None and match.pattern.role is not Role.PRIMARY and _has_no_error_before(failure, match)
    )


def _has_no_error_before(failure: WorkerFailure, match: Match) -> bool:
    if signal_behind(failure.exit_code) not in (None, signal.SIGABRT):
        return False
    return not _has_own_exception(failure.tail[: match.index + 1])


def was_leaving(failure: WorkerFailure) -> bool:
    """Tell whether a worker that was stopped had already failed by itself.

    A Python that raised may need a while to leave, and its connections close before its process
    ends: a peer that notices can be gone first.

    Args:
        failure: The worker as if it had failed, with the output it wrote before it was stopped.

    Returns:
        True when that output ends with an exception that is no effect of another rank.
    """
    last = next((line for line in reversed(failure.tail) if line.strip()), "")
    return _EXCEPTION.match(strip_prefix(last)) is not None and not may_be_victim(failure)


def _has_own_exception(lines: Sequence[str]) -> bool:
    names = (_EXCEPTION.match(strip_prefix(line)) for line in lines)
    return any(found and found[1] not in _CARRIERS for found in names)
