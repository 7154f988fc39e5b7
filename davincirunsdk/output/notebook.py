"""A panel in a notebook cell: the workers' table, and their output below it.

It is one display that is updated in place, HTML with plain text beside it, so that it needs no
extension, works wherever notebooks are shown, and stays in the saved notebook. Below it stands the
choice of ranks as a display that never changes: inside the panel each update would undo the choice.

The panel appears in the cell that starts the job. When another cell waits for the job, the panel
moves there. Updates are sent from a thread without a context of its own, so they carry the cell that
runs at that moment as their parent: front ends find the display by its id, and those that only
listen to the running cell (nbclient, papermill) hear them. Seen with ipykernel 6.26, 6.29 and 7.4.
"""

from __future__ import annotations

import importlib
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from davincirunsdk.output.backlog import Gap
from davincirunsdk.output.base import DisplayGoneError, ThreadedSink, log_path_of
from davincirunsdk.output.panel import Panel
from davincirunsdk.output.table import UNFINISHED
from davincirunsdk.output.tail import Tail
from davincirunsdk.output.text import RankText, left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.output.types import Snapshot
    from davincirunsdk.types import LogBlock

_HELD_BYTES = 1 << 20
_KEPT = (4000, 320_000)
"""Lines and characters that stay in the plain text of the finished panel."""
_SHOWN = (800, 64_000)
"""The same while the job runs, and in the HTML."""
_SHORTEST_PAUSE = 0.2
_BYTES_PER_SECOND = 500_000
"""Of updates; Jupyter servers begin to drop output at 1 MB/s."""
_REFRESH = 1.0
_REFRESH_BYTES_PER_SECOND = 50_000
"""Of updates that only move the clock on."""

Bundle = dict[str, str]


class _Handle(Protocol):
    """What IPython gives for a display."""

    def update(self, data: Bundle, /, *, raw: bool) -> None:
        """Replace what is displayed."""


class _Display(Protocol):
    """IPython's function."""

    def __call__(self, data: Bundle, /, *, raw: bool, display_id: str) -> _Handle:
        """Display something that can be replaced."""


class _DisplayPublisher(Protocol):
    """The part of the kernel that sends displays."""

    parent_header: Mapping[str, object]


class Shell(Protocol):
    """The part of IPython's shell that is needed here."""

    display_pub: _DisplayPublisher


