"""The exception that a script recorded itself: the JSON of torch's `@record`, which ours writes too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.evidence import RaisedError

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST = 1 << 20


def read_error_file(path: Path) -> RaisedError | None:
    """Read a worker's error file.

    Args:
        path: What its TORCHELASTIC_ERROR_FILE named.

    Returns:
        The exception, None when there is none or the file makes no sense. Never raises.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST))
    except (OSError, ValueError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return RaisedError(message=message, traceback="", time=None)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    said, stack = message.get("message"), extra.get("py_callstack")
    return RaisedError(
        message=said if isinstance(said, str) else "",
        traceback=stack if isinstance(stack, str) else "",
        time=_seconds(extra.get("timestamp")),
    )


def _seconds(value: object) -> float | None:
    """Seconds since 1970, which torch writes as text, in whole ones."""
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e11 else None
