"""What stands before each displayed line."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX_PARTS = ("rank", "time", "host")

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Of the ranks, in turn; red is left to errors."""


class Labels:
    """Builds `[rank 3] `, in front of it what else is wanted.

    The rank's label is padded behind its bracket, so that the columns are straight and a search for
    `[rank 3]` finds the lines of rank 3 and no others, whatever the number of ranks. The few lines of
    an auxiliary process do not widen the column.

    Args:
        names: Name of each rank, such as `rank 3`.
        parts: Which of `PREFIX_PARTS`, in this order.
        colour: Colour the rank's label.
    """

    def __init__(
        self, names: Mapping[int, str], *, parts: tuple[str, ...] = ("rank",), colour: bool = False
    ) -> None:
        self._names = dict(names)
        self._parts = parts
        self._colour = colour
        self._width = max((len(name) for rank, name in self._names.items() if rank >= 0), default=0) + 2
        self._host = socket.gethostname().split(".")[0] if "host" in parts else ""

    def prefix(self, rank: int, moment: float) -> str:
        """Return what a line of a rank begins with.

        Args:
            rank: Whose line.
            moment: Wall-clock seconds.
        """
        return "".join(self._part(part, rank, moment) + " " for part in self._parts)

    def _part(self, part: str, rank: int, moment: float) -> str:
        if part == "time":
            return (
                f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))}.{int(moment % 1 * 1000):03d}"
            )
        if part == "host":
            return self._host
        label = f"[{self._names.get(rank, f'rank {rank}')}]"
        padding = " " * (self._width - len(label))
        if self._colour:
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m{padding}"
        return label + padding


def parse_prefix(text: str) -> tuple[str, ...]:
    """Read the value of `--prefix`.

    Args:
        text: Parts with commas between them, such as `time,host,rank`, or `none`.

    Raises:
        ValueError: For anything else; the message lists what is possible.
    """
    if text == "none":
        return ()
    parts = tuple(part.strip() for part in text.split(","))
    if not set(parts) <= set(PREFIX_PARTS) or len(set(parts)) != len(parts):
        raise ValueError(
            f"prefix {text!r} is not known: expected 'none', or one or more of "
            f"{', '.join(PREFIX_PARTS)} with commas between them, each once"
        )
    return parts
