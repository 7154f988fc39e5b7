"""Nodes, devices and ranks from a rank table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.cluster import Cluster, Device, Node, printable
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host import addresses, devices
from davincirunsdk.platforms import own_node, paths, rendezvous
from davincirunsdk.platforms.site import shared_port
from davincirunsdk.platforms.trust import Claim, claims_of_site, claims_of_wish, facts, settle
from davincirunsdk.rank_table import dump
from davincirunsdk.rank_table.table import Server, TableNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from davincirunsdk.options import Wish
    from davincirunsdk.platforms.site import Site
    from davincirunsdk.rank_table import RankTable


def cluster(
    table: RankTable,
    path: Path,
    wish: Wish,
    env: Mapping[str, str],
    *,
    platform: str,
    sites: tuple[Site, ...],
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
        sites: What the platforms say, in order of trust.
        root: Folder that stands for `/`.
        notify: Takes lines for people.

    Returns:
        The cluster; its `rank_table` is a file that HCCL reads.

    Raises:
        RankTableError: The wish, the devices here or their mask, and the table disagree.
        PlatformError: This node is not to be found in the table, or two sources contradict each other.
    """
    present = devices.npus(root)
    nodes = nodes_of(table, wish.nproc_per_node or len(devices.visible(env, present)), str(path))
    _refuse_other_nnodes(nodes, wish, path)
    ignore = wish.ignore_platform
    said = [claim for site in sites for claim in claims_of_site(site)]
    in_table = [Claim(name="nnodes", value=len(nodes), source=f"rank table {path}")]
    settle("nnodes", (*in_table, *said), ignore=ignore)
    told = wish.nnodes is not None or wish.node_rank is not None
    alone = next((s.objection for s in sites if s.offer and s.objection and not s.writes_table), "")
    if alone and len(nodes) > 1 and not told and not ignore:
        raise PlatformError(alone)
    # What the platform tells of places counts if it speaks of as many nodes.
    agreed = [site for site in sites if site.nnodes == len(nodes)]
    node_rank = own_node.find(
        nodes, env=env, sites=agreed, wanted=wish.node_rank, path=str(path), ignore=ignore
    )
    own = nodes[node_rank]
    in_table.append(Claim(name="node_rank", value=node_rank, source=f"rank table {path}"))
    in_table.append(Claim(name="nproc_per_node", value=len(own.rows), source=f"rank table {path}"))
    wished = claims_of_wish(wish)
    # A platform that writes the table may number its nodes anew in it, by the network's shape.
    foreign = [claim for site in sites if not site.writes_table for claim in claims_of_site(site)]
    settle("node_rank", (*wished, *in_table, *foreign), ignore=ignore)
    _refuse_other_nproc(own, wish, path)
    if ignore and not {row.device_id for row in own.rows} <= set(present):
        # A container may have given its device files other numbers: then only the places can be right.
        present = ()
    numbers, mask = _narrowed(own, present, env, str(path), notify)
    _check_choice(wish.devices, own, env, present, str(path))
    own_words = (*wished, *rendezvous.claims(env))
    address, port = (settle(name, own_words, ignore=True) for name in ("master_addr", "master_port"))
    agreed = [site for site in agreed if site.node_rank in (None, node_rank)]
    return Cluster(
        nodes=tuple(_node(place, node, numbers if node is own else {}) for place, node in enumerate(nodes)),
        node_rank=node_rank,
        master_addr=str(address.value) if address else _master(nodes, agreed),
        master_port=int(port.value) if port else _master_port(nodes, agreed, table),
        job_id=paths.job_id(env),
        rank_table=paths.file_for_hccl(table, path, env, root, documented=False),
        log_root=paths.log_root(env, command_line=wish.command_line),
        log_dir=next((site.log_dir for site in sites if site.log_dir), None),
        visible_devices=mask,
        device_files=bool(present),
        one_each=wish.visible == "one",
        physical_device_id=devices.wants_physical_ids(root),
        npus=True,
        platform=platform,
        facts=facts((*wished, *in_table, *rendezvous.claims(env), *said)),
    )


def _refuse_other_nnodes(nodes: tuple[TableNode, ...], wish: Wish, path: Path) -> None:
    if wish.nnodes is not None and wish.nnodes != len(nodes):
        raise RankTableError(
            f"rank table {path}: found {len(nodes)} node{'s' if len(nodes) > 1 else ''}; expected "
            f"{wish.nnodes}, the nnodes asked for: drop that figure, or give the table of this job",
            path=str(path),
        )


