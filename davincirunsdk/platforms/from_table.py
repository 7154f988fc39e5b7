"""Nodes, devices and ranks from a rank table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.cluster import Cluster, Device, Node
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host import devices
from davincirunsdk.platforms import own_node, paths, rendezvous
from davincirunsdk.platforms.site import Site, shared_port
from davincirunsdk.rank_table import dump
from davincirunsdk.rank_table.table import Server, TableNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from davincirunsdk.options import Wish
    from davincirunsdk.rank_table import RankTable


def cluster(
    table: RankTable,
    path: Path,
    wish: Wish,
    env: Mapping[str, str],
    *,
    platform: str,
    site: Site,
    root: Path,
    notify: Callable[[str], None],
) -> Cluster:
    """Make the cluster that a rank table describes, as seen from this node.

    Args:
        table: The table.
        path: The file it was read from.
        wish: What the user asked for; must not contradict the table.
        env: The environment.
        platform: Name of the platform.
        site: What the platform tells.
        root: Folder that stands for `/`.
        notify: Takes lines for people.

    Returns:
        The cluster; its `rank_table` is a file that HCCL reads.

    Raises:
        RankTableError: The wish, the devices here or their mask, and the table disagree.
        PlatformError: This node is not to be found in the table.
    """
    present = devices.npus(root)
    nodes = nodes_of(table, wish.nproc_per_node or len(devices.visible(env, present)), str(path))
    if wish.nnodes is not None and wish.nnodes != len(nodes):
        raise RankTableError(
            f"rank table {path}: found {len(nodes)} node{'s' if len(nodes) > 1 else ''}; expected "
            f"{wish.nnodes}, the nnodes asked for: drop that figure, or give the table of this job",
            path=str(path),
        )
    node_rank = own_node.find(nodes, env=env, site=site, wanted=wish.node_rank, path=str(path))
    own = nodes[node_rank]
    if wish.nproc_per_node is not None and wish.nproc_per_node != len(own.rows):
        raise RankTableError(
            f"rank table {path}: found {len(own.rows)} device{'s' if len(own.rows) > 1 else ''} on this node "
            f"({own.name}); expected {wish.nproc_per_node}, the nproc_per_node asked for: drop that figure, "
            "as a table settles it, or give another table",
            path=str(path),
        )
    mask = _narrowed(own, present, env, str(path), notify)
    # What the platform tells of other nodes counts if it speaks of the same ones.
    agreed = site if site.nnodes == len(nodes) else Site()
    return Cluster(
        nodes=tuple(_node(place, node) for place, node in enumerate(nodes)),
        node_rank=node_rank,
        master_addr=rendezvous.address(wish, env, agreed, len(nodes)) or own_node.address_of(nodes[0]),
        master_port=rendezvous.port(
            wish, env, agreed, len(nodes), fallback=shared_port(dump(table)) if len(nodes) > 1 else 0
        ),
        job_id=paths.job_id(env),
        rank_table=paths.file_for_hccl(table, path, env, root, documented=False),
        log_root=paths.log_root(env),
        log_dir=site.log_dir,
        visible_devices=mask,
        physical_device_id=devices.wants_physical_ids(root),
        npus=True,
        platform=platform,
    )


def nodes_of(table: RankTable, here: int, path: str) -> tuple[TableNode, ...]:
    """Split a table into nodes; in v2.0 with the help of the number of devices here.

    v2.0 names no servers: its network instances may be whole racks. So where the ranks divide
    evenly by the devices of this host, and the instances do not show that many each, the
    nodes are the ranks in groups of that size, as every writer numbers a host's ranks in one run.

    Args:
        table: The table.
        here: Devices or workers of this host, 0 if not known.
        path: The file, for messages.

    Returns:
        The nodes in node rank order.

    Raises:
        PlatformError: The devices here do not fit a v2.0 table.
    """
    nodes = table.nodes()
    if table.form != "v2.0" or not here or all(len(node.rows) == here for node in nodes):
        return nodes
    if table.world_size % here:
        raise PlatformError(
            f"rank table {path} is of version 2.0, which names no hosts, and its {table.world_size} ranks do "
            f"not divide by the {here} devices of this one; expected a table of hosts with {here} each: "
            "give the right --nproc-per-node"
        )
    rows = sorted((row for node in nodes for row in node.rows), key=lambda row: row.rank)
    groups = [tuple(rows[start : start + here]) for start in range(0, len(rows), here)]
    return tuple(
        TableNode(
            name=f"ranks {group[0].rank}-{group[-1].rank}",
            server=Server(server_id="", rows=group),
            pods=frozenset(),
            rows=group,
        )
        for group in groups
    )


def _narrowed(
    own: TableNode,
    present: tuple[int, ...],
    env: Mapping[str, str],
    path: str,
    notify: Callable[[str], None],
) -> tuple[int, ...] | None:
    """Compare this node's rows with the devices here: with more in sight, a rank would open another's card.

    Returns:
        The mask that leaves the rows' devices alone in sight; None where it needs no change.
    """
    rows = tuple(sorted(row.device_id for row in own.rows))
    if present and (absent := [number for number in rows if number not in present]):
        raise RankTableError(
            f"rank table {path}: found {devices.some(absent, 'device')} for this node ({own.name}), which "
            f"has {devices.some(present, 'NPU')} (device files in /dev); expected devices that are here: "
            "give the table of this node, or mend the device",
            path=path,
        )
    seen = devices.visible(env, present) if present else devices.seen_without_files(env, rows)
    if hidden := [number for number in rows if number not in seen]:
        raise RankTableError(
            f"rank table {path}: found {devices.some(hidden, 'device')} for this node ({own.name}), which "
            f"the environment variable {devices.MASK} hides from the workers; expected all of the node's "
            "devices in sight: unset the variable, or give a table of the devices that it leaves",
            path=path,
        )
    if rows == seen:
        return None
    notify(
        f"this node has {devices.some(seen, 'NPU')} in sight, and rank table {path} gives it "
        f"{devices.some(rows, 'NPU')}: {devices.MASK} of the workers is narrowed to these"
    )
    # CANN counts the devices present; without device files they are taken for those of a bare host.
    return tuple(present.index(number) for number in rows) if present else rows


def _node(place: int, node: TableNode) -> Node:
    local_ranks = {row: index for index, row in enumerate(sorted(row.device_id for row in node.rows))}
    return Node(
        node_rank=place,
        name=node.name,
        devices=tuple(
            Device(
                device_id=row.device_id,
                rank=row.rank,
                local_rank=local_ranks[row.device_id],
                device_ip=row.device_ip or "",
            )
            for row in node.rows
        ),
    )
