"""The training in MindSpore on CPU, with its dynamic cluster and its own AllReduce.

The cluster needs one more process, the scheduler, which runs the same command with MS_ROLE=MS_SCHED;
`davincirun --framework mindspore` starts it.
"""

from __future__ import annotations

import os

import mindspore as ms
import numpy as np
from mindspore import communication, nn, ops

from davincirunsdk.demo import network
from davincirunsdk.demo.digits import BATCH_SIZE, Images
from davincirunsdk.demo.network import Array, Weights
from davincirunsdk.demo.place import DemoError, Place


def serve_as_scheduler() -> None:
    """Runs the cluster's scheduler; comes back when the workers have left."""
    ms.set_device("CPU")
    communication.init()


class MindSporeBackend:
    """A net whose gradients are all-reduced by hand, operator by operator (PyNative mode).

    Args:
        place: This worker's place.
        seed: Decides the initial weights.

    Raises:
        DemoError: There are several workers, but no scheduler for them.
    """

    def __init__(self, place: Place, seed: int) -> None:
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        # Handing operators this small from thread to thread takes five times as long as running them.
        ms.runtime.launch_blocking()
        self._alone = place.world_size == 1
        if not self._alone:
            if os.environ.get("MS_ROLE") != "MS_WORKER":
                raise DemoError(
                    f"{place}: MS_ROLE is not MS_WORKER, so there is no MindSpore cluster to join; "
                    "start the workers with: davincirun --framework mindspore"
                )
            communication.init()
            self._sum = ops.AllReduce()
        self._net = nn.SequentialCell(
            nn.Dense(network.PIXELS, network.HIDDEN), nn.ReLU(), nn.Dense(network.HIDDEN, network.DIGITS)
        )
        self._parameters = self._net.trainable_params()
        for parameter, array in zip(self._parameters, network.initial(seed).arrays, strict=True):
            parameter.set_data(ms.Tensor(array))
        self._gradients = ms.value_and_grad(self._loss, None, self._parameters)
        self._update = nn.SGD(self._parameters, network.LEARNING_RATE)
        self.name: str = f"mindspore {ms.__version__}"

    def step(self, images: Images) -> float:
        loss, gradients = self._gradients(ms.Tensor(images.pixels), ms.Tensor(images.labels))
        if not self._alone:
            # One call for all: an AllReduce of little arrays costs the same as one of a few thousand numbers.
            total = self._sum(ops.cat([*(gradient.reshape(-1) for gradient in gradients), loss.reshape(1)]))
            *flat, loss = ops.split(total, [*(parameter.size for parameter in self._parameters), 1])
            gradients = tuple(
                vector.reshape(parameter.shape)
                for vector, parameter in zip(flat, self._parameters, strict=True)
            )
        self._update(gradients)
        return float(loss.asnumpy().item())

    def weights(self) -> Weights:
        hidden_weight, hidden_bias, output_weight, output_bias = (
            parameter.asnumpy() for parameter in self._parameters
        )
        return Weights(
            hidden_weight=hidden_weight,
            hidden_bias=hidden_bias,
            output_weight=output_weight,
            output_bias=output_bias,
        )

    def all_reduce(self, values: Array) -> Array:
        if self._alone:
            return values
        return np.asarray(self._sum(ms.Tensor(values)).asnumpy(), np.float32)

    def close(self) -> None:
        """MindSpore takes its cluster down itself when the process ends."""

    def _loss(self, pixels: ms.Tensor, labels: ms.Tensor) -> ms.Tensor:
        return ops.cross_entropy(self._net(pixels), labels, reduction="sum") / BATCH_SIZE
