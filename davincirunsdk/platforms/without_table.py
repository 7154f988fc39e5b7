"""Nodes, devices and ranks where there is no rank table: from options, platform and device files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from davincirunsdk.cluster import Cluster, Device, Node
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses, devices
from davincirunsdk.platforms import paths, rendezvous
from davincirunsdk.platforms.site import Site

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from davincirunsdk.options import Wish

_log = logging.getLogger("davincirunsdk")


def cluster(wish: Wish, env: Mapping[str, str], *, platform: str, site: Site, root: Path) -> Cluster:
    """Make the cluster that options and platform describe; every node has as many workers as this one.

    Args:
        wish: What the user asked for.
        env: The environment.
        platform: Name of the platform.
        site: What the platform tells; its nodes are left aside if the user asked for another number.
        root: Folder that stands for `/`.

    Returns:
        The cluster, without a rank table.

    Raises:
        PlatformError: Devices, our place or the address of node 0 cannot be told.
    """
    if wish.nnodes not in (None, site.nnodes):
        site = Site(log_dir=site.log_dir)
    nnodes = wish.nnodes or site.nnodes or 1
    node_rank = _node_rank(wish, site, nnodes)
    master_addr = rendezvous.address(wish, env, site, nnodes)
    if master_addr is None:
        raise PlatformError(
            f"found no address of node 0 for a job of {nnodes} nodes without a rank table; expected one: "
            "give --master-addr or set MASTER_ADDR"
        )
    if nnodes > 1 and site.doubt:
        _log.warning("a job of %d nodes: %s", nnodes, site.doubt)
    device_ids, npus = _devices(wish.nproc_per_node, env, root)
    names = site.hosts or tuple(
        addresses.host_name() if place == node_rank else f"node {place}" for place in range(nnodes)
    )
    return Cluster(
        nodes=tuple(_node(place, name, device_ids) for place, name in enumerate(names)),
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=rendezvous.port(wish, env, site, nnodes),
        job_id=paths.job_id(env),
        rank_table=None,
        log_root=paths.log_root(env),
        log_dir=site.log_dir,
        physical_device_id=devices.wants_physical_ids(root),
        npus=npus,
        platform=platform,
    )


def _node_rank(wish: Wish, site: Site, nnodes: int) -> int:
    node_rank = wish.node_rank if wish.node_rank is not None else site.node_rank
    if node_rank is None and nnodes == 1:
        return 0
    if node_rank is None or node_rank >= nnodes:
        found = "no node rank" if node_rank is None else f"node rank {node_rank}"
        raise PlatformError(
            f"found {found} for a job of {nnodes} node{'s' if nnodes > 1 else ''} without a rank table; "
            f"expected one from 0 to {nnodes - 1}: give --node-rank (and --nnodes)"
        )
    return node_rank


def _devices(wanted: int | None, env: Mapping[str, str], root: Path) -> tuple[tuple[int, ...], bool]:
    """Tell the device numbers here, and whether they are NPUs or bare slots."""
    here = devices.npus(root)
    present = devices.visible(env, here)
    if wanted is None and not present:
        why = "no device file such as /dev/davinci0"
        if devices.MASK in env:
            why = f"none that {devices.MASK} lets a process see"
        raise PlatformError(
            f"found no rank table and no NPU ({why}); expected to learn how many workers to start: give "
            "--nproc-per-node (argument nproc_per_node), or a rank table by --rank-table (argument "
            "rank_table) or the variable RANK_TABLE_FILE"
        )
    if not present:
        if here:
            _log.warning(
                "%s is empty and hides the %s of this node: the workers run without",
                devices.MASK,
                devices.some(here, "NPU"),
            )
        return tuple(range(wanted or 0)), False
    if wanted is not None and wanted > len(present):
        raise PlatformError(
            f"found {len(present)} NPUs on this node; expected at least {wanted}, the nproc_per_node asked "
            "for: ask for fewer, or set ASCEND_RT_VISIBLE_DEVICES to nothing to run without NPUs"
        )
    return present[:wanted], True


def _node(place: int, name: str, device_ids: tuple[int, ...]) -> Node:
    first = place * len(device_ids)
    return Node(
        node_rank=place,
        name=name,
        devices=tuple(
            Device(device_id=device_id, rank=first + local_rank, local_rank=local_rank)
            for local_rank, device_id in enumerate(device_ids)
        ),
    )
