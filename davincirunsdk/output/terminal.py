"""Worker output on a text stream: a terminal, a pipe, a file, or an object with `write`."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import select
import stat
import sys
import termios
import time
from typing import TYPE_CHECKING, Protocol

from davincirunsdk.output.backlog import Gap
from davincirunsdk.output.base import DisplayGoneError, ThreadedSink, log_path_of
from davincirunsdk.output.text import (
    RankText,
    fit,
    has_long_line,
    is_plain,
    is_plain_utf8,
    left_out,
    without_colour,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.output.labels import Labels
    from davincirunsdk.output.types import Snapshot
    from davincirunsdk.types import LogBlock

_PIECE_BYTES = 1 << 14
"""Largest write to a pipe or a terminal: a slow reader must show as slow, not as stuck."""
_BAR_REDRAW = 0.2
"""Seconds between two pictures of the progress bars on a terminal."""
_BAR_LINE = 1.0
"""Seconds between two lines about the same rank's progress bars elsewhere."""


class Writable(Protocol):
    """All that a stream must have."""

    def write(self, text: str, /) -> object:
        """Write text."""


class Outlet:
    """Writes bytes to a text stream in its own encoding, past its buffers where it has a descriptor.

    Args:
        stream: Where to. Asked for nothing but `write` if it has no descriptor.
        on_progress: Called after each write that came back.

    Attributes:
        fd: The stream's descriptor, None where it must be written to as text.
        encoding: What to write in.
        redraws: It is a terminal on which rows can be written again.
    """

    def __init__(self, stream: Writable, on_progress: Callable[[], None]) -> None:
        self._stream = stream
        self._on_progress = on_progress
        self.fd: int | None = _descriptor(stream)
        self.encoding: str = _encoding(stream)
        self.redraws: bool = redraws(stream)
        self._piece = _PIECE_BYTES
        self._rest: memoryview = memoryview(b"")
        mode = os.fstat(self.fd).st_mode if self.fd is not None else 0
        self._is_pipe = stat.S_ISFIFO(mode)
        if stat.S_ISREG(mode):
            self._piece = 1 << 30
        elif self._is_pipe:
            # Such a write is whole or not at all, whenever we have to leave.
            self._piece = select.PIPE_BUF

    def encode(self, text: str) -> bytes:
        """Encode text; what the encoding does not have is escaped."""
        return text.encode(self.encoding, "backslashreplace")

    def flush(self) -> None:
        """Write out what others have left in the stream's buffers, to keep the order.

        Raises:
            DisplayGoneError: The stream is closed or broken.
        """
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            self._attempt(flush)

    def write(self, data: bytes) -> None:
        """Write all of `data`, as long as that takes.

        Raises:
            DisplayGoneError: The stream is closed or broken.
        """
        if self.fd is None:
            text = data.decode(self.encoding)
            self._attempt(lambda: self._stream.write(text))
            self.flush()
            return
        self._rest = memoryview(data)
        while self._rest:
            try:
                self._rest = self._rest[os.write(self.fd, self._next_piece()) :]
            except BlockingIOError:
                # Another program has made the shared terminal non-blocking.
                poll = select.poll()
                poll.register(self.fd, select.POLLOUT)
                poll.poll()
            except OSError as error:
                raise DisplayGoneError from error
            self._on_progress()

    def queued(self) -> int:
        """Bytes that the reader has not taken yet, as far as that can be known."""
        if self.fd is None or not (self._is_pipe or self.redraws):
            return 0
        number = bytearray(4)
        try:
            fcntl.ioctl(self.fd, termios.FIONREAD if self._is_pipe else termios.TIOCOUTQ, number)
        except OSError:
            return 0
        return int.from_bytes(number, sys.byteorder)

    def unwritten_lines(self) -> int:
        """Lines that are still to be written."""
        return bytes(self._rest).count(b"\n")

    def _next_piece(self) -> memoryview:
        """Take as much as is written at once, up to the end of a line where one is in it."""
        if len(self._rest) <= self._piece:
            return self._rest
        cut = bytes(self._rest[: self._piece]).rfind(b"\n") + 1 if self._is_pipe else 0
        return self._rest[: cut or self._piece]

    def width(self) -> int:
        """Return the terminal's number of columns."""
        return self._size().columns or 80

    def height(self) -> int:
        """Return the terminal's number of rows."""
        return self._size().lines or 24

    def _size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self.fd if self.fd is not None else -1)
        except OSError:
            return os.terminal_size((0, 0))

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # a stranger's object may raise anything; none of it is the job's concern
            raise DisplayGoneError from error
        self._on_progress()


