"""Another attempt of launchers that meet: all start their workers once more, together, or none does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from davincirunsdk.supervision.cause import StopWanted
from davincirunsdk.supervision.restarts import Next
from davincirunsdk.types import JobState, Verdict

if TYPE_CHECKING:
    from davincirunsdk.engines.meeting import Meeting
    from davincirunsdk.supervision.restarts import Restarts
    from davincirunsdk.types import RunResult


async def agree_on_next(
    meeting: Meeting, restarts: Restarts, result: RunResult, *, wanted: bool, ends_at: float
) -> Next | None:
    """Say how an attempt ended here, and hear whether all nodes try again; node 0 decides.

    Args:
        meeting: Of the job's launchers.
        restarts: Of this node; note what all have decided.
        result: Of this node alone.
        wanted: The user asked for restarts.
        ends_at: Monotonic second of the job's time limit.

    Returns:
        The next attempt, None where this was the last.
    """
    earlier = restarts.earlier

    def decide(joint: RunResult, trouble: str) -> float | None:
        cause = None if joint.state is JobState.FAILED else StopWanted()
        joint = restarts.with_attempts(joint, cause)
        report = joint.report
        if report is not None and report.verdict in (Verdict.TIME_LIMIT, Verdict.INTERNAL_ERROR):
            trouble = report.why
        if trouble:
            if wanted and joint.state is JobState.FAILED:
                restarts.why = trouble
            return None
        coming = restarts.next(joint, cause, time_left=ends_at - time.monotonic())
        return None if coming is None else coming.pause

    again = await meeting.end_attempt(result, decide)
    if again is None:
        # Decided, but a node that was lost did not come back for it.
        restarts.earlier = earlier
        return None
    if len(restarts.earlier) != again.number:
        # Node 0 has noted it while it decided.
        restarts.earlier = result.attempts
    # A node that came back in the middle has missed the ones before: the number is node 0's.
    return Next(number=again.number, pause=again.pause, port=again.port or None)
