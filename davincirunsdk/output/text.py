"""From one worker's bytes to lines that are safe to show: no torn characters, no control codes, no bars."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from davincirunsdk.columns import cut
from davincirunsdk.output.backlog import Gap

LINE_LIMIT = 1 << 16
"""Bytes of a line that are shown; of a longer one the rest is left out, and the line says so."""

_ROWS_KEPT = 16

_CONTROL_BYTES = tuple(bytes([code]) for code in (0, 5, 7, 8, 11, 12, 13, 14, 15, 27))
"""Control bytes that act on a terminal or make a text file binary; the others are harmless there."""
_C1_BYTES = re.compile(rb"\xc2[\x80-\x9f]")
_CONTROL = re.compile(r"[\x00\x05\x07\x08\x0a-\x0f\x1b\x80-\x9f]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RESETS = ("\x1b[0m", "\x1b[m")
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)
_MOVE = re.compile(r"\x1b\[([0-9]*)([ABEF])")


def is_plain(data: bytes) -> bool:
    """Tell whether bytes can go to a terminal as they are, but for their encoding.

    A search for each control byte is some twenty times as fast as one for their set.
    """
    return not any(control in data for control in _CONTROL_BYTES)


def is_plain_utf8(data: bytes) -> bool:
    """Tell whether bytes without control bytes are UTF-8 without control characters."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return _C1_BYTES.search(data) is None


def has_long_line(data: bytes) -> bool:
    """Tell whether a line in `data` is longer than `LINE_LIMIT`."""
    start = 0
    while len(data) - start > LINE_LIMIT:
        end = data.rfind(b"\n", start, start + LINE_LIMIT + 1)
        if end < 0:
            return True
        start = end + 1
    return False


def clean(text: str, *, colour: bool) -> str:
    """Take out everything that would act on a terminal.

    Args:
        text: One line.
        colour: Keep colours; one that is left open is closed at the end.
    """
    if _CONTROL.search(text) is None:
        return text
    coloured = ""

    def keep(match: re.Match[str]) -> str:
        nonlocal coloured
        if not colour or _COLOUR.fullmatch(match[0]) is None:
            return ""
        coloured = match[0]
        return coloured.replace("\x1b", "\ue000")

    text = _CONTROL.sub("", _SEQUENCE.sub(keep, text.replace("\ue000", "\ufffd")))
    text = text.replace("\ue000", "\x1b")
    return text + _RESETS[0] if coloured and coloured not in _RESETS else text


def without_colour(text: str) -> str:
    """Take the colours out of cleaned text."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def fit(text: str, width: int) -> str:
    """Cut cleaned text without colours to a number of terminal columns."""
    text = text.replace("\t", " ")
    if len(text) <= width and text.isascii():
        return text
    return cut(text, width)


def readable_size(size: int) -> str:
    """Write a number of bytes as people do, such as `1.2 MB`."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{size} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def left_out(lines: int, size: int, where: object) -> str:
    """Say what a display leaves out.

    Args:
        lines: How many lines end in it.
        size: Bytes of it.
        where: File or folder that has it.
    """
    counted = "part of a line" if lines == 0 else "1 line" if lines == 1 else f"{lines} lines"
    return f"... {counted} ({readable_size(size)}) left out of the display; all is in {where}"


@dataclass(slots=True)
class _Row:
    """A row that a worker writes again and again.

    Attributes:
        text: What it shows.
        new: This text was not shown as a line yet.
        live: It is a bar at this moment: neither ended by a newline nor cleared.
    """

    text: str
    new: bool = True
    live: bool = True


