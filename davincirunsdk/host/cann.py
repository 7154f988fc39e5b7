"""Whether CANN is in the environment, and what to write where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MARKS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
"""What CANN's `set_env.sh` sets."""

PLACES = (
    "usr/local/Ascend/ascend-toolkit/set_env.sh",
    "usr/local/Ascend/cann/set_env.sh",
    "usr/local/Ascend/cann-*/set_env.sh",
    "usr/local/Ascend/ascend-toolkit/latest/set_env.sh",
    "usr/local/Ascend/nnae/set_env.sh",
    "usr/local/Ascend/latest/set_env.sh",
    "opt/Ascend/ascend-toolkit/set_env.sh",
)
"""Where its packages put it, the usual place first."""

OWN = ("Ascend/ascend-toolkit/set_env.sh", "Ascend/cann/set_env.sh", "Ascend/cann-*/set_env.sh")
"""The same, where a user has installed it at home."""


def missing(env: Mapping[str, str], root: Path) -> str:
    """Say what to write where CANN is not in the environment; blocks shortly.

    Args:
        env: The environment.
        root: Folder that stands for `/`.

    Returns:
        One line, "" where nothing is missing.
    """
    if any(env.get(name) for name in MARKS):
        return ""
    home = env.get("HOME", "").strip("/")
    places = (*PLACES, *(f"{home}/{place}" for place in OWN if home))
    found = next((path for place in places for path in sorted(root.glob(place))), None)
    todo = (
        f"write `source /{found.relative_to(root)}` before it"
        if found is not None
        else "install it, or source its set_env.sh (none was found in /usr/local/Ascend)"
    )
    return (
        f"this node has NPUs, but CANN is not in the environment (no {MARKS[0]}): unless the command does so "
        f"itself, {todo}"
    )
