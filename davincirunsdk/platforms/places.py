"""Where the rank table of this job is, or should be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.errors import RankTableError

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE_NAME = "jobstart_hccl.json"
"""Name of the file in the folder that ModelArts puts into RANK_TABLE_FILE."""

KNOWN_PLACES = (
    f"user/config/{TABLE_NAME}",  # ModelArts and CCE
    "user/serverid/devindex/config/hccl.json",  # ConfigMap of hccl-controller
    f"etc/ranktable/{TABLE_NAME}",  # Volcano example
)
OPERATOR_PLACES = "user/mindx-dl/ranktable/*/hccl.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file to read, and the option or variable that named it, "" for a known place."""

    path: Path
    named_by: str = ""


def find(env: Mapping[str, str], *, given: Path | None = None, root: Path = Path("/")) -> Place | None:
    """Tell where the rank table is, or should be.

    Order: the given path, RANK_TABLE_FILE_V_1_0, RANK_TABLE_FILE (a file, or ModelArts' folder),
    MINDSPORE_HCCL_CONFIG_PATH, then the places where platforms are known to mount it. The working
    folder is not searched: a table that lies there may be another host's.

    Args:
        env: The environment.
        given: Path that the user gave.
        root: Folder that stands for `/` in the known places.

    Returns:
        The place; a named one need not exist yet. None when none is named and none exists.

    Raises:
        RankTableError: Several tables lie in the operator's folder and nothing says which is ours.
    """
    if given is not None:
        return Place(path=_in_folder(given), named_by="--rank-table (rank_table)")
    for name in ("RANK_TABLE_FILE_V_1_0", "RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH"):
        if env.get(name):
            return Place(path=_in_folder(Path(env[name])), named_by=name)
    for known in KNOWN_PLACES:
        if os.path.exists(root / known):  # unlike Path's, no error where a folder is closed to us
            return Place(path=root / known)
    tables = sorted(root.glob(OPERATOR_PLACES))
    if len(tables) > 1:
        listed = ", ".join(str(path) for path in tables)
        raise RankTableError(
            f"found several rank tables ({listed}) and nothing that says which is this job's; "
            "expected one: set RANK_TABLE_FILE or give --rank-table (rank_table)"
        )
    return Place(path=tables[0]) if tables else None


def _in_folder(path: Path) -> Path:
    # A folder that is not there yet is told from a file by the name: HCCL takes `.json` files only.
    if os.path.isdir(path) or (path.suffix != ".json" and not os.path.exists(path)):
        other = path / "hccl.json"
        both = os.path.exists(path / TABLE_NAME), os.path.exists(other)
        return other if both == (False, True) else path / TABLE_NAME
    return path
