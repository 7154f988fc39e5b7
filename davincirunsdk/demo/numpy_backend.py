"""The training in numpy, with an all-reduce of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from davincirunsdk.demo import network
from davincirunsdk.demo.all_reduce import AllReduce
from davincirunsdk.demo.digits import BATCH_SIZE, Images

if TYPE_CHECKING:
    from davincirunsdk.demo.network import Array, Weights
    from davincirunsdk.demo.place import Place


class NumpyBackend:
    """Forward and backward pass written out.

    Args:
        place: This worker's place.
        seed: Decides the initial weights.

    Raises:
        DemoError: The other workers cannot be reached.
    """

    def __init__(self, place: Place, seed: int) -> None:
        self._weights = network.initial(seed)
        self._all_reduce = AllReduce(place)
        self.name = f"numpy {np.__version__}"

    def step(self, images: Images) -> float:
        weights = self._weights
        hidden = network.hidden(weights, images.pixels)
        scores = network.scores(weights, hidden)
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances = exponents / exponents.sum(axis=1, keepdims=True)
        wanted = np.arange(len(images)), images.labels
        loss = -np.log(chances[wanted]).sum() / BATCH_SIZE

        at_output = chances
        at_output[wanted] -= 1
        at_output /= BATCH_SIZE
        at_hidden = at_output @ weights.output_weight * (hidden > 0)
        gradients = (at_hidden.T @ images.pixels, at_hidden.sum(0), at_output.T @ hidden, at_output.sum(0))

        flat = [gradient.ravel() for gradient in gradients]
        total = self.all_reduce(np.concatenate([*flat, [loss]], dtype=np.float32))
        start = 0
        for array in weights.arrays:
            array -= network.LEARNING_RATE * total[start : start + array.size].reshape(array.shape)
            start += array.size
        return float(total[-1])

    def weights(self) -> Weights:
        return self._weights

    def all_reduce(self, values: Array) -> Array:
        return self._all_reduce(values)

    def close(self) -> None:
        self._all_reduce.close()
