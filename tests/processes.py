"""What tests ask about processes, and how they wait."""

from __future__ import annotations

import os
import time

import psutil


def is_alive(pid: int) -> bool:
    """Tell whether a process lives; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def marked_processes(name: str, value: str) -> list[psutil.Process]:
    """List living processes, other than this one, whose environment has `name` = `value`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                if process.environ().get(name) == value:
                    found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_until(condition: object, timeout: float = 20.0, what: str = "") -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        time.sleep(0.01)