def _refuse_other_nproc(own: TableNode, wish: Wish, path: Path) -> None:
    if wish.nproc_per_node is not None and wish.nproc_per_node != len(own.rows):
        raise RankTableError(
            f"rank table {path}: found {len(own.rows)} device{'s' if len(own.rows) > 1 else ''} on this "
            f"node ({printable(own.name)}); expected {wish.nproc_per_node}, the nproc_per_node asked for: "
            "drop that figure, as a table settles it, or give another table",
            path=str(path),
        )


def _master_port(nodes: tuple[TableNode, ...], agreed: list[Site], table: RankTable) -> int | None:
    """The port that all nodes choose alike; None on one node, where any free one is better."""
    if len(nodes) == 1:
        return None
    return next((site.master_port for site in agreed if site.master_port), None) or shared_port(dump(table))


def _master(nodes: tuple[TableNode, ...], agreed: list[Site]) -> str:
    """Tell where node 0 is: as pods know each other, else by the table, else as the platform knows it."""
    if len(nodes) == 1:
        return rendezvous.LOOPBACK
    address = own_node.address_of(nodes[0])
    named = [site for site in agreed if site.master_addr]
    # In pods the table holds the hosts' addresses, which are not theirs.
    if named and (named[0].writes_table or not addresses.distinctive(address)):
        return named[0].reach(named[0].master_addr or "")
    return address


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
            "give the right --nproc-per-node (nproc_per_node)"
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
) -> tuple[dict[int, int], tuple[int, ...] | None]:
    """Compare this node's rows with the devices here: with more in sight, a rank would open another's card.

    Returns:
        The numbers by which the mask names the devices, and the mask that leaves the rows' devices
        alone in sight; None where it needs no change.
    """
    rows = tuple(sorted(row.device_id for row in own.rows))
    if present and (absent := [number for number in rows if number not in present]):
        raise RankTableError(
            f"rank table {path}: found {devices.some(absent, 'device')} for this node "
            f"({printable(own.name)}), which has {devices.some(present, 'NPU')} (device files in /dev); "
            "expected devices that are here: give the table of this node, or mend the device; where this "
            "container numbers its devices anew, let the table count with --ignore-platform",
            path=path,
        )
    seen = devices.visible(env, present) if present else devices.seen_without_files(env, rows)
    if hidden := [number for number in rows if number not in seen]:
        raise RankTableError(
            f"rank table {path}: found {devices.some(hidden, 'device')} for this node "
            f"({printable(own.name)}), which the environment variable {devices.MASK} hides from the "
            "workers; expected all of the node's devices in sight: unset the variable, or give a table of "
            "the devices that it leaves",
            path=path,
        )
    if present:
        numbers = {number: place for place, number in enumerate(present)}
    elif devices.mask_entries(env) == seen:
        numbers = {number: number for number in rows}
    else:
        numbers = {number: place for place, number in enumerate(rows)}
    if rows == seen:
        return numbers, None
    notify(
        f"this node has {devices.some(seen, 'NPU')} in sight, and rank table {path} gives it "
        f"{devices.some(rows, 'NPU')}: {devices.MASK} of the workers is narrowed to these"
    )
    return numbers, tuple(numbers[number] for number in rows)


def _check_choice(
    chosen: str | None, own: TableNode, env: Mapping[str, str], present: tuple[int, ...], path: str
) -> None:
    if chosen is None:
        return
    rows = sorted(row.device_id for row in own.rows)
    wanted = devices.choose(chosen, env, present) if present else devices.parse_list(chosen)
    if list(wanted) != rows:
        raise RankTableError(
            f"rank table {path}: found {devices.some(rows, 'NPU')} for this node, but --devices (devices) "
            f"asks for {devices.some(wanted, 'NPU')}; expected both to agree: leave --devices out, or give "
            "the table of these devices",
            path=path,
        )


def _node(place: int, node: TableNode, numbers: Mapping[int, int]) -> Node:
    local_ranks = {row: index for index, row in enumerate(sorted(row.device_id for row in node.rows))}
    return Node(
        node_rank=place,
        name=printable(node.name),
        devices=tuple(
            Device(
                device_id=row.device_id,
                rank=row.rank,
                local_rank=local_ranks[row.device_id],
                visible_id=numbers.get(row.device_id, -1),
                device_ip=row.device_ip or "",
            )
            for row in node.rows
        ),
    )
