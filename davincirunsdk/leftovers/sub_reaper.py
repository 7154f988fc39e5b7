"""Orphans of a job come to the process that supervises it, where that process is ours alone."""

from __future__ import annotations

import os

_PR_SET_CHILD_SUBREAPER = 36


def become_sub_reaper() -> bool:
    """Inherit what workers orphan, so that it is found whatever it did to its environment and session.

    Not as pid 1, which inherits more than the job's, nor beside children of a program that became us.

    Returns:
        True if every later child of this process belongs to its job.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        import ctypes

        return os.getpid() != 1 and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return False
