"""What the command says about a script that no worker could run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tokenize
import warnings
from typing import TYPE_CHECKING

from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.supervision.script_file import script_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LARGEST = 1 << 20
"""Bytes of the largest script that is looked at: reading it must not delay the start."""


def check_syntax(command: Sequence[str], work_dir: Path) -> None:
    """Find the syntax error of a script that the current Python is to run.

    Not in the library: to keep Python's warnings about a script quiet would change a host program's.

    Args:
        command: Words of the command.
        work_dir: Folder that it runs in.

    Raises:
        WorkerSpawnError: There is one.
    """
    script = script_of(command, work_dir)
    python = shutil.which(command[0])
    if script is None or script.suffix != ".py" or python is None:
        return
    if os.path.realpath(python) != os.path.realpath(sys.executable):
        return  # another Python may read more, or less
    try:
        if not script.is_file() or script.stat().st_size > _LARGEST:
            return
        with tokenize.open(script) as file:
            text = file.read()
    except (OSError, UnicodeError, SyntaxError):
        return  # for Python itself to say
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        line = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise WorkerSpawnError(
            f"{script}{place}: {type(error).__name__}: {what}{f' ({line[:80]})' if line else ''}; nothing "
            "was started",
            errno=errno.ENOEXEC,
        ) from None
