"""Which of a rank table's nodes is this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.cluster import printable
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.rank_table.v2 import level_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from davincirunsdk.platforms.site import Site
    from davincirunsdk.rank_table.table import TableNode

POD_NAMES = ("BATCH_TASK_CURRENT_INSTANCE", "MA_CURRENT_INSTANCE_NAME", "POD_NAME")
GIVEN_ADDRESSES = ("MA_CURRENT_HOST_IP", "XDL_IP", "HOST_IP", "POD_IP", "MA_CURRENT_IP")
ADDRESS_FIELDS = ("host_ip", "container_ip", "server_ip", "pod_ip")

MOST_LISTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signal:
    """One way in which this node may show in the table."""

    name: str
    values: tuple[str, ...]
    fits: Callable[[TableNode], bool]


def find(
    nodes: tuple[TableNode, ...],
    *,
    env: Mapping[str, str],
    sites: Sequence[Site] = (),
    wanted: int | None = None,
    path: str,
    ignore: bool = False,
) -> int:
    """Tell which node of a rank table this one is.

    A wish decides, if no signal says otherwise, and so does a table of one node. Else each signal,
    the surest first, leaves the nodes that it fits: the pod's name, addresses that the environment
    gives, the machine's own addresses, its name, at last the place that the platform counts. A signal
    that fits none says nothing; loopback and the like fit none, for they would fit all.

    Args:
        nodes: The table's nodes in node rank order.
        env: The environment.
        sites: What platforms that speak of as many nodes say, in order of trust.
        wanted: Node rank that the user gave.
        path: The table, for the message.
        ignore: True if the user allows his node rank to contradict the signals.

    Returns:
        The node rank.

    Raises:
        PlatformError: No signal settles it, or one contradicts the wish; the message lists what is
            known of this host and what stands in the table.
    """
    if wanted is not None:
        if wanted >= len(nodes):
            raise PlatformError(
                f"found node rank {wanted}, but rank table {path} has {len(nodes)} "
                f"node{'s' if len(nodes) > 1 else ''}; expected a node rank from 0 to {len(nodes) - 1}"
            )
    if len(nodes) == 1:
        return 0
    signals = _signals(env)
    left: Sequence[int] = range(len(nodes))
    for signal in signals:
        fitting = [place for place in left if signal.values and signal.fits(nodes[place])]
        if len(fitting) == 1:
            if wanted not in (None, fitting[0]) and not ignore:
                raise PlatformError(
                    f"found node rank {wanted} asked for, but this host is node {fitting[0]} "
                    f"({printable(nodes[fitting[0]].name)}) of rank table {path}, by its {signal.name}; "
                    "expected both to agree: leave --node-rank (node_rank) out, or let it count with "
                    "--ignore-platform (ignore_platform)"
                )
            return fitting[0] if wanted is None else wanted
        left = fitting or left
    if wanted is not None:
        return wanted
    for site in sites:
        if site.node_rank is not None and site.node_rank in left:
            return site.node_rank
    raise PlatformError(_unsettled(nodes, left, signals, sites, path))


def fits(node: TableNode, *, host: str, address: str) -> bool:
    """Tell whether a machine is a node of a rank table, by the name and the address that others know it by.

    Args:
        node: The table's node.
        host: Name of the machine, or of the pod.
        address: Its address.
    """
    return (
        host in node.pods
        or address in _addresses(node)
        or bool(host and _short(node.server.server_id) == _short(host))
    )


def _signals(env: Mapping[str, str]) -> list[_Signal]:
    hosts = _distinct([env.get("HOSTNAME", ""), addresses.host_name()])
    pods = _distinct([env.get(name, "") for name in POD_NAMES])
    given = _distinct([env.get(name, "") for name in GIVEN_ADDRESSES])
    own = tuple(sorted(addresses.own()))
    short = {_short(name) for name in hosts}
    return [
        _Signal(name="pod name", values=pods, fits=lambda node: not node.pods.isdisjoint(pods)),
        _Signal(name="host name", values=hosts, fits=lambda node: not node.pods.isdisjoint(hosts)),
        _Signal(name="given address", values=given, fits=lambda node: not _known_as(node).isdisjoint(given)),
        _Signal(name="own address", values=own, fits=lambda node: not _addresses(node).isdisjoint(own)),
        _Signal(name="host name", values=hosts, fits=lambda node: _short(node.server.server_id) in short),
    ]


def _short(name: str) -> str:
    return name if addresses.is_address(name) else name.partition(".")[0]


def _known_as(node: TableNode) -> set[str]:
    # MA_CURRENT_HOST_IP may be any server id that an earlier init_rank_table() has set, `node_0` too.
    return {node.server.server_id, *_addresses(node)} - {"127.0.0.1", "0.0.0.0", "::1", "::"}


def _addresses(node: TableNode) -> set[str]:
    fields = [node.server.server_id, *(node.server.extra.get(name) for name in ADDRESS_FIELDS)]
    fields += [address for row in node.rows for address in level_addresses(row)]
    return {value for value in fields if isinstance(value, str) and addresses.distinctive(value)}


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))


def _unsettled(
    nodes: tuple[TableNode, ...],
    left: Iterable[int],
    signals: list[_Signal],
    sites: Sequence[Site],
    path: str,
) -> str:
    several = list(left)
    what = "none of" if len(several) == len(nodes) else f"{len(several)} of"
    lines = [
        f"found {what} the {len(nodes)} nodes in rank table {path} to be this host; expected exactly one."
    ]
    known = dict.fromkeys(f"{signal.name} {', '.join(signal.values)}" for signal in signals if signal.values)
    for site in sites:
        if site.node_rank is not None:
            known[f"{site.title}'s node rank {site.node_rank} of {site.nnodes}"] = None
    lines.append(f"  This host: {'; '.join(known)}.")
    for place in several[:MOST_LISTED]:
        node = nodes[place]
        names = [*sorted(node.pods), *sorted(_addresses(node) - {node.server.server_id})]
        also = f" ({', '.join(names)})" if names else ""
        lines.append(f"  Node {place}: {printable(node.name + also)}, {len(node.rows)} devices")
    if len(several) > MOST_LISTED:
        lines.append(f"  ... and {len(several) - MOST_LISTED} more")
    lines.append(
        "  Give --node-rank (node_rank), or set MA_CURRENT_HOST_IP to this host's server id in the table."
    )
    return "\n".join(lines)


def address_of(node: TableNode) -> str:
    """Tell where other nodes reach this one: a real address if the table has any, else its name."""
    fields = [
        node.server.extra.get("host_ip"),
        node.server.server_id,
        *(node.server.extra.get(n) for n in ADDRESS_FIELDS),
    ]
    return next((f for f in fields if isinstance(f, str) and addresses.distinctive(f)), node.server.server_id)
