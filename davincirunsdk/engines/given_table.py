"""A rank table that the user gives to a job on several nodes: it says which nodes, devices and ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from davincirunsdk.cluster import printable
from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import RankTableError
from davincirunsdk.host import devices
from davincirunsdk.platforms import own_node, places, read_table, sites_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from davincirunsdk.engines.messages import NodeFacts
    from davincirunsdk.options import JobOptions
    from davincirunsdk.rank_table.table import TableNode

_MOST_LISTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTable:
    """A complete rank table, whose nodes the engine has to find among its own.

    Attributes:
        path: The file.
        nodes: In node rank order.
        text: The table as HCCL reads it.
    """

    path: Path
    nodes: tuple[TableNode, ...]
    text: str

    def check_devices(self, facts: Sequence[NodeFacts]) -> None:
        """Compare the table with what the nodes have, where that can be seen; blocks shortly.

        Args:
            facts: What the agents found, in the table's order.

        Raises:
            RankTableError: Devices of the table are not there, or not in sight.
        """
        from davincirunsdk.rank_table import parse

        wrong = []
        for node, fact in zip(self.nodes, facts, strict=True):
            if not fact.table:
                continue
            (server,) = parse(fact.table, path=fact.host).servers
            here = sorted(row.device_id for row in server.rows)
            rows = sorted(row.device_id for row in node.rows)
            if absent := [number for number in rows if number not in here]:
                wrong.append(
                    f"{devices.some(absent, 'device')} of {printable(node.name)}, where "
                    f"{devices.some(here, 'NPU')} can be used ({fact.host})"
                )
        if wrong:
            raise RankTableError(
                f"rank table {self.path}: found {_listed(wrong)}; expected devices that the nodes have and "
                f"that {devices.MASK} does not hide there: give the table of these nodes",
                path=str(self.path),
            )

    def places_among(self, hosts: Sequence[tuple[str, str]]) -> list[int | None]:
        """Tell which of an engine's nodes each node of the table is.

        Args:
            hosts: Name and address of each node of the engine.

        Returns:
            For each node of the table a place in `hosts`; None where it is not among them.

        Raises:
            RankTableError: A node may be several of them, or several nodes one.
        """
        taken: dict[int, TableNode] = {}
        found: list[int | None] = []
        for node in self.nodes:
            named = [place for place, (host, _) in enumerate(hosts) if host in node.pods]
            fitting = named or [
                place
                for place, (host, address) in enumerate(hosts)
                if own_node.fits(node, host=host, address=address)
            ]
            if len(fitting) > 1:
                listed = ", ".join("{} ({})".format(*hosts[place]) for place in fitting[:_MOST_LISTED])
                raise RankTableError(
                    f"rank table {self.path}: found {len(fitting)} nodes of the cluster that may be "
                    f"{printable(node.name)}: {listed}; expected one, by its name, server_id or host_ip",
                    path=str(self.path),
                )
            place = fitting[0] if fitting else None
            if place is not None and place in taken:
                raise RankTableError(
                    f"rank table {self.path}: found {printable(taken[place].name)} and "
                    f"{printable(node.name)} to be one node of the cluster, "
                    f"{'{} ({})'.format(*hosts[place])}; expected a node for each",
                    path=str(self.path),
                )
            if place is not None:
                taken[place] = node
            found.append(place)
        return found


async def read_given(options: JobOptions, notify: Callable[[str], None]) -> GivenTable | None:
    """Wait for the table that the user gave until it is complete, as on one node.

    Args:
        options: What the user asked for.
        notify: Takes lines for people about what is waited for.

    Returns:
        The table, None where none was given.

    Raises:
        RankTableError: It is wrong, names no nodes, or is not what other options say.
        RankTableTimeoutError: It did not become complete in time.
    """
    given = options.rank_table
    if given is None:
        return None
    place = await in_thread(lambda: places.find({}, given=given))
    assert place is not None
    sites = await in_thread(lambda: sites_of(os.environ))
    table = await read_table(place, os.environ, sites, options.rank_table_timeout, notify)
    path = place.path
    nodes = table.nodes()
    if table.form == "v2.0":
        raise RankTableError(
            f"rank table {path}: found version 2.0, which names no hosts; expected version 1.x, by which the "
            "nodes can be found, or start davincirun on each node without --engine",
            path=str(path),
        )
    if options.nnodes not in (None, len(nodes)):
        raise RankTableError(
            f"rank table {path}: found {len(nodes)} node{'s' if len(nodes) > 1 else ''}; expected "
            f"{options.nnodes}, the nnodes asked for: drop that figure, or give the table of this job",
            path=str(path),
        )
    for node in nodes:
        if options.nproc_per_node not in (None, len(node.rows)):
            raise RankTableError(
                f"rank table {path}: found {len(node.rows)} device{'s' if len(node.rows) > 1 else ''} of "
                f"{printable(node.name)}; expected {options.nproc_per_node}, the nproc_per_node asked for: "
                "drop that figure, as a table settles it, or give another table",
                path=str(path),
            )
    dump = (await in_thread(lambda: import_module("davincirunsdk.rank_table"))).dump
    return GivenTable(path=path, nodes=nodes, text=await in_thread(dump, table))


def _listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return "; ".join(texts[:_MOST_LISTED]) + more
