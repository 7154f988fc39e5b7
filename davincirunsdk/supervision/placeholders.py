"""Words that differ from worker to worker: `{rank}` and its like in what a user has given."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = ("rank", "local_rank", "node_rank", "device", "attempt")
"""All that are known; other braces are a part of the text."""

_KNOWN = re.compile(f"{{({'|'.join(NAMES)})}}")


def fill(text: str, values: Mapping[str, int]) -> str:
    """Put numbers in the place of placeholders; whatever else has braces stays as it is.

    Args:
        text: What a user has given.
        values: The number for each of `NAMES`.
    """
    return _KNOWN.sub(lambda found: str(values[found[1]]), text)


def differs(text: str) -> bool:
    """Tell whether a text has a placeholder, and so may differ from worker to worker."""
    return _KNOWN.search(text) is not None
