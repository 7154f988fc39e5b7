"""The Python script or module of a command: looked at once, before each worker says the same about it."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from davincirunsdk.errors import WorkerSpawnError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_LAST_OPTION = re.compile(r"(-[bBdEiIOPqsSuvx]*)([cm])(.*)", re.DOTALL)
"""An option behind which all words are the program's own, perhaps written together with others."""

_PATIENCE = 10.0
"""Seconds that a look for a module may take; a Python that takes longer may find it itself."""


class _Run(NamedTuple):
    """What a Python command runs: a script, or a module with the options that stand before it."""

    script: str = ""
    module: str = ""
    options: tuple[str, ...] = ()


def _read(command: Sequence[str]) -> _Run:
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return _Run()
    options: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word in _WITH_VALUE:
            options += [word, *(value for value in (next(words, None),) if value is not None)]
        elif word == "-":
            return _Run()
        elif last := _LAST_OPTION.fullmatch(word):
            before, letter, rest = last.groups()
            module = rest or next(words, "")
            if letter == "c":
                return _Run()
            return _Run(module=module, options=(*options, before) if before != "-" else tuple(options))
        elif word.startswith("-"):
            options.append(word)
        else:
            return _Run(script=word)
    return _Run()


def script_of(command: Sequence[str], work_dir: Path) -> Path | None:
    """Find the script that a Python command runs.

    Args:
        command: Words of the command.
        work_dir: Folder that it runs in.

    Returns:
        The path; None for another program, `-c`, `-m` or a script on standard input.
    """
    script = _read(command).script
    return work_dir / script if script else None


def check_module(command: Sequence[str], work_dir: Path, environment: Mapping[str, str]) -> None:
    """Make sure that the module of a Python command with `-m` is there and has no syntax error.

    Its own Python looks for it, once, and runs nothing of it; blocks for as long as a Python takes to start.

    Args:
        command: Words of the command.
        work_dir: Folder that it runs in.
        environment: What it will find as its environment.

    Raises:
        WorkerSpawnError: The module is not there or cannot be run. Where that is not sure, nothing is said.
    """
    run = _read(command)
    if not run.module:
        return
    probe = Path(__file__).with_name("module_probe.py")
    try:
        answer = subprocess.run(
            [command[0], *run.options, "-c", probe.read_text(encoding="utf-8"), run.module],
            cwd=work_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return
    kind, _, text = answer.decode(errors="replace").partition("\t")
    if kind == "missing":
        hint = "; leave out -m to run a file" if run.module.endswith(".py") else ""
        raise WorkerSpawnError(
            f"no module named {text!r} (looked in {work_dir} and in the paths of {command[0]}); modules are "
            f"seen from --work-dir (work_dir), PYTHONPATH and what is installed{hint}",
            errno=errno.ENOENT,
        )
    if kind == "package":
        raise WorkerSpawnError(
            f"{text!r} is a package without __main__ and cannot be run; name one of its modules",
            errno=errno.ENOEXEC,
        )
    if kind == "syntax":
        raise WorkerSpawnError(f"{text}; nothing was started", errno=errno.ENOEXEC)


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
            "from --work-dir (work_dir)",
            errno=errno.EACCES if error.errno == errno.EACCES else errno.ENOENT,
        ) from None
