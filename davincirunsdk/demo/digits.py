"""The data: scikit-learn's handwritten digits, one split for every backend, each worker's part of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.datasets import load_digits

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

TEST_IMAGES = 360
BATCH_SIZE = 64
"""Images per step over all workers together, so that a job learns the same with any number of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Some images and what they show.

    Attributes:
        pixels: One row of 64 values from 0 to 1 per image.
        labels: The digit on each image.
    """

    pixels: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: npt.NDArray[np.int64] | slice) -> Images:
        """The chosen images, in the order given."""
        return Images(pixels=self.pixels[rows], labels=self.labels[rows])


def load() -> tuple[Images, Images]:
    """Reads the digits and splits them, always in the same way.

    Returns:
        The 1437 images to train on, and the 360 to test with.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = Images(pixels=(pixels / 16).astype(np.float32), labels=labels.astype(np.int32))
    shuffled = images.rows(np.random.default_rng(0).permutation(len(images)))
    return shuffled.rows(slice(TEST_IMAGES, None)), shuffled.rows(slice(TEST_IMAGES))


def steps_per_epoch(images: Images) -> int:
    """Number of whole batches in the images; what is left over waits for another epoch's order."""
    return len(images) // BATCH_SIZE


def parts(images: Images, *, rank: int, world_size: int, epochs: int, seed: int) -> Iterator[Images]:
    """Yields this worker's part of every batch.

    All workers draw the same order from the same seed, so the parts of one step never overlap and together
    make up the whole batch.

    Args:
        images: What to train on.
        rank: This worker.
        world_size: Number of workers.
        epochs: How many times to go through the images.
        seed: Decides the order.
    """
    shuffle = np.random.default_rng(seed)
    for _ in range(epochs):
        order = shuffle.permutation(len(images))
        for step in range(steps_per_epoch(images)):
            batch = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            yield images.rows(batch[rank::world_size])
