"""Where worker output goes besides the log file: readers of lines and blocks, each with its own bound."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from davincirunsdk.concurrency import call_in_loop, resolve
from davincirunsdk.logs.spare import Spare
from davincirunsdk.types import LogBlock, LogLine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

_LINE_BYTES = 1 << 16
"""A longer line is handed on in pieces; the log file is not touched by that."""
_HISTORY_BYTES = 1 << 20
"""What a reader gets that comes late, for the whole job."""
BLOCK_COST = 256
"""Bytes that a block needs beside its data; without it, millions of tiny blocks would fit."""
_JOINED_BYTES = 1 << 12
_JOINED_SECONDS = 0.05
"""Blocks up to this size that come within this time are held as one."""
_CUT_BYTES = 1 << 12
"""What is cut into lines in one go."""
_READER_SLICE = 0.005
"""Seconds after which a reader that has lines enough lets the loop run."""

T = TypeVar("T")


class LineCutter:
    """Turns pieces of one worker's output into pieces of whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece and return the whole lines there are, which may be none.

        A carriage return ends a piece too where no line end came: it is a progress bar.
        """
        if self._rest:
            data = self._rest + data
        cut = data.rfind(b"\n") + 1
        if not cut:
            # Not the last byte: that may be the first half of "\r\n".
            cut = data.rfind(b"\r", 0, len(data) - 1) + 1
        if len(data) - cut > _LINE_BYTES:
            cut = whole_characters(data)
        self._rest = data[cut:]
        return data[:cut] if self._rest else data

    def rest(self) -> bytes:
        """Return what is left: a last line without its end."""
        rest, self._rest = self._rest, b""
        return rest


def whole_characters(data: bytes) -> int:
    """Length of `data` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if needed > back else len(data)
    return len(data)


class Feed(Generic[T]):
    """Items that any thread offers and tasks of any loop read, each item by one of them.

    `async with` closes it; one that nobody holds any more is forgotten. The loop gets to run between
    two items, however many are there: a reader may do nothing else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[T] = deque()
        self._closed = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._awaited: set[Feed[Any]] | None = None

    def offer(self, item: T) -> None:
        """Add an item; never blocks."""
        with self._lock:
            if not self._closed:
                self._items.append(item)
                self._wake()

    def close(self) -> None:
        """End the feed after the items it holds."""
        with self._lock:
            self._closed = True
            self._wake()

    async def aclose(self) -> None:
        """Stop reading: nothing collects here any longer."""
        self.close()
        with self._lock:
            self._forget_items()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _forget_items(self) -> None:
        self._items.clear()

    def _wake(self) -> None:
        for loop, future in self._waiters:
            call_in_loop(loop, resolve, future, None)
        self._waiters.clear()

    def _take(self) -> T:
        return self._items.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next item; cancelling loses none."""
        import asyncio

        if self._items:
            await asyncio.sleep(0)
        while True:
            with self._lock:
                if self._items:
                    return self._take()
                if self._closed:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                waiter = loop, loop.create_future()
                self._waiters.append(waiter)
                if self._awaited is not None:
                    self._awaited.add(self)
            try:
                await waiter[1]
            finally:
                with self._lock:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    if self._awaited is not None and not self._waiters:
                        self._awaited.discard(self)


F = TypeVar("F", bound=Feed[Any])


