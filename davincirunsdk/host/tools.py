"""Ascend's own tools on a host, asked without a shell and with patience that ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLACES = {
    "hccn_tool": ("usr/local/Ascend/driver/tools/hccn_tool", "usr/bin/hccn_tool"),
    "npu-smi": ("usr/local/sbin/npu-smi", "usr/local/bin/npu-smi"),
}
_TIMEOUT = 10.0
"""Seconds for one answer; the tools hang where the driver does."""


def find_tool(name: str, root: Path, search_path: str | None) -> str | None:
    """Find a tool where its package puts it, or else on the search path.

    Args:
        name: `hccn_tool` or `npu-smi`.
        root: Folder to look below.
        search_path: As in PATH; only used with `/` as root.
    """
    for place in _PLACES[name]:
        if os.access(root / place, os.X_OK):
            return str(root / place)
    return shutil.which(name, path=search_path) if search_path and root == Path("/") else None


def ask(words: Sequence[str], *, timeout: float = _TIMEOUT) -> str:
    """Return what a tool prints; "" if it cannot be run or does not answer in time.

    Args:
        words: Of the command.
        timeout: Seconds for the answer.
    """
    try:
        answer = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


def chips_of(text: str, present: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Read `npu-smi info -m`: physical number of a device, to its NPU id and chip id.

    Columns are known by their titles: newer drivers have one for the physical number. The logical
    number counts the devices that are here, in the order of their physical ones.
    """
    head, *rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()] or [[]]
    titles = {title.lower().replace("-", " "): place for place, title in enumerate(head)}
    physical = titles.get("chip phy id")
    logical = titles.get("chip logic id")
    by = physical if physical is not None else logical
    if by is None or "npu id" not in titles or "chip id" not in titles:
        return {}
    chips = {}
    for row in rows:
        # Other chips on the board, such as the controller, have no number.
        if len(row) == len(head) and row[by].isdigit():
            number = int(row[by])
            if physical is None:
                if number >= len(present):
                    continue
                number = present[number]
            chips[number] = (row[titles["npu id"]], row[titles["chip id"]])
    return chips
