"""Where displayed output goes: terminal, notebook, nowhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from davincirunsdk.output.labels import Labels, parse_prefix
from davincirunsdk.output.types import AttachableSink, Sink, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.output.terminal import Writable

__all__ = ["AttachableSink", "Sink", "Snapshot", "choose_sink", "parse_prefix"]

ColourChoice = Literal["auto", "always", "never"]


def choose_sink(
    *,
    names: Mapping[int, str],
    snapshot: Callable[[], Snapshot],
    echo: frozenset[int] | None = None,
    output_notebook: bool = False,
    stream: Writable | None = None,
    live: bool = False,
    prefix: tuple[str, ...] = ("rank",),
    colour: ColourChoice = "auto",
) -> Sink | None:
    """Find where worker output is to be shown, and begin to show it.

    Call it in the notebook cell that starts the job, or in a context copied from it.

    Args:
        names: Name of each rank of this node, such as `rank 3`; -1 is an auxiliary process.
        snapshot: Tells how the job stands; called in another thread, so it must be safe there.
        echo: Ranks to show, None for all.
        output_notebook: Show a panel if this is the kernel of a notebook; no effect elsewhere.
        stream: Text stream to show output on, such as `sys.stdout`; None for none.
        live: With a table of the workers, if the stream is a terminal.
        prefix: What stands before each line on a stream; see `parse_prefix`.
        colour: `auto` colours on a terminal, unless the variable `NO_COLOR` is set.

    Returns:
        The sink, to be closed by the caller; None when nothing is to be shown.
    """
    if not names or (echo is not None and not echo.intersection(names)):
        return None
    if output_notebook:
        from davincirunsdk.output.notebook import NotebookSink, kernel_shell

        shell = kernel_shell()
        if shell is not None:
            panel = NotebookSink(shell, names=names, echo=echo, snapshot=snapshot)
            panel.start()
            return panel
    if stream is None:
        return None
    from davincirunsdk.output.terminal import TerminalSink, redraws

    coloured = colour == "always" or (colour == "auto" and _wants_colour(stream))
    labels = Labels(names, parts=prefix, colour=coloured)
    kind = TerminalSink
    if live and redraws(stream):
        from davincirunsdk.output.live import LiveSink

        kind = LiveSink
    sink = kind(stream, labels=labels, colour=coloured, echo=echo, snapshot=snapshot)
    sink.start()
    return sink


def _wants_colour(stream: Writable) -> bool:
    isatty = getattr(stream, "isatty", None)
    try:
        on_terminal = bool(isatty()) if callable(isatty) else False
    except ValueError:
        # A closed stream.
        return False
    return on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
