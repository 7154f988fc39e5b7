"""The training itself, the same for every backend: steps, progress, and the proof that all workers agree."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from davincirunsdk.demo import digits, network

if TYPE_CHECKING:
    from davincirunsdk.demo.network import Array, Weights
    from davincirunsdk.demo.place import Place

PROGRESS_LINES = 10


class Backend(Protocol):
    """What runs the net on this worker and adds up numbers over all workers; `train` calls it."""

    @property
    def name(self) -> str:
        """Library and version, as shown to the user."""

    def step(self, images: digits.Images) -> float:
        """Learns from one batch.

        Args:
            images: This worker's part of the batch.

        Returns:
            Mean loss over the whole batch, so over all workers.
        """

    def weights(self) -> Weights:
        """The weights as they are now on this worker."""

    def all_reduce(self, values: Array) -> Array:
        """The sum of every worker's vector."""

    def close(self) -> None:
        """Leaves the job in peace. Not called after a failure: then the process ends as it is."""


def train(backend: Backend, place: Place, *, epochs: int, seed: int, fail: int | None) -> None:
    """Trains, and writes progress to stdout.

    Args:
        backend: Where the net runs.
        place: This worker's place.
        epochs: How many times to go through the images.
        seed: Decides the order of the images.
        fail: A rank that breaks in the middle, to show what that looks like.

    Raises:
        RuntimeError: This worker was told to fail, or the workers' weights differ at the end.
    """
    images, test_images = digits.load()
    steps = epochs * digits.steps_per_epoch(images)
    say(f"{place}: training with {backend.name}")
    began = time.monotonic()
    parts = digits.parts(images, rank=place.rank, world_size=place.world_size, epochs=epochs, seed=seed)
    for step, part in enumerate(parts, 1):
        if place.rank == fail and step > steps // 2:
            raise RuntimeError(f"rank {fail} fails on purpose in step {step} of {steps} (--fail {fail})")
        loss = backend.step(part)
        if place.rank == 0 and (step == 1 or step % max(steps // PROGRESS_LINES, 1) == 0):
            say(f"step {step:4} of {steps}  loss {loss:.4f}")
    seconds = time.monotonic() - began
    weights = backend.weights()
    say(f"{place}: weights checksum {weights.checksum():08x}")
    compare_checksums(backend, place, weights.checksum())
    if place.rank == 0:
        say(f"{steps} steps in {seconds:.1f} s, same weights on all workers (world size {place.world_size})")
        say(f"test accuracy {network.accuracy(weights, test_images):.4f}")


def compare_checksums(backend: Backend, place: Place, checksum: int) -> None:
    """Makes sure that all workers hold the same weights.

    Each worker fills in its own row of a table of zeros, and the sum of the tables holds every row. A row is
    the checksum in two halves, for only numbers up to 2**24 are exact in single precision.

    Raises:
        RuntimeError: They do not; the text lists every worker's checksum.
    """
    rows = np.zeros((place.world_size, 2), np.float32)
    rows[place.rank] = divmod(checksum, 1 << 16)
    table = backend.all_reduce(rows.ravel()).reshape(rows.shape)
    checksums = [int(high) << 16 | int(low) for high, low in table]
    if set(checksums) != {checksum}:
        listing = ", ".join(f"rank {rank} {value:08x}" for rank, value in enumerate(checksums))
        raise RuntimeError(f"the workers ended with different weights: {listing}")


def say(text: str) -> None:
    """Writes one line to stdout at once, in one piece: `print` may write the line's end by itself."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
