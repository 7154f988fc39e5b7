"""The notebook panel as HTML and as plain text; nothing here knows a kernel."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING

from davincirunsdk.output.labels import Labels
from davincirunsdk.output.table import UNFINISHED, headline, table_rows
from davincirunsdk.output.text import left_out
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.output.table import TableRow
    from davincirunsdk.output.tail import Tail
    from davincirunsdk.output.types import Snapshot

_RANK_COLOURS = ("#0b8598", "#b07000", "#2b9440", "#b04fc8", "#3b78d8", "#d6336c", "#6a8f14", "#8a66e8")
"""Readable on white and in dark themes, as all colours here."""
_STATE_COLOURS = {
    "RUNNING": "#3b78d8",
    "STOPPING": "#b07000",
    "SUCCEEDED": "#2b9440",
    "FAILED": "#e03131",
}
_QUIET = "#7d858d"
_LINE = "1px solid rgba(128,128,128,.3)"
_SANS = "font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif)"
_MONO = "font:12px/1.4 var(--jp-code-font-family,monospace)"
_CELL = f"padding:3px 14px 3px 6px;text-align:left;white-space:nowrap;border:0;border-bottom:{_LINE}"
_REST = "width:100%;max-width:0;overflow:hidden;text-overflow:ellipsis"
"""Of a cell that takes what the others leave."""


class Panel:
    """Draws one job.

    Styles stand in the elements, for a saved notebook that is not trusted loses style sheets.

    Args:
        key: Sets this panel apart from others on the page; letters, digits and dashes.
        names: Name of each rank that is shown, such as `rank 3`.
    """

    def __init__(self, key: str, names: Mapping[int, str]) -> None:
        self._key = key
        self._names = names
        self._labels = Labels(names)

    def plain(self, snapshot: Snapshot, tail: Tail, bars: list[tuple[int, str]]) -> str:
        """Return the panel as text: a short table, the report, then lines, each with its rank in front."""
        text = [headline(snapshot) + _as_of(snapshot)]
        table = table_rows(snapshot)
        columns = [("", "state", "pid", "time", "exit", "progress" if _tells(table) else "")]
        columns += [(row.name, row.state, row.pid, row.uptime, row.exit, row.progress) for row in table]
        widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
        text += [
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
            for row in columns
        ]
        if snapshot.report:
            text.append(snapshot.report.rstrip())
        if tail.size_left_out:
            text.append(_left_out(snapshot, tail))
        text += [self._labels.prefix(rank, 0) + line for rank, line in tail.lines() + bars]
        return "\n".join(text)

    def html(self, snapshot: Snapshot, tail: Tail, bars: list[tuple[int, str]]) -> str:
        """Return the panel as HTML without scripts."""
        return (
            f'<div class="{self._key}" style="{_SANS};margin:4px 0">'
            + self._head(snapshot)
            + self._table(snapshot)
            + self._report(snapshot)
            + self._log(snapshot, tail, bars)
            + "</div>"
        )

    def choice(self) -> str:
        """Return the choice of ranks: radio buttons that hide the lines of other ranks in the panel."""
        if len(self._names) < 2:
            return ""
        rules = "".join(
            f"body:has(#{self._key}-{_word(rank)}:checked) .{self._key} .line:not(.{_word(rank)})"
            "{display:none}"
            for rank in self._names
        )
        buttons = self._button("all", "all ranks", "checked")
        buttons += "".join(self._button(_word(rank), name) for rank, name in self._names.items())
        return (
            f'<style>{rules}</style><div style="{_SANS};margin:0 0 4px">'
            f'<span style="color:{_QUIET};margin-right:10px">show</span>{buttons}</div>'
        )

    def moved(self, snapshot: Snapshot) -> tuple[str, str]:
        """Return HTML and text of what stays behind when the panel moves to another cell."""
        text = f"job {snapshot.job_id}: shown in the cell that waits for it"
        return f'<div style="{_SANS};color:{_QUIET}">{escape(text)}</div>', text

    def _button(self, word: str, name: str, checked: str = "") -> str:
        return (
            '<label style="margin-right:12px;white-space:nowrap;cursor:pointer">'
            f'<input type="radio" name="{self._key}" id="{self._key}-{word}" {checked} '
            f'style="margin:0 4px 0 0;vertical-align:-2px">{escape(name)}</label>'
        )

    def _head(self, snapshot: Snapshot) -> str:
        return (
            f'<div style="margin-bottom:4px">{_badge(str(snapshot.state))} '
            f"<b>job {escape(snapshot.job_id)}</b>"
            f'<span style="color:{_QUIET}"> &middot; logs in {escape(str(snapshot.log_dir))}'
            f"{_run_report(snapshot)}{_as_of(snapshot)}</span></div>"
        )

    def _table(self, snapshot: Snapshot) -> str:
        table = table_rows(snapshot)
        tells = _tells(table)
        names = ["", "state", "pid", "time", "exit", *(["progress"] if tells else []), "log", "last line"]
        head = "".join(f'<th style="{_CELL};font-weight:600;color:{_QUIET}">{name}</th>' for name in names)
        rows = "".join(_row(row, tells) for row in table)
        return (
            f'<table style="border-collapse:collapse;table-layout:auto;width:100%;margin:0 0 6px;{_SANS}">'
            f'<thead><tr style="background:none">{head}</tr></thead><tbody>{rows}</tbody></table>'
        )

    def _report(self, snapshot: Snapshot) -> str:
        if not snapshot.report:
            return ""
        return (
            f'<pre style="{_MONO};white-space:pre-wrap;margin:0 0 6px;padding:6px 10px;'
            f"border-left:3px solid {_STATE_COLOURS['FAILED']};background:rgba(224,49,49,.08)"
            f'">{escape(snapshot.report.rstrip())}</pre>'
        )

    def _log(self, snapshot: Snapshot, tail: Tail, bars: list[tuple[int, str]]) -> str:
        lines = [self._line(rank, text) for rank, text in tail.lines() + bars]
        if not lines:
            return ""
        above = ""
        if tail.size_left_out:
            above = f'<div style="color:{_QUIET};margin-bottom:2px">{escape(_left_out(snapshot, tail))}</div>'
        # The reversed column keeps the newest lines in view: each update would scroll to the top.
        return (
            f'{above}<div style="display:flex;flex-direction:column-reverse;max-height:26em;overflow:auto;'
            f'border:{_LINE};border-radius:3px;padding:4px 8px"><div style="{_MONO};white-space:pre">'
            + "".join(lines)
            + "</div></div>"
        )

    def _line(self, rank: int, text: str) -> str:
        label = escape(self._labels.prefix(rank, 0))
        colour = _RANK_COLOURS[rank % len(_RANK_COLOURS)]
        return (
            f'<div class="line {_word(rank)}"><span style="color:{colour}">{label}</span>{escape(text)}</div>'
        )


def _word(rank: int) -> str:
    return f"r{rank}" if rank >= 0 else f"aux{-rank}"


def _as_of(snapshot: Snapshot) -> str:
    # A kernel that is restarted or killed leaves its panel as it is, for ever.
    return time.strftime(", as of %Y-%m-%d %H:%M:%S") if snapshot.state in UNFINISHED else ""


def _run_report(snapshot: Snapshot) -> str:
    """Link to the page that is written at the end, where one was asked for."""
    if snapshot.page is None:
        return ""
    name = escape(snapshot.page.name)
    if snapshot.state in UNFINISHED:
        return f" &middot; run report {name} at the end"
    return f' &middot; <a href="{escape(snapshot.page.absolute().as_uri())}">run report {name}</a>'


def _badge(state: str) -> str:
    colour = _STATE_COLOURS.get(state, _QUIET)
    return (
        f'<span style="background:{colour};color:#fff;border-radius:3px;padding:1px 7px;'
        f'font-size:11px;font-weight:600">{state}</span>'
    )


def _tells(table: list[TableRow]) -> bool:
    return any(row.progress for row in table)


def _row(row: TableRow, tells: bool) -> str:
    failed = row.state == JobState.FAILED.value
    colour = _STATE_COLOURS.get(row.state, _QUIET)
    background = "background:rgba(224,49,49,.12)" if failed else "background:none"
    cells = (
        f'<td style="{_CELL};font-weight:600">{escape(row.name)}</td>'
        f'<td style="{_CELL};color:{colour};font-weight:600">{escape(row.state)}</td>'
        f'<td style="{_CELL}">{row.pid}</td>'
        f'<td style="{_CELL}">{row.uptime}</td>'
        f'<td style="{_CELL}">{escape(row.exit)}</td>'
        + (f'<td style="{_CELL}">{escape(row.progress)}</td>' if tells else "")
        + f'<td style="{_CELL}">{row.log}</td>'
        f'<td style="{_CELL};{_MONO};{_REST}">{escape(row.last_line)}</td>'
    )
    return f'<tr style="{background}">{cells}</tr>'


def _left_out(snapshot: Snapshot, tail: Tail) -> str:
    return left_out(tail.lines_left_out, tail.size_left_out, snapshot.log_dir)
