"""This worker's place in the job, read from the variables that a launcher gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class DemoError(Exception):
    """The demo cannot go on; the text says all there is to say, so it is shown without a traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this worker stands.

    Attributes:
        rank: Its place in the job.
        world_size: Number of workers in the job.
        master_addr: Host on which rank 0 can be reached.
        master_port: Port there.
    """

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def read_place(env: Mapping[str, str]) -> Place:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun's names, as `davincirun` sets them).

    Args:
        env: The process's environment.

    Returns:
        The place; rank 0 of 1 if neither RANK nor WORLD_SIZE is set.

    Raises:
        DemoError: A variable is missing or is no number in its range.
    """
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return Place()
    world_size = _number(env, "WORLD_SIZE", 1, 1 << 16)
    rank = _number(env, "RANK", 0, world_size - 1)
    if world_size == 1:
        return Place()
    if not env.get("MASTER_ADDR"):
        raise DemoError(f"MASTER_ADDR is not set: expected the host of rank 0 of {world_size}. {_ADVICE}")
    port = _number(env, "MASTER_PORT", 1, 65535)
    return Place(rank=rank, world_size=world_size, master_addr=env["MASTER_ADDR"], master_port=port)


_ADVICE = "Start the demo with: davincirun --nproc-per-node 4 -m davincirunsdk.demo"


def _number(env: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    text = env.get(name)
    expected = f"expected a whole number from {lowest} to {highest}"
    if text is None:
        raise DemoError(f"{name} is not set: {expected}. {_ADVICE}")
    if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
        raise DemoError(f"{name} is {text!r}: {expected}. {_ADVICE}")
    return int(text)