class Readers(Generic[F]):
    """The feeds of one source, each as long as somebody holds it or waits for its next item.

    What waits for a feed is held by nothing but that feed, so one that is waited for is held here.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[F]] = []
        self._awaited: set[Feed[Any]] = set()

    def add(self, feed: F) -> None:
        """Begin to know a feed."""
        feed._awaited = self._awaited
        # A new list each time: a thread may go through the old one.
        self._known = [known for known in self._known if known() is not None] + [weakref.ref(feed)]

    def remove(self, feed: F) -> None:
        """Forget a feed, whether known or not."""
        self._known = [known for known in self._known if known() not in (None, feed)]

    def __bool__(self) -> bool:
        return any(known() is not None for known in self._known)

    def __iter__(self) -> Iterator[F]:
        return (feed for known in self._known if (feed := known()) is not None)


class BlockStream(Feed[LogBlock]):
    """Output as blocks of bytes; what a slow reader has no room for is left out and counted.

    Args:
        ranks: Which ranks, None for all.
        bound: Bytes of memory that it may hold.
        on_close: Called when it is closed.

    Attributes:
        dropped: Bytes left out so far.
        follows_gap: True when bytes of its rank are missing before the block taken last.
    """

    def __init__(
        self, ranks: frozenset[int] | None, bound: int, on_close: Callable[[BlockStream], None]
    ) -> None:
        super().__init__()
        self.dropped: int = 0
        self._ranks = ranks
        self._bound = bound
        self._held = 0
        self._on_close = on_close
        self._gaps: set[int] = set()
        self._after_gap: set[int] = set()
        self.follows_gap: bool = False

    def offer(self, item: LogBlock) -> None:
        """Add a block if there is room."""
        if self._ranks is not None and item.rank not in self._ranks:
            return
        with self._lock:
            if self._closed:
                return
            if self._held + _cost(item) > self._bound and self._items:
                self.dropped += len(item.data)
                self._gaps.add(item.rank)
                return
            if item.rank in self._gaps:
                self._gaps.discard(item.rank)
                self._after_gap.add(id(item))
            elif self._items and not (self._after_gap and id(self._items[-1]) in self._after_gap):
                if (joined := _join(self._items[-1], item)) is not None:
                    self._items[-1] = joined
                    self._held += len(item.data)
                    return
            self._items.append(item)
            self._held += _cost(item)
            self._wake()

    def skip(self, rank: int, size: int) -> None:
        """Count bytes of a rank that came before anybody read and are not kept."""
        with self._lock:
            if self._ranks is None or rank in self._ranks:
                self.dropped += size
                self._gaps.add(rank)

    def _take(self) -> LogBlock:
        block = super()._take()
        self._held -= _cost(block)
        self.follows_gap = bool(self._after_gap) and id(block) in self._after_gap
        if self.follows_gap:
            self._after_gap.discard(id(block))
        return block

    def _forget_items(self) -> None:
        super()._forget_items()
        self._held = 0
        self._after_gap.clear()

    def close(self) -> None:
        """End the stream after the blocks it holds."""
        super().close()
        self._on_close(self)


def _cost(block: LogBlock) -> int:
    return len(block.data) + BLOCK_COST


def _join(earlier: LogBlock, later: LogBlock) -> LogBlock | None:
    """Make one of two small blocks of a rank that came together, None of others."""
    size = len(earlier.data) + len(later.data)
    if earlier.rank != later.rank or size > _JOINED_BYTES or later.time - earlier.time > _JOINED_SECONDS:
        return None
    return LogBlock(rank=earlier.rank, data=earlier.data + later.data, time=earlier.time)


class LineStream:
    """Output as lines, in order per rank.

    `async with` closes it; one that nobody holds any more is forgotten. The loop gets to run at every
    block and every few milliseconds, however many lines are there.
    """

    def __init__(self, blocks: BlockStream) -> None:
        self._blocks = blocks
        self._cutters: dict[int, LineCutter] = {}
        self._lines: deque[LogLine] = deque()
        self._uncut: deque[tuple[int, bytes, float]] = deque()
        self._paused = time.monotonic()

    @property
    def dropped(self) -> int:
        """Bytes left out so far because they were not read in time."""
        return self._blocks.dropped

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> LogLine:
        """Wait for the next line; cancelling loses none."""
        import asyncio

        if time.monotonic() - self._paused > _READER_SLICE:
            await asyncio.sleep(0)
            self._paused = time.monotonic()
        while not self._lines:
            if self._uncut:
                self._cut_some()
                continue
            try:
                block = await self._blocks.__anext__()
            except StopAsyncIteration:
                self._finish()
                if not self._uncut:
                    raise
                continue
            self._paused = time.monotonic()
            cutter = self._cutters.setdefault(block.rank, LineCutter())
            if self._blocks.follows_gap:
                self._add(block.rank, cutter.rest(), block.time)
            self._add(block.rank, cutter.feed(block.data), block.time)
        return self._lines.popleft()

    async def aclose(self) -> None:
        """Stop reading: the job's output no longer collects here."""
        await self._blocks.aclose()
        self._lines.clear()
        self._uncut.clear()

    def _finish(self) -> None:
        for rank, cutter in self._cutters.items():
            self._add(rank, cutter.rest(), time.time())

    def _add(self, rank: int, data: bytes, moment: float) -> None:
        if data:
            self._uncut.append((rank, data, moment))

    def _cut_some(self) -> None:
        """Cut the next lines: not all of a large block at once, which would hold the loop."""
        rank, data, moment = self._uncut.popleft()
        end = _cut_place(data)
        if end < len(data):
            self._uncut.appendleft((rank, data[end:], moment))
        whole = end == len(data) or data[end - 1 : end] == b"\n"
        for line in data[:end].removesuffix(b"\n").split(b"\n"):
            # A progress bar writes many states into one line; each is a line here.
            states = [state for state in line.split(b"\r") if state]
            for state in states or ([b""] if whole else []):
                self._lines.append(LogLine(rank=rank, text=state.decode(errors="replace"), time=moment))


