"""`%%davincirun`: the text of a cell as the script of a job, after `%load_ext davincirunsdk`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from davincirunsdk.blocking import start_and_wait_distributed_train
from davincirunsdk.cli.command import read_options
from davincirunsdk.cli.peers import PeerOptionError
from davincirunsdk.cli.script import check_syntax
from davincirunsdk.cli.spelling import with_options
from davincirunsdk.errors import DavinciRunError

if TYPE_CHECKING:
    from collections.abc import Callable


class History(Protocol):
    """What is needed of its history."""

    input_hist_parsed: list[str]


class Shell(Protocol):
    """What is needed of IPython's shell."""

    history_manager: History

    def register_magic_function(self, function: Callable[[str, str], None], *, magic_kind: str) -> None:
        """Make a function the magic of its name."""


def load_ipython_extension(shell: Shell) -> None:
    """Register `%%davincirun`; IPython calls it at `%load_ext davincirunsdk`."""

    def davincirun(line: str, cell: str) -> None:
        """Run the cell as a script on every NPU: `%%davincirun [options of davincirun] [arguments]`.

        Its workers are processes of their own and see nothing of the notebook's variables. The cell
        shows their output while they run, and the stop button ends them.
        """
        # Not `execution_count`, which IPython raises before a cell runs or behind it, as its version is.
        run_cell(line, cell, len(shell.history_manager.input_hist_parsed) - 1)

    shell.register_magic_function(davincirun, magic_kind="cell")


def run_cell(line: str, cell: str, number: int) -> None:
    """Write a cell's text beside the logs and run it with live output.

    Args:
        line: The words behind the magic's name.
        cell: The lines below.
        number: Of the cell, for the script's name.

    Raises:
        UsageError: An option is wrong.
        DavinciRunError: The job could not be started, or a worker failed.
        KeyboardInterrupt: After a stop, when nothing of the job is left.
    """
    from IPython.core.error import UsageError

    try:
        arguments, work_dir, log_dir, keywords = read_options(shlex.split(line))
    except (PeerOptionError, ValueError) as error:
        raise UsageError(f"%%davincirun: {error}") from None
    script = Path(log_dir or "log").absolute() / f"cell-{number}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    # In the place of the magic's own line stands one, so that tracebacks count as the cell does.
    script.write_text(f"# %%davincirun {' '.join(line.splitlines())}\n{cell}", encoding="utf-8")
    given = keywords.get("env") or {}
    # As in the notebook, modules are found beside it, not beside the script.
    paths = [os.getcwd(), *filter(None, [given.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))])]
    keywords["env"] = {**given, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script), *arguments]
    try:
        check_syntax(command, script.parent)
        start_and_wait_distributed_train(
            command, work_dir, log_dir or "./log", output_notebook=True, **keywords
        )
    except (DavinciRunError, KeyboardInterrupt) as error:
        # IPython would show our own frames, before or in place of what the workers have to say.
        words = f"{type(error).__name__}: {str(error) or 'the job of this cell was stopped'}"
        error._render_traceback_ = lambda: [words]  # type: ignore[union-attr] # what IPython asks for
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"%%davincirun: {with_options(str(error))}") from None
