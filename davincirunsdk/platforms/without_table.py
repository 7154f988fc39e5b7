"""Nodes, devices and ranks where there is no rank table: from options, platform and device files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from davincirunsdk.cluster import Cluster, Device, Node
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses, devices
from davincirunsdk.platforms import paths, rendezvous
from davincirunsdk.platforms.trust import claims_of_site, claims_of_wish, facts, settle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from davincirunsdk.options import Wish
    from davincirunsdk.platforms.site import Site
    from davincirunsdk.platforms.trust import Claim

_log = logging.getLogger("davincirunsdk")


def cluster(
    wish: Wish, env: Mapping[str, str], *, platform: str, sites: tuple[Site, ...], root: Path
) -> Cluster:
    """Make the cluster that options and platform describe; every node has as many workers as this one.

    Args:
        wish: What the user asked for.
        env: The environment.
        platform: Name of the platform.
        sites: What the platforms say, in order of trust.
        root: Folder that stands for `/`.

    Returns:
        The cluster, without a rank table.

    Raises:
        PlatformError: Two sources contradict each other, or devices, our place or the address of
            node 0 cannot be told.
    """
    said = (
        *claims_of_wish(wish),
        *rendezvous.claims(env),
        *(claim for site in sites for claim in claims_of_site(site)),
    )
    ignore = wish.ignore_platform
    size = settle("nnodes", said, ignore=ignore)
    nnodes = int(size.value) if size else 1
    node_rank = _node_rank(settle("node_rank", said, ignore=ignore), nnodes)
    # A size that a platform contradicts makes its hosts another job's.
    agreed = [site for site in sites if site.nnodes == nnodes]
    address = settle("master_addr", said, ignore=True)
    if address is None and nnodes > 1:
        raise PlatformError(
            f"found no address of node 0 for a job of {nnodes} nodes without a rank table; expected one: "
            "give --master-addr (master_addr) or set MASTER_ADDR"
        )
    port = settle("master_port", said, ignore=True)
    if nnodes == 1:
        # A platform's port is one that its nodes agree on; alone, any free one is better.
        own = (*claims_of_wish(wish), *rendezvous.claims(env))
        address, port = (settle(name, own, ignore=True) for name in ("master_addr", "master_port"))
    present = devices.npus(root)
    device_ids, npus = _devices(settle("nproc_per_node", said, ignore=True), wish.devices, env, present)
    numbers = {number: place for place, number in enumerate(present)} if npus else {}
    hosts = next((site.hosts for site in agreed if site.hosts), ()) or tuple(
        addresses.host_name() if place == node_rank else f"node {place}" for place in range(nnodes)
    )
    master_addr = str(address.value) if address else rendezvous.LOOPBACK
    reach = next((site.reach for site in agreed if site.master_addr == master_addr), str)
    master_port = int(port.value) if port else rendezvous.TORCH_PORT if nnodes > 1 else None
    return Cluster(
        nodes=tuple(_node(place, name, device_ids, numbers) for place, name in enumerate(hosts)),
        node_rank=node_rank,
        master_addr=reach(master_addr) if nnodes > 1 else master_addr,
        master_port=master_port,
        job_id=paths.job_id(env),
        rank_table=None,
        log_root=paths.log_root(env, command_line=wish.command_line),
        log_dir=next((site.log_dir for site in sites if site.log_dir), None),
        physical_device_id=devices.wants_physical_ids(root),
        npus=npus,
        visible_devices=tuple(numbers[number] for number in device_ids) if wish.devices else None,
        device_files=npus,
        one_each=wish.visible == "one",
        scheduler_elsewhere=any(site.scheduler_elsewhere for site in sites),
        platform=platform,
        facts=facts(said),
    )


def _node_rank(place: Claim | None, nnodes: int) -> int:
    if place is None and nnodes == 1:
        return 0
    if place is None or int(place.value) >= nnodes:
        found = "no node rank" if place is None else str(place)
        raise PlatformError(
            f"found {found} for a job of {nnodes} node{'s' if nnodes > 1 else ''} without a rank table; "
            f"expected one from 0 to {nnodes - 1}: give --node-rank (node_rank), and --nnodes (nnodes)"
        )
    return int(place.value)


def _devices(
    asked: Claim | None, chosen: str | None, env: Mapping[str, str], here: tuple[int, ...]
) -> tuple[tuple[int, ...], bool]:
    """Tell the device numbers here, and whether they are NPUs or bare slots."""
    wanted = None if asked is None else int(asked.value)
    if chosen is not None:
        numbers = devices.choose(chosen, env, here)
        if wanted not in (None, len(numbers)):
            raise PlatformError(
                f"found {len(numbers)} NPUs asked for with --devices (devices), and {asked}; expected both "
                "to agree: leave one of them out"
            )
        return numbers, True
    present = devices.visible(env, here)
    if wanted is None and not present:
        why = "no device file such as /dev/davinci0"
        if devices.MASK in env:
            why = f"none that {devices.MASK} lets a process see"
        raise PlatformError(
            f"found no rank table and no NPU ({why}); expected to learn how many workers to start: give "
            "--nproc-per-node (nproc_per_node), or a rank table by --rank-table (rank_table) "
            "or the variable RANK_TABLE_FILE"
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
            f"found {len(present)} NPUs on this node; expected at least {wanted}, the {asked}: ask for fewer "
            f"with --nproc-per-node (nproc_per_node), or set {devices.MASK} to nothing to run without NPUs"
        )
    return present[:wanted], True


def _node(place: int, name: str, device_ids: tuple[int, ...], numbers: Mapping[int, int]) -> Node:
    first = place * len(device_ids)
    return Node(
        node_rank=place,
        name=name,
        devices=tuple(
            Device(
                device_id=device_id,
                rank=first + local_rank,
                local_rank=local_rank,
                visible_id=numbers.get(device_id, -1),
            )
            for local_rank, device_id in enumerate(device_ids)
        ),
    )
