"""A job that goes on without the terminal: `--detach` returns when its workers run, or cannot."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from davincirunsdk.output.start_line import start_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from davincirunsdk.protocol import Job

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def detach() -> Callable[[Job], None]:
    """Go on in a child that has no terminal, while this process waits for its start and then leaves.

    Called before there is any thread. Returns in the child alone.

    Returns:
        What the child calls when its workers run: until then it says its words where this process did.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        _wait_for_start(child, reading)
    os.close(reading)
    os.setsid()
    _replace(os.open(os.devnull, os.O_RDWR), 0, 1)

    def started(job: Job) -> None:
        folder = job.workers[0].log_path.parent
        words = folder / f"{job.job_id}-launcher.log"
        try:
            _replace(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644), 2)
        except OSError:
            # The folder may be on another node.
            _replace(os.open(os.devnull, os.O_RDWR), 2)
        text = (
            f"job {job.job_id} goes on, launcher {os.getpid()}: {start_line(job)}\n"
            f"log folder: {folder}\n"
            f"`davincirunctl attach {job.job_id}` shows it, `wait {job.job_id}` waits for its end\n"
        )
        try:
            os.write(writing, text.encode(errors="surrogateescape"))
        except BrokenPipeError:
            # Whoever waited has been killed.
            pass
        os.close(writing)

    return started


def _replace(new: int, *numbers: int) -> None:
    for number in numbers:
        os.dup2(new, number)
    if new not in numbers:
        os.close(new)


def _wait_for_start(child: int, reading: int) -> NoReturn:
    """Pass stop signals on to the child until it says that its workers run, or ends."""

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    if said:
        sys.stdout.buffer.write(said)
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
