"""What leaves a job: output, events, the events file, the display; opened and ended once for every kind."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import call_in_loop, in_thread_or_here
from davincirunsdk.logs.events_file import EVENTS_PATIENCE
from davincirunsdk.logs.streams import Feed, LogHub, Readers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from davincirunsdk.concurrency import Patience
    from davincirunsdk.logs.events_file import EventLog
    from davincirunsdk.logs.streams import BlockStream
    from davincirunsdk.options import Display
    from davincirunsdk.output import Sink, Snapshot
    from davincirunsdk.types import Event

logger: logging.Logger = logging.getLogger("davincirunsdk")

_STREAM_BYTES = 4 << 20
"""What a stream holds for a slow reader."""

_DISPLAY_PATIENCE = 5.0
"""Seconds without progress after which a stuck display is given up at the end of a job."""


class Channels:
    """The ways out of one job. Events may come from any thread.

    Args:
        on_event: Called with every event, in the job's loop; what it raises is logged.

    Attributes:
        hub: Takes the workers' output.
        events_path: The events file, None while there is none.

    Raises:
        TypeError: `on_event` is not a function, or a coroutine function.
    """

    def __init__(self, on_event: Callable[[Event], object] | None = None) -> None:
        given: object = on_event
        if given is not None and (not callable(given) or inspect.iscoroutinefunction(given)):
            raise TypeError(f"on_event is {on_event!r}: expected a plain function that takes an Event")
        self.hub: LogHub = LogHub(None)
        self.events_path: Path | None = None
        self._on_event = on_event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: Sink | None = None
        self._log: EventLog | None = None
        self._log_written: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._events: dict[int, Event] = {}
        self._last_progress: dict[int | None, int] = {}
        self._count = 0
        self._feeds: Readers[Feed[Event]] = Readers()
        self._ended = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the loop in which `on_event` is to be called."""
        self._loop = loop

    def emit(self, event: Event, node: str = "") -> None:
        """Hand an event to all that read events.

        Args:
            event: What happened.
            node: Name of the node where it happened, "" for this one.
        """
        with self._lock:
            self._count += 1
            self._events[self._count] = event
            if event.progress is not None:
                # Who comes late needs the last one only, and days of them would fill the memory.
                self._events.pop(self._last_progress.get(event.rank, 0), None)
                self._last_progress[event.rank] = self._count
            for feed in self._feeds:
                feed.offer(event)
            if self._log is not None:
                self._log.put(event, node)
        if self._on_event is not None and self._loop is not None:
            call_in_loop(self._loop, self._call_back, event)

    def events(self) -> Feed[Event]:
        """Open a stream of the events, from the first one on."""
        feed: Feed[Event] = Feed()
        with self._lock:
            for event in self._events.values():
                feed.offer(event)
            if self._ended:
                feed.close()
            else:
                self._feeds.add(feed)
        return feed

    def blocks(self, ranks: Iterable[int] | None) -> BlockStream:
        """Open a stream of output, of these ranks or of all."""
        return self.hub.subscribe(None if ranks is None else frozenset(ranks), _STREAM_BYTES)

    def open_display(
        self, display: Display, names: Mapping[int, str], snapshot: Callable[[], Snapshot]
    ) -> None:
        """Begin to show output, if that is asked for; in the context of whoever starts the job.

        Args:
            display: What is to be shown, and how.
            names: Name of each rank, such as `rank 3`.
            snapshot: Tells how the job stands; called in another thread.
        """
        if not display.on_stream and not display.output_notebook:
            return
        from davincirunsdk.output import choose_sink, parse_prefix

        self._sink = choose_sink(
            names=names,
            snapshot=snapshot,
            echo=display.ranks if display.on_stream else None,
            output_notebook=display.output_notebook,
            stream=sys.stdout if display.on_stream else None,
            live=display.live,
            prefix=parse_prefix(display.prefix),
            colour=display.color,
        )
        if self._sink is not None:
            self.hub.show = self._sink.write

    def attach_display(self) -> None:
        """Move a notebook's display to the calling cell."""
        attach = getattr(self._sink, "attach", None)
        if attach is not None:
            attach()

    def open_event_log(self, log: EventLog) -> None:
        """Begin to write the events file."""
        with self._lock:
            self._log = log
            for event in self._events.values():
                log.put(event)
        self.events_path = log.path
        self._log_written = log.start()

    async def close(self, waits: Patience) -> None:
        """Let display, events file and readers come to their ends, each within a bound."""
        if self._sink is not None:
            await waits.wait(in_thread_or_here(self._sink.close, _DISPLAY_PATIENCE))
        if self._log is not None and self._log_written is not None:
            self._log.close()
            await waits.within(EVENTS_PATIENCE, self._log_written)
        self.end_readers()

    def discard(self) -> None:
        """End all at once: the job was not started."""
        if self._sink is not None:
            self._sink.close(0.0)
        if self._log is not None:
            self._log.close()
        self.end_readers()

    def end_readers(self) -> None:
        """End all streams after what they hold."""
        self.hub.close()
        with self._lock:
            self._ended = True
            for feed in self._feeds:
                feed.close()

    def _call_back(self, event: Event) -> None:
        assert self._on_event is not None
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event failed at an event of kind %r; the job goes on", event.kind)
