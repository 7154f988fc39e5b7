"""A node's entry in the rank table of its platform, which knows addresses that a container may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.platforms import own_node, places, read_table, sites_of
from davincirunsdk.rank_table import dump, parse
from davincirunsdk.rank_table.table import RankTable, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from davincirunsdk.rank_table.table import Json


async def own_entry(
    chosen: Sequence[int],
    env: Mapping[str, str],
    root: Path,
    *,
    limit: float | None = 0.0,
    notify: Callable[[str], None] = lambda _: None,
) -> RankTable | None:
    """Cut this node's entry out of the platform's table, when that is complete.

    The platform's table as a whole is of no use: an engine's job may have fewer nodes, in another order.

    Args:
        chosen: Physical numbers of the NPUs to use.
        env: The environment.
        root: Folder that stands for `/`.
        limit: Seconds to wait for the table, None for as long as a job of one node does.
        notify: Takes lines for people about what is waited for.

    Returns:
        A table of this node alone, ranks from 0; None where there is no table.

    Raises:
        RankTableError: The table is not correct, not there, or does not become complete in time.
        PlatformError: This node with these NPUs is not to be found in it.
    """
    place = await in_thread(lambda: places.find(env, root=root))
    if place is None:
        return None
    sites = await in_thread(lambda: sites_of(env))
    table = await read_table(place, env, sites, limit, notify)
    return await in_thread(_cut, table, str(place.path), chosen, env)


def _cut(table: RankTable, path: str, chosen: Sequence[int], env: Mapping[str, str]) -> RankTable:
    if table.form == "v2.0":
        raise RankTableError(f"rank table {path}: found version 2.0, which names no hosts", path=path)
    nodes = table.nodes()
    own = nodes[own_node.find(nodes, env=env, sites=sites_of(env, len(nodes)), path=path)]
    rows = {row.device_id: row for row in own.rows}
    if missing := [str(number) for number in chosen if number not in rows]:
        raise PlatformError(
            f"found no device {', '.join(missing)} for {own.name} in rank table {path}; expected all NPUs "
            "that are to be used"
        )
    server = Server(
        server_id=own.server.server_id,
        rows=tuple(
            msgspec.structs.replace(rows[number], rank=rank, pod="") for rank, number in enumerate(chosen)
        ),
        extra=own.server.extra,
    )
    form = "v1.2" if table.form == "v1.2" else "v1.0"
    extra = _super_pod(table, server.server_id) if form == "v1.2" else {}
    return parse(dump(RankTable(form=form, servers=(server,), extra=extra)), path=path)


def _super_pod(table: RankTable, server_id: str) -> dict[str, Json]:
    listed = table.extra.get("super_pod_list")
    for pod in listed if isinstance(listed, list) else ():
        members = pod.get("server_list") if isinstance(pod, dict) else None
        own: list[Json] = [
            member
            for member in (members if isinstance(members, list) else ())
            if isinstance(member, dict) and member.get("server_id") == server_id
        ]
        if own and isinstance(pod, dict):
            return {"super_pod_list": [{**pod, "server_list": own}]}
    return {}
