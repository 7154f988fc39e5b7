"""The user's terminal for one rank: its own one behind a pty, and what it shows goes to its log, too.

Keys go through as they are, Ctrl-C and Ctrl-D too: the pty makes signals of them, for the rank alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import termios
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 14

_saved: list[list[object]] = []


def is_there() -> bool:
    """Tell whether this process has a terminal to give away."""
    return os.isatty(0) and os.isatty(1)


def restore() -> None:
    """Give the terminal back its modes, if a rank has had it."""
    while _saved:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, _saved.pop())  # type: ignore[arg-type] # as tcgetattr gave it


@contextlib.contextmanager
def given(output: int) -> Iterator[int]:
    """Make a terminal for a process that is started inside, and connect it with the user's afterwards.

    Args:
        output: Takes a copy of all that the process shows.

    Returns:
        The descriptor for its three streams, which leads its session.
    """
    ours, theirs = os.openpty()
    try:
        with contextlib.suppress(OSError):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
        yield theirs
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    _pass_keys()
    copy = os.dup(output)
    threading.Thread(target=_connect, args=(ours, copy), name="davincirun-terminal", daemon=True).start()


def _pass_keys() -> None:
    """Have the user's terminal pass every key on at once and unseen; what is shown is still cooked."""
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(0)
        _saved.append(list(modes))
        modes[0] &= ~(termios.IXON | termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP)
        modes[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(0, termios.TCSADRAIN, modes)


def _connect(ours: int, copy: int) -> None:
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    poll.register(0, select.POLLIN)
    size = b""
    try:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if ours in ready:
                # An error is the end: nobody has the other side open.
                shown = os.read(ours, _PIECE)
                _write(1, shown)
                _write(copy, shown)
            if 0 in ready:
                keys = os.read(0, _PIECE)
                if not keys:
                    poll.unregister(0)
                    continue
                now = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
                if now != size:
                    size = now
                    fcntl.ioctl(ours, termios.TIOCSWINSZ, size)
                _write(ours, keys)
    except OSError:
        return
    finally:
        restore()
        os.close(ours)
        os.close(copy)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
