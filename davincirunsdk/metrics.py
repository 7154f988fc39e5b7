"""Figures of a running job in OpenMetrics text, for the text-file collector of a node exporter."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.documents import write_whole
from davincirunsdk.types import JobState, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from davincirunsdk.concurrency import Patience
    from davincirunsdk.types import WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

STEP = 10.0
"""Seconds between two states of the file: scrapers look every 15 s or so."""


class MetricsFile:
    """A job's figures in a file, kept up to date from its start until `end`.

    Args:
        path: The file.
        draw: Gives the whole text.
        started: Done when the workers run: what is written stays for a while.
    """

    def __init__(self, path: Path, draw: Callable[[], str], started: asyncio.Future[None]) -> None:
        self._path = path
        self._draw = draw
        self._started = started
        self._keeping: asyncio.Task[None] = asyncio.ensure_future(self._keep())

    async def end(self, waits: Patience) -> None:
        """Write the last state.

        Args:
            waits: Of the job.
        """
        self._keeping.cancel()
        await waits.until_any(self._keeping)
        await waits.wait(asyncio.ensure_future(self._write()))

    async def _keep(self) -> None:
        await asyncio.wait({self._started})
        while True:
            await self._write()
            await asyncio.sleep(STEP)

    async def _write(self) -> None:
        try:
            await in_thread(write_whole, self._path, self._draw())
        except OSError as error:
            logger.warning("the metrics cannot be written: %s", error)


def openmetrics(job_id: str, state: JobState, workers: Sequence[WorkerStatus], restarts: int) -> str:
    """Write a job's figures.

    Args:
        job_id: Its name, a label of every figure.
        state: Where it stands.
        workers: Its workers on this node.
        restarts: How often it was started again.

    Returns:
        The whole text, which ends with `# EOF`.
    """
    label = f'job="{_escaped(job_id)}"'
    lines: list[str] = []
    _add(lines, "state", "1 for the state that the job is in.", [
        (f'{label},state="{one.value.lower()}"', float(one is state)) for one in JobState
    ])  # fmt: skip
    alive = sum(worker.state in (WorkerState.RUNNING, WorkerState.STOPPING) for worker in workers)
    _add(lines, "ranks_alive", "Ranks of this node that run.", [(label, alive)])
    _add(lines, "restarts", "Times that the whole job was started again.", [(label, restarts)])
    now = time.time()
    figures: dict[str, tuple[str, list[tuple[str, float]]]] = {
        "step": ("Steps of a rank so far.", []),
        "loss": ("Last loss of a rank.", []),
        "output_age_seconds": ("Seconds since a rank's last output.", []),
    }
    for worker in workers:
        rank = f'{label},rank="{worker.rank}"'
        for name, value in _of(worker, now):
            figures[name][1].append((rank, value))
    for name, (text, values) in figures.items():
        if values:
            _add(lines, name, text, values)
    return "\n".join([*lines, "# EOF"]) + "\n"


def _of(worker: WorkerStatus, now: float) -> Iterator[tuple[str, float]]:
    if worker.progress is not None:
        yield "step", worker.progress.step
        if worker.progress.loss is not None:
            yield "loss", worker.progress.loss
    if worker.last_output is not None:
        yield "output_age_seconds", max(0.0, now - worker.last_output)


def _add(lines: list[str], name: str, text: str, values: Sequence[tuple[str, float]]) -> None:
    lines.append(f"# TYPE davincirun_{name} gauge")
    lines.append(f"# HELP davincirun_{name} {text}")
    lines += [f"davincirun_{name}{{{labels}}} {_number(value)}" for labels, value in values]


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:g}" if abs(value) < 1e6 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
