"""Ranks that lag behind the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from davincirunsdk.types import WorkerStatus

_REPORTS = 2
"""Reports that a rank may lack against the median: they are not written in the same moment."""
_LEAST_SECONDS = 5.0
"""A lag that is caught up sooner is none."""


def lagging(workers: Iterable[WorkerStatus]) -> tuple[tuple[WorkerStatus, int], ...]:
    """Find the ranks whose steps lag behind the median.

    Only ranks that tell their steps are compared: most frameworks print on one rank. Ranks that wait for
    each other in every step do not drift apart by more than a report.

    Args:
        workers: The job's workers, of all nodes that are known.

    Returns:
        Workers with the steps that they lack, the slowest first.
    """
    told = [
        (worker, worker.progress) for worker in workers if worker.rank >= 0 and worker.progress is not None
    ]
    if len(told) < 2:
        return ()
    # Of two ranks the one in front is the measure.
    middle = sorted(progress.step for _, progress in told)[len(told) // 2]
    newest = max(progress.time for _, progress in told)
    found = []
    for worker, progress in told:
        behind = middle - progress.step
        late = max(behind * (progress.step_seconds or _LEAST_SECONDS), newest - progress.time)
        allowed = _REPORTS * max(progress.stride for _, progress in told)
        if behind > allowed and late >= _LEAST_SECONDS:
            found.append((worker, behind))
    return tuple(sorted(found, key=lambda item: -item[1]))
