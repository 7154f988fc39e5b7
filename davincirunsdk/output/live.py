"""The live view of a terminal: the workers' table, and the newest lines below it."""

from __future__ import annotations

import io
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from davincirunsdk.output.table import UNFINISHED, headline, table_rows
from davincirunsdk.output.terminal import TerminalSink, fit_row
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.output.backlog import Gap
    from davincirunsdk.output.labels import Labels
    from davincirunsdk.output.table import TableRow
    from davincirunsdk.output.terminal import Writable
    from davincirunsdk.output.types import Snapshot
    from davincirunsdk.types import LogBlock

_REDRAW = 0.2
_REFRESH = 1.0
_KEPT_LINES = 500
"""Lines that stay on the terminal when the view ends."""

_COLUMNS = ("", "state", "pid", "time", "exit", "progress", "log", "last line")
_STATE_STYLES = {
    "RUNNING": "blue",
    "STOPPING": "yellow",
    "SUCCEEDED": "green",
    "FAILED": "bold red",
    "STOPPED": "yellow",
    "KILLED": "red",
}


class LiveSink(TerminalSink):
    """Draws the table and the newest lines again and again in the same place.

    Lines that have left the view are not in the terminal's history; the newest ones and the table
    stay when the job ends. The cursor rests on an empty row above, as in `TerminalSink`.

    Args:
        stream: A terminal.
        labels: What stands before each line.
        colour: Colours in the table, and those of the workers.
        echo: Ranks whose lines are shown, None for all.
        snapshot: Tells how the job stands.
    """

    def __init__(
        self,
        stream: Writable,
        *,
        labels: Labels,
        colour: bool,
        echo: frozenset[int] | None,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        super().__init__(stream, labels=labels, colour=colour, echo=echo, snapshot=snapshot)
        self._newest: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._left_view = 0
        self._drawn = 0.0

    def show(self, output: list[LogBlock | Gap]) -> float | None:
        """Show output; see `ThreadedSink`."""
        self._keep(self.render(output))
        wait = self._drawn + _REDRAW - time.monotonic()
        if wait > 0:
            return wait
        snapshot = self.snapshot()
        if snapshot.state is JobState.PENDING:
            # The launcher still says where everything goes.
            return _REDRAW
        self._draw_view(snapshot)
        return _REFRESH if snapshot.state in UNFINISHED else None

    def finish(self) -> None:
        """Leave the newest lines and the final table."""
        self._keep(self.render_last())
        rows = []
        snapshot = self.snapshot()
        if self._left_view:
            rows.append(f"... {self._left_view} lines are not shown here; all is in {snapshot.log_dir}")
        table = self._table(snapshot, len(snapshot.workers))
        above = self.outlet.encode("".join(f"{row}\n" for row in rows))
        below = self.outlet.encode("".join(f"{row}\n" for row in ["", *table]))
        self.outlet.write(b"\r\x1b[J" + above + b"".join(line + b"\n" for line in self._newest) + below)

    def _keep(self, pieces: list[bytes | memoryview]) -> None:
        lines = b"".join(pieces).removesuffix(b"\n")
        if lines:
            before = len(self._newest)
            added = lines.count(b"\n") + 1
            self._newest.extend(lines.rsplit(b"\n", _KEPT_LINES)[-_KEPT_LINES:])
            self._left_view += before + added - len(self._newest)

    def _draw_view(self, snapshot: Snapshot) -> None:
        width, height = self.outlet.width() - 1, self.outlet.height()
        rows = self._table(snapshot, max(1, height // 2 - 4))
        bars = self.footer()
        room = height - 3 - len(rows) - len(bars)
        newest = list(self._newest)[-room:] if room > 0 else []
        lines = [line.decode(self.outlet.encoding, "replace") for line in newest]
        rows = [fit_row(row, width) for row in [*rows, "", *lines, *bars][: height - 2]]
        below = "".join(f"\n{row}" for row in rows)
        self.outlet.write(self.outlet.encode(f"\r\x1b[J{below}\x1b[{len(rows)}A\r"))
        self._drawn = time.monotonic()

    def _table(self, snapshot: Snapshot, most: int) -> list[str]:
        rows = table_rows(snapshot)
        shown = rows[:most]
        page = io.StringIO()
        console = Console(
            file=page,
            width=self.outlet.width() - 1,
            force_terminal=True,
            color_system="standard" if self._colour else None,
            highlight=False,
        )
        table = Table(
            title=Text(headline(snapshot), no_wrap=True, overflow="ellipsis"),
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
        )
        columns = [name for name in _COLUMNS if name != "progress" or any(row.progress for row in rows)]
        cells = [_cells(row, columns) for row in shown]
        for number, name in enumerate(columns):
            # The last line gives way first when the terminal is narrow.
            widest = max([len(name), *(len(row[number]) for row in cells)])
            least = widest if name != columns[-1] else len(name)
            table.add_column(name, no_wrap=True, header_style="dim", overflow="ellipsis", min_width=least)
        for row in cells:
            table.add_row(*row)
        console.print(table)
        if len(rows) > len(shown):
            console.print(f"... and {len(rows) - len(shown)} more", style="dim")
        return page.getvalue().splitlines()


def _cells(row: TableRow, columns: list[str]) -> list[Text]:
    words = (row.name, row.state, row.pid, row.uptime, row.exit, row.progress, row.log, row.last_line)
    cells = {name: Text(word) for name, word in zip(_COLUMNS, words, strict=True)}
    cells["state"].stylize(_STATE_STYLES.get(row.state, "dim"))
    if row.state == "FAILED":
        cells["exit"].stylize(_STATE_STYLES["FAILED"])
    return [cells[name] for name in columns]
