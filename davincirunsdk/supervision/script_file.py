"""The Python script of a command: looked at once, before each worker says the same about it."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.errors import WorkerSpawnError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def script_of(command: Sequence[str], work_dir: Path) -> Path | None:
    """Find the script that a Python command runs.

    Args:
        command: Words of the command.
        work_dir: Folder that it runs in.

    Returns:
        The path; None for another program, `-c`, `-m` or a script on standard input.
    """
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word == "-" or re.match(r"-[a-zA-Z]*[cm]", word):
            return None
        elif not word.startswith("-"):
            return work_dir / word
    return None


def check_script(command: Sequence[str], work_dir: Path) -> None:
    """Make sure that the script of a Python command is there and can be read; blocks shortly.

    Raises:
        WorkerSpawnError: It is not, or cannot be.
    """
    script = script_of(command, work_dir)
    if script is None:
        return
    try:
        # A folder or an archive with a `__main__` is for Python to judge. A pipe is not opened.
        if stat.S_ISREG(script.stat().st_mode):
            os.close(os.open(script, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return
        raise WorkerSpawnError(
            f"can't open file {str(script.name)!r}: {error.strerror} (looked for {script}); scripts are seen "
            "from the work_dir (--work-dir)",
            errno=errno.EACCES if error.errno == errno.EACCES else errno.ENOENT,
        ) from None