class RankText:
    """Lines and progress bars of one worker.

    A bar is text that the worker takes back: with a carriage return, or by moving the cursor up to a
    line that had already ended, as nested bars do. So this is a small terminal that only knows rows.

    Args:
        colour: Keep the worker's colours.
    """

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._pending = b""
        self._beyond = 0
        self._skipping = False
        self._skipped = 0
        self._rows: dict[int, _Row] = {}
        self._row = 0
        self._returned = False
        self._nested = False

    @property
    def between_lines(self) -> bool:
        """Nothing is unfinished: what comes next begins a line, and there is no bar."""
        return not (self._pending or self._beyond or self._returned or self._nested or self._skipping)

    @property
    def in_plain_line(self) -> bool:
        """The unfinished line is no bar."""
        return not (self._returned or self._nested)

    def skip(self, gap: Gap) -> Gap:
        """Let output be missing here.

        The lines that the gap tears at its two ends are of no use any more.

        Returns:
            The gap with those lines in it.
        """
        size = gap.size + len(self._pending) + self._beyond + self._skipped
        lines = gap.lines + gap.torn - self._skipping
        self._pending, self._beyond, self._returned = b"", 0, False
        self._skipping, self._skipped = gap.torn, 0
        return Gap(gap.rank, lines, size, gap.torn)

    def feed(self, data: bytes) -> list[str]:
        """Take output and return the lines that ended in it, cleaned."""
        lines: list[str] = []
        if self._skipping:
            rest, end, data = data.partition(b"\n")
            self._skipped += len(rest)
            if end:
                lines += self._end_skipping()
        *ended, rest = data.split(b"\n")
        for line in ended:
            self._take(line)
            lines += self._end_line()
        self._take(rest)
        return lines

    def finish(self, *, cleared: bool) -> list[str]:
        """Return what was not shown as a line yet: a last line without end, the bars' last state."""
        lines = self._end_skipping()
        if self._pending or self._returned:
            lines += self._end_line()
        return lines + self.new_states(cleared=cleared)

    def bars(self) -> list[str]:
        """Return what the worker's bars show now."""
        self._look_ahead()
        return [row.text for _, row in sorted(self._rows.items()) if row.live]

    def new_states(self, *, cleared: bool) -> list[str]:
        """Return the bars' states that no line has shown yet, and count them as shown.

        Args:
            cleared: Also of bars that the worker has taken away.
        """
        self._look_ahead()
        shown = [row for _, row in sorted(self._rows.items()) if row.new and (row.live or cleared)]
        for row in shown:
            row.new = False
        return [row.text for row in shown]

    @property
    def has_new_state(self) -> bool:
        """A bar's state waits to be shown as a line."""
        self._look_ahead()
        return any(row.new for row in self._rows.values())

    def _take(self, part: bytes) -> None:
        if b"\r" in part:
            moves = b"\x1b" in part
            first, *states, part = part.split(b"\r")
            for state in (first, *(states if moves else _last(states))):
                self._append(state)
                self._overwrite(self._unfinished())
                self._pending, self._beyond = b"", 0
            self._returned = True
        self._append(part)

    def _append(self, part: bytes) -> None:
        room = LINE_LIMIT - len(self._pending)
        if len(part) > room:
            self._beyond += len(part) - room
            part = part[:room]
        self._pending += part

    def _unfinished(self) -> str:
        if not self._beyond:
            return self._pending.decode(errors="replace")
        total = readable_size(len(self._pending) + self._beyond)
        return f"{_whole_characters(self._pending)} ... line of {total} cut here; the log file has all of it"

    def _end_skipping(self) -> list[str]:
        """Say how much was skipped after the gap, if it is more than the end of a usual line."""
        size, self._skipped, self._skipping = self._skipped, 0, False
        if size <= LINE_LIMIT:
            return []
        return [f"... {readable_size(size)} more of the line left out; the log file has all of it"]

    def _end_line(self) -> list[str]:
        text = self._unfinished()
        self._pending, self._beyond = b"", 0
        if not self._returned and not _MOVE.search(text) and (text or not self._nested):
            lines = [*self.new_states(cleared=False), clean(text, colour=self._colour)]
            self._rows.clear()
            self._row, self._nested = 0, False
            return lines
        self._overwrite(text)
        self._returned = False
        row = self._rows.get(self._row)
        self._row += 1
        lines = []
        for old in [number for number in self._rows if number < self._row - _ROWS_KEPT]:
            if (gone := self._rows.pop(old)).new:
                lines.append(gone.text)
        if self._nested:
            return lines
        if row is None:
            return [*lines, ""]
        if row.new and row.live:
            lines.append(row.text)
        row.new = row.live = False
        return lines

    def _look_ahead(self) -> None:
        """Show the bar's newest state although no carriage return has ended it yet."""
        if (self._returned or self._nested) and self._pending:
            text = _whole_characters(self._pending)
            if _MOVE.search(text) is None:
                self._set_row(text)

    def _overwrite(self, text: str) -> None:
        start = 0
        for move in _MOVE.finditer(text):
            self._set_row(text[start : move.start()])
            start = move.end()
            rows = int(move[1] or 1) * (1 if move[2] in "BE" else -1)
            self._row = max(0, self._row + rows)
            self._nested = True
        self._set_row(text[start:])

    def _set_row(self, text: str) -> None:
        shown = clean(text, colour=self._colour)
        row = self._rows.get(self._row)
        if without_colour(shown).strip():
            if row is None:
                self._rows[self._row] = _Row(shown)
            elif row.text != shown or not row.live:
                row.new = row.new or row.text != shown
                row.text, row.live = shown, True
        elif text and row is not None:
            row.live = False


def _last(states: list[bytes]) -> list[bytes]:
    """Leave the states that decide what a row shows: the last with text, and a clearing after it."""
    for index in range(len(states) - 1, -1, -1):
        if states[index].strip():
            return [states[index], *(state for state in states[index + 1 :] if state)][:2]
    return [state for state in states if state][:1]


def _whole_characters(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)
