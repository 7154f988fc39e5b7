"""`davincirunctl doctor --where`: which source says what about this place, and what a job here would be."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from davincirunsdk.cluster import printable
from davincirunsdk.options import Wish
from davincirunsdk.platforms.where import Whereabouts, where

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def look(rank_table: Path | None, root: Path) -> Whereabouts:
    """Find out where we are; starts nothing and does not wait for a table."""
    wish = Wish(rank_table=None if rank_table is None else rank_table.absolute())
    return asyncio.run(where(os.environ, wish, root=root))


def lines(found: Whereabouts) -> Iterator[str]:
    """Word it for people."""
    yield f"platform: {found.platform}"
    if found.rank_table is not None:
        by = f", named by {found.named_by}" if found.named_by else ""
        yield f"rank table: {printable(str(found.rank_table))}{by}"
    else:
        yield "rank table: none"
    for fact in found.facts:
        yield printable(str(fact))
    cluster = found.cluster
    if cluster is not None:
        count = len(cluster.nodes)
        devices = ", ".join(
            f"rank {device.rank} on device {device.device_id}" for device in cluster.node.devices[:16]
        )
        more = f" and {len(cluster.node.devices) - 16} more" if len(cluster.node.devices) > 16 else ""
        yield f"a job here: node {cluster.node_rank} of {count}, {cluster.world_size} workers in all"
        yield f"on this node: {devices}{more}"
        port = cluster.master_port or "any free one"
        yield f"workers meet at {printable(cluster.master_addr)}, port {port}"
    for note in found.notes:
        yield printable(note)
    if found.problem:
        yield "no job can be started here:"
        yield from (f"  {printable(line)}" for line in found.problem.splitlines())


def as_data(found: Whereabouts) -> dict[str, object]:
    """Give it as one JSON object, stable for programs."""
    cluster = found.cluster
    return {
        "platform": found.platform,
        "rank_table": str(found.rank_table) if found.rank_table is not None else None,
        "rank_table_named_by": found.named_by or None,
        "facts": [
            {"name": fact.name, "value": fact.value, "source": fact.source, "believed": fact.believed}
            for fact in found.facts
        ],
        "node_rank": cluster.node_rank if cluster is not None else None,
        "nnodes": len(cluster.nodes) if cluster is not None else None,
        "world_size": cluster.world_size if cluster is not None else None,
        "devices": [
            {"rank": device.rank, "local_rank": device.local_rank, "npu": device.device_id}
            for device in (cluster.node.devices if cluster is not None else ())
        ],
        "master_addr": cluster.master_addr if cluster is not None else None,
        "master_port": cluster.master_port if cluster is not None else None,
        "problem": found.problem or None,
    }
