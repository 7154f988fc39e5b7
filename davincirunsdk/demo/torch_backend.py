"""The training in PyTorch on CPU, with torch.distributed and gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from davincirunsdk.demo import network
from davincirunsdk.demo.all_reduce import TIMEOUT
from davincirunsdk.demo.digits import BATCH_SIZE, Images
from davincirunsdk.demo.network import Array, Weights

if TYPE_CHECKING:
    from davincirunsdk.demo.place import Place


class TorchBackend:
    """A plain net whose gradients are all-reduced by hand.

    Without DistributedDataParallel and torch.optim, whose import alone takes longer than this training.

    Args:
        place: This worker's place.
        seed: Decides the initial weights.
    """

    def __init__(self, place: Place, seed: int) -> None:
        torch.set_num_threads(1)
        self._alone = place.world_size == 1
        if not self._alone:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{place.master_addr}:{place.master_port}",
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=TIMEOUT),
            )
        self._net = torch.nn.Sequential(
            torch.nn.Linear(network.PIXELS, network.HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(network.HIDDEN, network.DIGITS),
        )
        with torch.no_grad():
            for parameter, array in zip(self._net.parameters(), network.initial(seed).arrays, strict=True):
                parameter.copy_(torch.from_numpy(array))
        self.name: str = f"torch {torch.__version__}"

    def step(self, images: Images) -> float:
        self._net.zero_grad()
        scores = self._net(torch.from_numpy(images.pixels))
        labels = torch.from_numpy(images.labels.astype(np.int64))
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum") / BATCH_SIZE
        loss.backward()
        with torch.no_grad():
            gradients = parameters_to_vector(parameter.grad for parameter in self._net.parameters())
            total = torch.cat([gradients, loss.reshape(1)])
            self._sum(total)
            weights = parameters_to_vector(self._net.parameters()) - network.LEARNING_RATE * total[:-1]
            vector_to_parameters(weights, self._net.parameters())
        return float(total[-1])

    def weights(self) -> Weights:
        hidden_weight, hidden_bias, output_weight, output_bias = (
            parameter.detach().numpy() for parameter in self._net.parameters()
        )
        return Weights(
            hidden_weight=hidden_weight,
            hidden_bias=hidden_bias,
            output_weight=output_weight,
            output_bias=output_bias,
        )

    def all_reduce(self, values: Array) -> Array:
        tensor = torch.from_numpy(values.copy())
        self._sum(tensor)
        return np.asarray(tensor.numpy(), np.float32)

    def close(self) -> None:
        if not self._alone:
            dist.destroy_process_group()

    def _sum(self, tensor: torch.Tensor) -> None:
        if not self._alone:
            dist.all_reduce(tensor)
