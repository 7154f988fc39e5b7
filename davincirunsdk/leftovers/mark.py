"""What marks every process of a job."""

from __future__ import annotations

JOB_MARK = "DAVINCIRUN_JOB"
"""The variable; its value is the job's mark, `outer/inner` for a job that a job's worker started."""


_RLIMIT_LOCKS = 10


def put_on(pid: int, mark: str) -> None:
    """Mark a child that has just been started, for the time when it hides its environment.

    Args:
        pid: The child.
        mark: The job's mark.
    """
    import resource

    try:
        _, hard = resource.prlimit(pid, _RLIMIT_LOCKS)
        resource.prlimit(pid, _RLIMIT_LOCKS, (limit_of(mark), hard))
    except (OSError, ValueError):
        # It has ended, runs as somebody else, or a sandbox does not know the call.
        return


def limit_of(mark: str) -> int:
    """Return the job's number, which stands in a limit that no kernel enforces.

    A process that is not dumpable, such as ssh-agent, shows its environment to nobody, but its
    limits to all. Limits are inherited and outlive `setsid`, exec and the death of all ancestors.
    The one on file locks has had no effect since Linux 2.4.25.

    Args:
        mark: The job's mark; the last part counts.

    Returns:
        A number that is not the one for "no limit".
    """
    try:
        return int(mark.rpartition("/")[2], 16) >> 1
    except ValueError:
        return -1
