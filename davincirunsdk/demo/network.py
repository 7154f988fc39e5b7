"""The net that every backend trains: 64 pixels, one hidden layer with ReLU, 10 digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from davincirunsdk.demo.digits import Images

PIXELS, HIDDEN, DIGITS = 64, 32, 10
LEARNING_RATE = 0.5

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The net's numbers; a layer's weight has one row per output, as torch and MindSpore keep it.

    Attributes:
        hidden_weight: Shape (32, 64).
        hidden_bias: Shape (32,).
        output_weight: Shape (10, 32).
        output_bias: Shape (10,).
    """

    hidden_weight: Array
    hidden_bias: Array
    output_weight: Array
    output_bias: Array

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """All of them, in the order in which a framework lists the parameters of such a net."""
        return self.hidden_weight, self.hidden_bias, self.output_weight, self.output_bias

    def checksum(self) -> int:
        """CRC-32 over every bit of the weights."""
        total = 0
        for array in self.arrays:
            total = crc32(np.ascontiguousarray(array).tobytes(), total)
        return total


def initial(seed: int) -> Weights:
    """Weights to start from: the same for every worker and every backend with the same seed."""
    draw = np.random.default_rng(seed)

    def layer(outputs: int, inputs: int) -> Array:
        return draw.normal(0, (2 / inputs) ** 0.5, (outputs, inputs)).astype(np.float32)

    return Weights(
        hidden_weight=layer(HIDDEN, PIXELS),
        hidden_bias=np.zeros(HIDDEN, np.float32),
        output_weight=layer(DIGITS, HIDDEN),
        output_bias=np.zeros(DIGITS, np.float32),
    )


def hidden(weights: Weights, pixels: Array) -> Array:
    """The hidden layer's output for every image."""
    output: Array = np.maximum(pixels @ weights.hidden_weight.T + weights.hidden_bias, 0)
    return output


def scores(weights: Weights, hidden_output: Array) -> Array:
    """Ten scores for every image, the highest for the digit that the net believes in."""
    output: Array = hidden_output @ weights.output_weight.T + weights.output_bias
    return output


def accuracy(weights: Weights, images: Images) -> float:
    """Share of images, 0 to 1, on which the net sees the right digit."""
    guesses = scores(weights, hidden(weights, images.pixels)).argmax(axis=1)
    return float((guesses == images.labels).mean())
