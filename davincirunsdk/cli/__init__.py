"""The command `davincirun`: its options, the signals that come, its words and its exit code."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Be the command; never returns."""
    # The rest is imported here: Ctrl-C meanwhile would show a traceback.
    signal.signal(signal.SIGINT, _leave)
    _occupy_standard_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # What is loaded now stays: to search it for garbage, a dozen times, would be a tenth of the start.
    gc.disable()
    from davincirunsdk.cli.command import run_command
    from davincirunsdk.output import standard

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run_command()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    standard.flush()
    # Threads that hang in a write to a stuck terminal or disk must not hold the exit.
    os._exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _occupy_standard_streams() -> None:
    """Open what the caller has closed: a socket of ours would get the number, and our words be sent to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
