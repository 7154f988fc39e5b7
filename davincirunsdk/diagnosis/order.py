"""Which of several failures is the root cause."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.exits import signal_behind
from davincirunsdk.diagnosis.matching import find, strip_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.records import WorkerFailure

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
    if signal_behind(failure.exit_code) not in (None, signal.SIGABRT):
        return False
    match = find(failure.tail)
    if match is None or not match.shows_victim:
        return False
    return not _has_own_exception(failure.tail[: match.index + 1])


def _has_own_exception(lines: Sequence[str]) -> bool:
    names = (_EXCEPTION.match(strip_prefix(line)) for line in lines)
    return any(found and found[1] not in _CARRIERS for found in names)
