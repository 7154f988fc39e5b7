"""This process's own stdout and stderr."""

from __future__ import annotations

import sys


def flush() -> None:
    """Write what is held, before an end that skips Python's own; a broken stream is no reason to stay."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
