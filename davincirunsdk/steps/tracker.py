"""From what single lines say to how far one worker's training is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.types import Progress

if TYPE_CHECKING:
    from davincirunsdk.steps.shapes import Reading

SCRIPT = "script"
"""Shape of what a script says itself."""

_SMOOTHING = 0.3
"""Weight of the newest measurement of the time per step."""
_AGAIN = 0.1
"""Part of its earlier steps up to which a counter that went back has begun anew."""
_OTHER_BAR_AFTER = 60.0
"""Seconds without the full bar after which a shorter one is what goes on; before, it may be an evaluation."""
_NEAR = 2
"""Steps by which two counters of the same steps may differ."""


@dataclass(slots=True)
class _Counter:
    """One thing that counts: a bar, or a framework's lines."""

    shape: str
    label: str
    trust: int
    total: int | None
    step: int = 0
    before: int = 0
    """Steps of earlier epochs or rounds."""
    rounds: int = 1
    epoch: int | None = None
    epochs: int | None = None
    first_epoch: int | None = None
    moved: float = 0.0

    def is_of(self, reading: Reading) -> bool:
        """Tell whether a reading is this counter's; a bar of another length is another bar."""
        return (self.shape, self.label) == (reading.shape, reading.label) and (
            reading.trust > 1 or reading.total is None or self.total is None or reading.total == self.total
        )

    @property
    def full(self) -> bool:
        return self.total is not None and self.step >= self.total

    def take(self, reading: Reading) -> bool:
        """Follow a reading of its own; False where that is another one's that looks alike."""
        step = reading.step or 0
        total = reading.total if reading.total is not None else self.total
        if reading.epoch is not None and not reading.absolute:
            self._take_epoch(reading, reading.epoch, total)
        elif step < self.step and not reading.absolute:
            if step > max(1.0, _AGAIN * self.step):
                return False
            # Begun anew without saying which epoch it is.
            self.before += self.step
            self.rounds += 1
        self.step, self.total = step, total
        return True

    def _take_epoch(self, reading: Reading, epoch: int, total: int | None) -> None:
        if self.first_epoch is None or reading.first_epoch is not None:
            self.first_epoch = min(1, epoch) if reading.first_epoch is None else reading.first_epoch
        self.first_epoch = min(self.first_epoch, epoch)
        if total is not None:
            self.before = (epoch - self.first_epoch) * total
        elif self.epoch is not None and epoch > self.epoch:
            self.before += self.step
        self.epoch = epoch
        self.epochs = reading.epochs if reading.epochs is not None else self.epochs


class Tracker:
    """Follows the readings of one worker."""

    def __init__(self) -> None:
        self._main: _Counter | None = None
        self._epoch: Reading | None = None
        self._loss: float | None = None
        self._step_seconds: float | None = None
        self._given_step_seconds = False
        self._eta: tuple[float, float] | None = None
        self._values: tuple[tuple[str, float], ...] = ()
        self._stride = 1
        self._helper_total: int | None = None
        self.progress: Progress | None = None

    def take(self, reading: Reading, now: float) -> None:
        """Follow one reading.

        Args:
            reading: Of this worker, in the order written.
            now: Wall-clock seconds at which it was read.
        """
        if reading.step is None:
            self._add(reading)
            if reading.epoch is not None:
                self._epoch = reading
            if self._main is not None:
                self._tell(now, moved=False)
            return
        main = self._main
        if main is None or (not main.is_of(reading) and self._takes_over(main, reading, now)):
            main = self._main = self._new(main, reading, now)
        elif not main.is_of(reading):
            self._help(main, reading, now)
            return
        was = main.before + main.step
        with_epoch = self._with_epoch(reading)
        if not main.take(with_epoch):
            return
        self._add(reading)
        step = main.before + main.step
        moved = step != was or self.progress is None
        if moved:
            if main.moved:
                # What a script says itself is looked at now and then, but said at every step.
                self._stride = 1 if reading.shape == SCRIPT else max(1, step - was)
                self._measure(step - was, now - main.moved)
            main.moved = now
        self._eta = None if reading.eta is None or main.epochs or main.rounds > 1 else (now, reading.eta)
        self._tell(now, moved=moved)

    def _new(self, old: _Counter | None, reading: Reading, now: float) -> _Counter:
        if old is not None:
            # Its speed was that of other steps.
            self._step_seconds, self._given_step_seconds, self._stride = None, False, 1
            if old.trust < reading.trust and old.total is not None and _near(old.step, reading.step):
                self._helper_total = old.total
        return _Counter(reading.shape, reading.label, reading.trust, reading.total)

    def _takes_over(self, main: _Counter, reading: Reading, now: float) -> bool:
        if reading.trust != main.trust:
            return reading.trust > main.trust
        if reading.trust > 1:
            # Two kinds of lines of one framework: the first stays.
            return False
        if not main.full:
            return False
        return (reading.total or 0) > (main.total or 0) or now - main.moved > _OTHER_BAR_AFTER

    def _help(self, main: _Counter, reading: Reading, now: float) -> None:
        """A bar beside lines knows the total, where it counts the same."""
        if reading.trust < main.trust and main.total is None and _near(main.step, reading.step):
            self._helper_total = reading.total
            if reading.loss is not None and self._loss is None:
                self._loss = reading.loss
            self._tell(now, moved=False)

    def _with_epoch(self, reading: Reading) -> Reading:
        """Add the epoch of a line before, as Keras has it."""
        header = self._epoch
        if header is None or reading.epoch is not None or reading.absolute or reading.shape != "Keras":
            return reading
        from dataclasses import replace

        return replace(reading, epoch=header.epoch, epochs=header.epochs, first_epoch=header.first_epoch)

    def _add(self, reading: Reading) -> None:
        if reading.loss is not None:
            self._loss = reading.loss
        if reading.values:
            self._values = reading.values
        if reading.step_seconds is not None:
            self._step_seconds, self._given_step_seconds = reading.step_seconds, True

    def _measure(self, steps: int, seconds: float) -> None:
        if steps <= 0 or seconds <= 0 or self._given_step_seconds:
            return
        newest = seconds / steps
        if self._step_seconds is None:
            self._step_seconds = newest
        else:
            self._step_seconds += _SMOOTHING * (newest - self._step_seconds)

    def _tell(self, now: float, *, moved: bool) -> None:
        main = self._main
        assert main is not None
        per_epoch = main.epoch is not None or main.rounds > 1
        step = main.before + main.step
        if not per_epoch:
            total = main.total if main.total is not None else self._helper_total
        elif main.total is not None and main.epochs is not None:
            total = main.total * main.epochs
        else:
            total = None
        if total is not None and step > total:
            total = None
        self.progress = Progress(
            step=step,
            total=total,
            time=now if moved or self.progress is None else self.progress.time,
            epoch=main.epoch,
            epochs=main.epochs,
            epoch_step=main.step if per_epoch else None,
            epoch_total=main.total if per_epoch else None,
            loss=self._loss,
            step_seconds=self._step_seconds,
            eta=self._left(step, total, now),
            stride=self._stride,
            values=self._values,
        )

    def _left(self, step: int, total: int | None, now: float) -> float | None:
        if total is None:
            return None
        if self._eta is not None:
            moment, eta = self._eta
            return max(0.0, eta - (now - moment))
        return None if self._step_seconds is None else (total - step) * self._step_seconds


def _near(one: int, other: int | None) -> bool:
    return other is not None and abs(one - other) <= _NEAR
