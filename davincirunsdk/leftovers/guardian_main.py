"""The guardian's own process: see `guardian`.

It imports little, for it has to stay below 15 MB beside every job.
"""

from __future__ import annotations

import os
import select
import signal
import time

_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL after the supervisor's death: all must be gone within three."""

_CLEAN_LOOKS = 3
"""Looks without a find, 0.1 s apart, before the guardian leaves: a worker may be at its exec just now."""


def main(supervisor: int) -> None:
    """Be the guardian: orders come on descriptor 0.

    Args:
        supervisor: Pid of the process to outlive.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        # Ctrl-C, hang-up and a batch system's SIGTERM are meant for the supervisor, which ends us.
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    watched = _serve(supervisor)
    if watched:
        _clean(watched)


def _serve(supervisor: int) -> set[str]:
    """Take orders until the supervisor is gone or lets us go.

    Returns:
        Marks and folders that are still registered.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    handle = _open_supervisor(supervisor)
    if handle is not None:
        poll.register(handle, select.POLLIN)
    # Kernels before 5.3 have no pidfd: then look for a new parent twice a second.
    step = None if handle is not None else 500
    watched: set[str] = set()
    text = b""
    warm = False
    while True:
        # What the clean-up needs is loaded after the rush of the start, while all is well.
        ready = dict(poll.poll(step if warm or step else 1000))
        if 0 in ready:
            data = os.read(0, 65536)
            *orders, text = (text + data).split(b"\0")
            for order in orders:
                (watched.add if order[:1] == b"+" else watched.discard)(os.fsdecode(order[1:]))
            if not data:
                return watched
        elif ready or os.getppid() != supervisor:
            return watched
        elif not warm:
            import davincirunsdk.leftovers.process_tree  # noqa: F401 - loaded now, used by _clean

            warm = True


def _open_supervisor(supervisor: int) -> int | None:
    try:
        handle = os.pidfd_open(supervisor)
    except (AttributeError, OSError):
        return None
    if os.getppid() != supervisor:
        # It died before: this may be another process of that number.
        os.close(handle)
        return None
    return handle


def _clean(watched: set[str]) -> None:
    folders = {what for what in watched if what.startswith("/")}
    if marks := watched - folders:
        _end(marks)
    if folders:
        import shutil

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end(marks: set[str]) -> None:
    from davincirunsdk.leftovers.process_tree import ProcessTree

    deadline = time.monotonic() + _GRACE
    tree = ProcessTree(*marks)
    tree.terminate()
    clean = 0
    while clean < _CLEAN_LOOKS:
        clean = 0 if tree.end(lambda: deadline) else clean + 1
        time.sleep(0.1)
