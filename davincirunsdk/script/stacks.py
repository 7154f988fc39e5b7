"""`davincirunsdk.register_stacks`: lets the launcher see this rank's stacks where py-spy cannot look."""

from __future__ import annotations

import faulthandler
import os
import signal

MEMORY_NAME = "davincirun-stacks"
"""Memory that holds the stacks; that the process has it open says that the signal is meant for it."""
SIGNAL = signal.SIGRTMAX - 6
"""One that nobody uses: SIGUSR1 asks many a script for a checkpoint, and ends the others."""

_memory: int | None = None


def register_stacks() -> None:
    """Have this process answer when the launcher asks where its threads are; call it once, at the start.

    Only needed where py-spy is not installed or not allowed to look. It works while the interpreter is
    held up in C code, and costs nothing until then.
    """
    global _memory
    if _memory is not None:
        return
    try:
        _memory = os.memfd_create(MEMORY_NAME)
    except OSError:
        # A training must not end for what is only looked at.
        return
    faulthandler.register(SIGNAL, file=_memory, all_threads=True, chain=False)