def redraws(stream: Writable) -> bool:
    """Tell whether a stream is a terminal on which rows can be written again."""
    fd = _descriptor(stream)
    return fd is not None and os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"


def _descriptor(stream: Writable) -> int | None:
    """Find the descriptor behind a stream that does nothing to text but encode it."""
    buffer = getattr(stream, "buffer", None) if isinstance(stream, io.TextIOWrapper) else None
    raw = buffer.raw if isinstance(buffer, (io.BufferedWriter, io.BufferedRandom)) else buffer
    if not isinstance(raw, io.FileIO) or not _extends_ascii(stream):
        return None
    try:
        return raw.fileno()
    except (OSError, ValueError):
        return None


def _encoding(stream: Writable) -> str:
    """Name the encoding to render in: the stream's, or UTF-8 where the stream takes any text."""
    encoding = getattr(stream, "encoding", None)
    return codecs.lookup(encoding).name if isinstance(encoding, str) and _extends_ascii(stream) else "utf-8"


def _extends_ascii(stream: Writable) -> bool:
    encoding = getattr(stream, "encoding", None)
    try:
        return isinstance(encoding, str) and "a\n".encode(encoding) == b"a\n"
    except LookupError:
        return False


class TerminalSink(ThreadedSink):
    """Shows whole lines, each with its rank in front.

    On a terminal the progress bars stand below the lines, a row per bar, redrawn a few times per
    second. The cursor rests on an empty row above them, so that what others write there (the
    launcher's own words, `^C`) stays whole. Elsewhere a bar's state is a line about once per second.
    In both, its last state is a line.

    Args:
        stream: Where to.
        labels: What stands before each line.
        colour: Keep the workers' colours.
        echo: Ranks to show, None for all.
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
        super().__init__(echo=echo, snapshot=snapshot)
        self.outlet: Outlet = Outlet(stream, self._moved)
        self._labels = labels
        self._colour = colour
        self._texts: dict[int, RankText] = {}
        self._utf8 = self.outlet.encoding == "utf-8"
        self._footer_shown = False
        self._footer_time = 0.0
        self._bar_lines: dict[int, float] = {}
        self._flushed = False

    def show(self, output: list[LogBlock | Gap]) -> float | None:
        """Show output; see `ThreadedSink`."""
        pieces = self.render(output)
        if self.outlet.redraws:
            return self._draw(pieces)
        pause = self._render_bars(pieces)
        self._write(pieces)
        return pause

    def queued(self) -> int:
        """See `ThreadedSink`."""
        return self.outlet.queued()

    def unwritten_lines(self) -> int:
        """See `ThreadedSink`."""
        return self.outlet.unwritten_lines()

    def finish(self) -> None:
        """Show last lines without end and the last state of progress bars."""
        pieces = self.render_last()
        if self._footer_shown:
            pieces.insert(0, b"\r\x1b[J")
        self._write(pieces)

    def render(self, output: list[LogBlock | Gap]) -> list[bytes | memoryview]:
        """Return output as whole lines, in the stream's encoding."""
        if not self._flushed:
            self._flushed = True
            self.outlet.flush()
        pieces: list[bytes | memoryview] = []
        for item in output:
            if isinstance(item, Gap):
                self._render_gap(item, pieces)
            else:
                self._render(item, pieces)
        return pieces

    def render_last(self) -> list[bytes | memoryview]:
        """Return last lines without end and the last state of progress bars."""
        pieces: list[bytes | memoryview] = []
        for rank, text in sorted(self._texts.items()):
            self._render_lines(rank, text.finish(cleared=not self.outlet.redraws), time.time(), pieces)
        return pieces

    def footer(self) -> list[str]:
        """Return the rows that stand below the lines on a terminal."""
        now = time.time()
        rows = [
            self._labels.prefix(rank, now) + without_colour(bar)
            for rank, text in sorted(self._texts.items())
            for bar in text.bars()
        ]
        room = max(1, self.outlet.height() // 2)
        if len(rows) > room:
            rows[room - 1 :] = [f"... {len(rows) - room + 1} more progress bars"]
        return rows

    def _moved(self) -> None:
        self.note_progress()
        if self.given_up:
            raise DisplayGoneError

    def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        if pieces:
            self.outlet.write(b"".join(pieces))

    def _text(self, rank: int) -> RankText:
        text = self._texts.get(rank)
        if text is None:
            text = self._texts[rank] = RankText(colour=self._colour)
        return text

    def _render(self, block: LogBlock, pieces: list[bytes | memoryview]) -> None:
        text, data = self._text(block.rank), block.data
        if not text.between_lines and text.in_plain_line and b"\r" not in data:
            head, end, data = data.partition(b"\n")
            self._render_lines(block.rank, text.feed(head + end), block.time, pieces)
        if not data:
            return
        cut = data.rfind(b"\n") + 1
        if cut and text.between_lines and self._passes(data, cut):
            prefix = self.outlet.encode(self._labels.prefix(block.rank, block.time))
            lines = data if cut == len(data) else data[:cut]
            marked = lines.replace(b"\n", b"\n" + prefix)
            pieces.append(prefix)
            pieces.append(memoryview(marked)[: len(marked) - len(prefix)])
            data = data[cut:]
        if data:
            self._render_lines(block.rank, text.feed(data), block.time, pieces)

    def _passes(self, data: bytes, cut: int) -> bool:
        """Tell whether the lines can be shown as they are, without a look at each of them."""
        if not is_plain(data) or has_long_line(data):
            return False
        return data.isascii() or (self._utf8 and is_plain_utf8(data[:cut]))

    def _render_lines(
        self, rank: int, lines: list[str], moment: float, pieces: list[bytes | memoryview]
    ) -> None:
        if lines:
            prefix = self._labels.prefix(rank, moment)
            pieces.append(self.outlet.encode("".join(f"{prefix}{line}\n" for line in lines)))

    def _render_gap(self, gap: Gap, pieces: list[bytes | memoryview]) -> None:
        gap = self._text(gap.rank).skip(gap)
        notice = left_out(gap.lines, gap.size, log_path_of(gap.rank, self.snapshot()))
        self._render_lines(gap.rank, [notice], time.time(), pieces)

    def _render_bars(self, pieces: list[bytes | memoryview]) -> float | None:
        """Show the state of progress bars as lines, and return when the next may come."""
        pause: float | None = None
        now = time.monotonic()
        for rank, text in self._texts.items():
            if text.between_lines and rank not in self._bar_lines:
                continue
            wait = self._bar_lines.get(rank, now) - now
            if text.has_new_state and wait <= 0:
                self._bar_lines[rank] = now + _BAR_LINE
                self._render_lines(rank, text.new_states(cleared=True), time.time(), pieces)
            elif text.has_new_state:
                pause = wait if pause is None else min(pause, wait)
        return pause

    def _draw(self, pieces: list[bytes | memoryview]) -> float | None:
        """Write lines, the footer below them, and return when the footer may be drawn again."""
        rows = self.footer()
        if not rows and not self._footer_shown:
            self._write(pieces)
            return None
        wait = self._footer_time + _BAR_REDRAW - time.monotonic()
        if not pieces and wait > 0:
            return wait
        if self._footer_shown:
            pieces.insert(0, b"\r\x1b[J")
        if rows:
            width = self.outlet.width() - 1
            below = "".join(f"\n{fit_row(row, width)}" for row in rows)
            pieces.append(self.outlet.encode(f"{below}\x1b[{len(rows)}A\r"))
        self._footer_shown = bool(rows)
        self._footer_time = time.monotonic()
        self._write(pieces)
        return None


def fit_row(row: str, width: int) -> str:
    """Cut a row to the terminal's width; the colours of its label are kept if there is room for it."""
    plain = without_colour(row)
    fitted = fit(plain, width)
    if fitted == plain:
        return row
    label, reset, rest = row.partition("\x1b[0m")
    used = len(without_colour(label))
    return label + reset + fit(rest, width - used) if reset and used < width else fitted
