"""Ascend's own tools on a host, asked without a shell and with patience that ends."""

from __future__ import annotations

import os
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


def ask(words: Sequence[str]) -> str:
    """Return what a tool prints; "" if it cannot be run or does not answer in time."""
    try:
        answer = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout
