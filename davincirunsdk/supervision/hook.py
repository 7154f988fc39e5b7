"""What the user wants to run when the job is over; whatever it does changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PATIENCE = 30.0
"""Seconds that it may take."""

_KEPT = 64 << 10
"""Bytes of its standard error that are kept; what comes after them is refused."""

_SHOWN = 2000
_SHOWN_LINES = 5
"""Bytes and lines of its output that are shown when it fails."""

T = TypeVar("T")


def run_hook(command: Sequence[str], variables: Mapping[str, str], patience: float = PATIENCE) -> str:
    """Run it to its end; blocking.

    Args:
        command: Its words; no shell sees them.
        variables: Added to this process's environment.
        patience: Seconds after which it is killed with all of its session.

    Returns:
        What went wrong, "" when nothing did.
    """
    # A file and no pipe: one that floods, or leaves children behind, holds up nobody.
    said = _open_bounded()
    try:
        hook = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(said)
        return f"{command[0]} cannot be started: {error}"
    try:
        code = hook.wait(patience)
        why = "" if code == 0 else f"{command[0]} ended with {code}: {_tail(said)}"
    except subprocess.TimeoutExpired:
        why = f"{command[0]} did not end within {patience:g} s and was killed"
    finally:
        # What it started and left in its session goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(hook.pid, signal.SIGKILL)
        hook.wait()
        os.close(said)
    return why.rstrip(": ")


def call_hook(function: Callable[[T], object], result: T, patience: float = PATIENCE) -> str:
    """Call a function; blocking.

    Args:
        function: It gets the result.
        result: How the job ended.
        patience: Seconds after which it is waited for no longer.

    Returns:
        What went wrong, "" when nothing did.
    """
    name = getattr(function, "__qualname__", repr(function))
    why = f"{name} did not end within {patience:g} s"

    def call() -> None:
        nonlocal why
        try:
            function(result)
        except BaseException as error:  # also SystemExit: this is no place to leave from
            why = f"{name} raised {type(error).__name__}: {error}"
        else:
            why = ""

    thread = threading.Thread(target=call, name="davincirun-on-end", daemon=True)
    thread.start()
    thread.join(patience)
    return why


def _open_bounded() -> int:
    """Open a file in memory that cannot grow, or nothing where the kernel has no such files."""
    try:
        file = os.memfd_create("davincirun-hook", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _KEPT)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    except (AttributeError, OSError):
        return os.open(os.devnull, os.O_RDWR)
    return file


def _tail(file: int) -> str:
    """Read the end of what was written; the offset is shared with the writer."""
    try:
        end = os.lseek(file, 0, os.SEEK_CUR)
        data = os.pread(file, _SHOWN, max(0, end - _SHOWN))[: min(end, _SHOWN)]
    except OSError:
        return ""
    lines = data.decode(errors="replace").strip().split("\n")
    return "\n".join(lines[-_SHOWN_LINES:])
