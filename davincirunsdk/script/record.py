"""`davincirunsdk.record`: a script's own exception reaches the report without being looked for in its log."""

from __future__ import annotations

import functools
import json
import os
import time
import traceback
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


def record(function: Callable[P, T]) -> Callable[P, T]:
    """Write down the exception that leaves a function, in the form of torch's decorator of this name.

    Put it on the main function of a training script: `@davincirunsdk.record`. The exception goes on as
    before; outside a job nothing is written.

    Args:
        function: The script's main function.

    Returns:
        The function with that done.
    """

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _write(error)
            raise

    return recorded


def _write(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(time.time())},
        }
    }
    # Whole or not at all: the launcher may look while this process is being ended.
    partial = f"{path}.{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(content, file)
        os.replace(partial, path)
    except OSError:
        # A full disk must not hide the exception itself.
        return
