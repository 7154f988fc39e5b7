"""The steps of all workers of one attempt on this node."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from davincirunsdk.script.progress import VARIABLE
from davincirunsdk.steps.channel import Channel, Slot
from davincirunsdk.steps.scan import StepScanner
from davincirunsdk.steps.shapes import parse_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.cluster import WorkerSpec
    from davincirunsdk.types import Progress

logger: logging.Logger = logging.getLogger("davincirunsdk")


class JobSteps:
    """Has a scanner for each worker, and gives workers the place where they may tell their steps.

    Args:
        specs: What is started; each worker's environment gets the variable of its place.
        pattern: The user's regular expression, None without one.
        tell: Takes rank and progress at most once a second and rank, from any thread.

    Attributes:
        scanners: One for each of `specs`, None for an auxiliary process.
    """

    def __init__(
        self, specs: Sequence[WorkerSpec], pattern: str | None, tell: Callable[[int, Progress], None]
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Channel | None = None
        try:
            self._channel = Channel(len(specs))
        except OSError as error:
            logger.debug("no memory to share with workers: %s", error)
        shape = None if pattern is None else parse_pattern(pattern)
        self.scanners: list[StepScanner | None] = []
        for place, spec in enumerate(specs):
            spec.env.pop(VARIABLE, None)
            if spec.auxiliary:
                self.scanners.append(None)
                continue
            slot = None
            if self._channel is not None:
                spec.env[VARIABLE] = self._channel.variable(place)
                slot = Slot(self._channel, place)
            self.scanners.append(StepScanner(partial(tell, spec.rank), slot, shape))

    def begin(self) -> None:
        """Listen to the workers; from the job's loop."""
        if self._channel is not None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._channel.bell, self._answer, self._channel)

    def end(self) -> None:
        """Close what is shared; the scanners keep what they know."""
        for scanner in self.scanners:
            if scanner is not None:
                scanner.announce(last=True)
        if self._channel is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._channel.bell)
            self._channel.close()
            self._channel = None

    def _answer(self, channel: Channel) -> None:
        channel.answer_bell()
        for scanner in self.scanners:
            if scanner is not None:
                scanner.announce()
