"""The events file: one JSON object a line, readable while the job runs."""

from __future__ import annotations

import json
import math
import queue
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.types import signal_name

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from davincirunsdk.logs.file import LogFile
    from davincirunsdk.types import Event, Progress, Usage

SCHEMA = 1
"""Version of the lines' shape: a field may be added under the same number, none changes or goes.

`v` this number; `time` wall-clock seconds; `kind` as in `Event`, and `about` in the first line; `job`,
`node` names; and where they have a sense `rank` (-1 for an auxiliary process), `pid`, `exit_code`
(negative for a signal), `signal`, `detail`, `about` (who started the job, and what it runs), `progress`
(an object of `step total epoch epochs loss step_seconds eta values`), `usage` (`cpu memory output`, and
where npu-smi tells it `npu` with `npu use memory temperature`), `report` (with `finished`: the failure
report as data).
"""

_PROGRESS_LINES = 1000
"""A rank's progress is written again after this part of the time since its first: days fill no disk."""

EVENTS_PATIENCE = 2.0
"""Seconds that the last events may take on a stuck disk."""


class EventLog:
    """Writes events in a thread of its own, each as soon as it has happened.

    Args:
        file: The open file.
        job_id: Name of the job.
        node: Name of this node, where the events are from unless they say otherwise.
        about: What the first line says of the job; () for no such line.
    """

    def __init__(
        self, file: LogFile, job_id: str, node: str, about: Sequence[tuple[str, str | int]] = ()
    ) -> None:
        self._file = file
        self._about = dict(about)
        self._job_id = job_id
        self._node = node
        self._progress: dict[tuple[str, int | None], tuple[float, float]] = {}
        self._queue: queue.SimpleQueue[tuple[Event, str] | None] = queue.SimpleQueue()

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def start(self) -> asyncio.Future[None]:
        """Begin to write.

        Returns:
            A future that is done when the file is closed.
        """
        return in_thread(self._write)

    def put(self, event: Event, node: str = "") -> None:
        """Add an event; from any thread, never blocks.

        Args:
            event: What happened.
            node: Name of the node where it happened, "" for this one.
        """
        self._queue.put((event, node or self._node))

    def close(self) -> None:
        """Close the file after the events added so far."""
        self._queue.put(None)

    def _write(self) -> None:
        if self._about:
            self._write_line(time.time(), "about", self._node, {"about": self._about})
        while (item := self._queue.get()) is not None:
            event, node = item
            if (event.progress or event.usage) is not None and not self._is_due(event):
                continue
            about = {
                "rank": event.rank,
                "pid": event.pid,
                "exit_code": event.exit_code,
                "signal": signal_name(event.exit_code),
                "detail": event.detail or None,
                "progress": None if event.progress is None else _figures(event.progress),
                "usage": None if event.usage is None else _used(event.usage),
                "report": None if event.report is None else event.report.to_dict(),
            }
            self._write_line(event.time, event.kind, node, about)
        self._file.close()

    def _write_line(self, moment: float, kind: str, node: str, about: Mapping[str, object]) -> None:
        line: dict[str, object] = {
            "v": SCHEMA,
            "time": moment,
            "kind": kind,
            "job": self._job_id,
            "node": node,
        }
        line |= {name: value for name, value in about.items() if value is not None}
        # A name that is not UTF-8 has lone surrogates: in JSON, these are written as escapes.
        self._file.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")

    def _is_due(self, event: Event) -> bool:
        key = event.kind, event.rank
        first, last = self._progress.get(key, (event.time, 0.0))
        if event.time - last < (event.time - first) / _PROGRESS_LINES:
            return False
        self._progress[key] = first, event.time
        return True


def _used(usage: Usage) -> dict[str, object]:
    figures = asdict(usage)
    if usage.npu is None:
        del figures["npu"]
    return figures


def _figures(progress: Progress) -> dict[str, object]:
    names = ("step", "total", "epoch", "epochs", "loss", "step_seconds", "eta")
    figures: dict[str, object] = {name: _figure(getattr(progress, name)) for name in names}
    if progress.values:
        figures["values"] = {name: _figure(value) for name, value in progress.values}
    return {name: value for name, value in figures.items() if value is not None}


def _figure(value: float | None) -> float | str | None:
    """JSON knows neither nan nor inf."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