def kernel_shell() -> Shell | None:
    """Return the shell if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell: Shell | None = ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class NotebookSink(ThreadedSink):
    """Shows a job in the notebook cell that starts it or waits for it.

    Made in the thread of that cell, or in a context copied from it.

    Args:
        shell: The kernel's shell.
        names: Name of each rank, such as `rank 3`.
        echo: Ranks to show, None for all.
        snapshot: Tells how the job stands.
    """

    def __init__(
        self,
        shell: Shell,
        *,
        names: Mapping[int, str],
        echo: frozenset[int] | None,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        super().__init__(echo=echo, snapshot=snapshot, held=_HELD_BYTES)
        self._shell = shell
        self._names = {rank: name for rank, name in names.items() if echo is None or rank in echo}
        self._texts: dict[int, RankText] = {}
        self._gaps: dict[int, Gap] = {}
        self._tail = Tail(lines=_KEPT[0], size=_KEPT[1])
        self._size = 0
        self._closing = threading.Event()
        self._finished = False
        self._place_lock = threading.Lock()
        self._place = self._new_place()

    def attach(self) -> None:
        """Move the panel to the calling cell, if it is another one and the job has not ended."""
        with self._place_lock:
            if self._finished or self._place.cell == _cell(self._shell):
                return
            left, self._place = self._place, self._new_place()
            with suppress(DisplayGoneError):
                left.leave(self.snapshot())
        self._backlog.poke()

    def close(self, timeout: float) -> None:
        """Show all that is still held, then the end; see `Sink`."""
        self._closing.set()
        super().close(timeout)

    def show(self, output: list[LogBlock | Gap]) -> float | None:
        """Show output; see `ThreadedSink`."""
        for item in output:
            self._absorb(item)
        with self._place_lock:
            self._update()
        # Meanwhile output collects in the backlog: in a flood it is left out there, at no cost.
        self._closing.wait(max(_SHORTEST_PAUSE, self._size / _BYTES_PER_SECOND))
        if self.snapshot().state not in UNFINISHED:
            return None
        return max(_REFRESH, self._size / _REFRESH_BYTES_PER_SECOND)

    def finish(self) -> None:
        """Show last lines without end, the last state of progress bars, and how the job ended."""
        for rank, text in sorted(self._texts.items()):
            self._add(rank, text.finish(cleared=True))
        with self._place_lock:
            self._finished = True
            self._update()

    def _absorb(self, item: LogBlock | Gap) -> None:
        text = self._texts.get(item.rank)
        if text is None:
            text = self._texts[item.rank] = RankText(colour=False)
        if not isinstance(item, Gap):
            self._add(item.rank, text.feed(item.data))
            return
        gap = text.skip(item)
        self._tail.leave_out(gap.lines, gap.size)
        before = self._gaps.get(gap.rank)
        if before is not None:
            gap = replace(gap, lines=before.lines + gap.lines, size=before.size + gap.size)
        self._gaps[gap.rank] = gap
        notice = left_out(gap.lines, gap.size, log_path_of(gap.rank, self.snapshot()))
        self._tail.add_notice(gap.rank, notice)

    def _add(self, rank: int, lines: list[str]) -> None:
        if lines:
            self._gaps.pop(rank, None)
        for line in lines:
            self._tail.add(rank, line)

    def _new_place(self) -> _Place:
        return _Place(self._shell, self._names, self.snapshot())

    def _update(self) -> None:
        snapshot = self.snapshot()
        bars = (
            []
            if self._finished
            else [(rank, bar) for rank in sorted(self._texts) for bar in self._texts[rank].bars()]
        )
        short = self._tail.shortened(lines=_SHOWN[0], size=_SHOWN[1])
        long = self._tail if self._finished else short
        panel = self._place.panel
        bundle = _bundle(panel.html(snapshot, short, bars), panel.plain(snapshot, long, bars))
        self._size = sum(len(part.encode(errors="replace")) for part in bundle.values())
        self._place.update(bundle)


class _Place:
    """The displays of a job in one cell."""

    def __init__(self, shell: Shell, names: Mapping[int, str], snapshot: Snapshot) -> None:
        self.cell = _cell(shell)
        self.panel = Panel(f"davincirun-{uuid.uuid4().hex[:12]}", names)
        display: _Display = importlib.import_module("IPython.display").display
        waiting = Tail(lines=0, size=0)
        panel = _bundle(self.panel.html(snapshot, waiting, []), self.panel.plain(snapshot, waiting, []))
        self._display = display(panel, raw=True, display_id=uuid.uuid4().hex)
        choice = self.panel.choice()
        self._choice = None
        if choice:
            text = f"log files in {snapshot.log_dir}"
            self._choice = display(_bundle(choice, text), raw=True, display_id=uuid.uuid4().hex)

    def update(self, bundle: Bundle) -> None:
        """Replace what the panel shows.

        Raises:
            DisplayGoneError: The kernel does not send displays any more.
        """
        try:
            self._display.update(bundle, raw=True)
        except Exception as error:  # the kernel is going down, in whatever order its parts do
            raise DisplayGoneError from error

    def leave(self, snapshot: Snapshot) -> None:
        """Say that the panel has moved."""
        self.update(_bundle(*self.panel.moved(snapshot)))
        if self._choice is not None:
            self._choice.update(_bundle("", ""), raw=True)


def _bundle(html: str, plain: str) -> Bundle:
    return {"text/html": html, "text/plain": plain}


def _cell(shell: Shell) -> object:
    """Return what tells the cell that this thread works for from others."""
    return shell.display_pub.parent_header.get("msg_id")
