"""A machine to locate on: a folder that stands for `/`, with the device files and tables wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rank_table_samples import sample

from davincirunsdk.options import Wish
from davincirunsdk.platforms import locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from davincirunsdk.cluster import Cluster


def make_root(root: Path, npus: Iterable[int] = ()) -> Path:
    """Make a folder with NPU device files, and those of the driver that are no devices."""
    dev = root / "dev"
    dev.mkdir(parents=True)
    for name in ("davinci_manager", "hisi_hdc", "null", *(f"davinci{number}" for number in npus)):
        (dev / name).touch()
    return root


def put_sample(name: str, path: Path) -> Path:
    """Copy a sample table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sample(name))
    return path


async def located(root: Path, env: Mapping[str, str], wish: Wish | None = None) -> Cluster:
    """Locate below a folder; nobody listens to the progress lines."""
    return await locate(wish or Wish(), {"TMPDIR": str(root), **env}, notify=lambda _: None, root=root)


def devices(cluster: Cluster) -> list[tuple[int, int]]:
    """List (rank, device) of this node."""
    return [(device.rank, device.device_id) for device in cluster.node.devices]
