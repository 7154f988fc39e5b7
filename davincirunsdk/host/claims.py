"""What a job holds on this host: cards and ports, in names that vanish with their holder.

A claim is a listening socket with a name in Linux' abstract namespace. The kernel gives a name to one
socket at a time, in a network namespace, to users of all kinds alike; it takes it back when the process
ends, however it ends; and whoever connects to it is told of that end. No file is left, and none is needed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress

_PREFIX = "davincirun/"
_LONGEST = 100
"""Bytes of a name; the kernel takes 107."""

_RETRY = 1.0
"""Seconds to the next try where a claim has so many waiters that it takes no more."""


class Claims:
    """What one job holds; all of it is let go at once.

    Attributes:
        job: Name of the job, for whoever wants the same.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job
        self._held: list[socket.socket] = []

    def take(self, thing: str) -> bool:
        """Claim a thing.

        Args:
            thing: Such as `npu/4`.

        Returns:
            True if it is ours now; also where the kernel does not let us ask, as nobody else can then.
        """
        try:
            claim = _bound(thing)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        self._held.append(claim)
        with suppress(OSError):
            # A second name says who holds it: for people, not for the decision.
            self._held.append(_bound(f"{thing}/{os.getpid()}/{self.job}"))
        return True

    def release(self) -> None:
        """Let everything go; more than once does no harm."""
        for claim in self._held:
            claim.close()
        self._held.clear()


def holder(thing: str) -> str:
    """Say which job holds a thing; blocks shortly.

    Returns:
        Such as `job train (launcher 4711)`; "" if nobody is known to.
    """
    beginning = f"@{_PREFIX}{thing}/"
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
            for line in table:
                _, found, rest = line.rstrip("\n").partition(beginning)
                if found:
                    pid, _, job = rest.partition("/")
                    return f"job {job} (launcher {pid})"
    except OSError:
        return ""
    return ""


async def until_free(thing: str, seconds: float) -> bool:
    """Wait until the holder of a thing lets it go or ends.

    Args:
        thing: As for `Claims.take`.
        seconds: How long at most.

    Returns:
        True if it was let go; somebody else may have taken it since.

    Cancelling ends the waiting.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as line:
        line.setblocking(False)
        try:
            line.connect(_name(thing))
        except BlockingIOError:
            await asyncio.sleep(min(_RETRY, seconds))
            return True
        except OSError:
            return True  # nobody has it any more
        try:
            await asyncio.wait_for(loop.sock_recv(line, 1), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        except OSError:
            return True
    return True


def _bound(thing: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(_name(thing))
        claim.listen(128)
    except BaseException:
        claim.close()
        raise
    return claim


def _name(thing: str) -> bytes:
    return b"\0" + f"{_PREFIX}{thing}".encode(errors="replace")[:_LONGEST]