def _cut_place(data: bytes) -> int:
    """Find where the next lines, or states of a progress bar, end; all of `data` if it is short."""
    if len(data) <= _CUT_BYTES:
        return len(data)
    if cut := data.rfind(b"\n", 0, _CUT_BYTES) + 1:
        return cut
    # Not between "\r" and "\n", which are one line end.
    cut = data.rfind(b"\r", 0, _CUT_BYTES) + 1
    if cut and data[cut : cut + 1] != b"\n":
        return cut
    return data.find(b"\n", _CUT_BYTES) + 1 or len(data)


class LogHub:
    """Where the pumps of a job hand on what they carry.

    Args:
        show: Takes every block for the display, from any pump's thread; must not block.

    Attributes:
        spare: The job's memory for output that a disk does not take.
    """

    def __init__(self, show: Callable[[LogBlock], None] | None) -> None:
        self.show = show
        self.spare: Spare = Spare()
        self._lock = threading.Lock()
        self._streams: Readers[BlockStream] = Readers()
        self._history: deque[LogBlock] = deque()
        self._history_bytes = 0
        self._forgotten = 0
        self._closed = False

    @property
    def watched(self) -> bool:
        """True while somebody takes what is published."""
        return self.show is not None or bool(self._streams)

    def skip(self, rank: int, size: int) -> None:
        """Tell that `size` bytes of a rank went by unseen, while nobody watched."""
        with self._lock:
            kept = [block for block in self._history if block.rank != rank]
            gone = sum(len(block.data) for block in self._history if block.rank == rank)
            self._forgotten += gone + size
            self._history, self._history_bytes = deque(kept), sum(map(_cost, kept))
            # Of one who came in this moment.
            streams = tuple(self._streams)
        for stream in streams:
            stream.skip(rank, size)

    def publish(self, block: LogBlock) -> None:
        """Hand a block to every reader; never blocks."""
        with self._lock:
            self._remember(block)
            streams = tuple(self._streams)
        if self.show is not None:
            self.show(block)
        for stream in streams:
            stream.offer(block)

    def _remember(self, block: LogBlock) -> None:
        joined = _join(self._history[-1], block) if self._history else None
        if joined is not None:
            self._history[-1] = joined
            self._history_bytes += len(block.data)
        else:
            self._history.append(block)
            self._history_bytes += _cost(block)
        while self._history_bytes > _HISTORY_BYTES and len(self._history) > 1:
            forgotten = self._history.popleft()
            self._history_bytes -= _cost(forgotten)
            self._forgotten += len(forgotten.data)

    def subscribe(self, ranks: frozenset[int] | None, bound: int) -> BlockStream:
        """Open a stream that begins with the last output before now.

        Args:
            ranks: Which ranks, None for all.
            bound: Bytes it may hold for a slow reader.
        """
        stream = BlockStream(ranks, bound, self._unsubscribe)
        with self._lock:
            stream.dropped = self._forgotten if ranks is None else 0
            for block in self._history:
                stream.offer(block)
            self._streams.add(stream)
            closed = self._closed
        if closed:
            stream.close()
        return stream

    def _unsubscribe(self, stream: BlockStream) -> None:
        with self._lock:
            self._streams.remove(stream)

    def close(self) -> None:
        """End all streams: the job is over."""
        with self._lock:
            self._closed = True
            streams = tuple(self._streams)
        for stream in streams:
            stream.close()
