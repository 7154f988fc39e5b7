"""What a rank table says, whichever form it was written in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.findings import Finding

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

NO_FIELDS: Mapping[str, Json] = MappingProxyType({})
"""Shared by all rows without further fields: a table may have a hundred thousand of them."""


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One device and the rank bound to it.

    A struct and no dataclass: these are made by the hundred thousand, in a tenth of the time.

    Attributes:
        rank: Rank of the worker on this device.
        device_id: Physical number of the device on its server.
        device_ip: Address of its network port, several with commas between, None if not given.
        pod: Name of the pod that owns it, "" where the table knows no pods.
        extra: Every further field of the row, as read.
    """

    rank: int
    device_id: int
    device_ip: str | None = None
    pod: str = ""
    extra: Mapping[str, Json] = msgspec.field(default_factory=lambda: NO_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One machine of the table; its rows stand in the order of the file."""

    server_id: str
    rows: tuple[Row, ...]
    extra: Mapping[str, Json] = field(default_factory=lambda: NO_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableNode:
    """The devices that one launcher starts workers on: a server, or one of the pods that share it.

    Attributes:
        name: Server id; with the pod's name where several pods share the server.
        server: The server it is on.
        pods: Names of the pods that own its rows.
        rows: Its rows in rank order.
    """

    name: str
    server: Server
    pods: frozenset[str]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """A complete rank table.

    Attributes:
        form: `v0.1`, `lab`, `v1.0`, `v1.2` or `v2.0`, told by content.
        servers: In the order they are written to a v1.x table.
        extra: Every further field at the top, as read.
        as_is: True when HCCL reads the source text as it stands, so that no new file is needed.
        warnings: What is odd about it, though it can be used.
    """

    form: str
    servers: tuple[Server, ...]
    extra: Mapping[str, Json] = field(default_factory=lambda: NO_FIELDS)
    as_is: bool = field(default=False, compare=False)
    warnings: tuple[Finding, ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(server.rows) for server in self.servers)

    def nodes(self) -> tuple[TableNode, ...]:
        """Split the table into nodes, in the order of their lowest rank."""
        nodes = [node for server in self.servers for node in _nodes_of(server)]
        return tuple(sorted(nodes, key=lambda node: node.rows[0].rank))


def shared_by_pods(server: Server) -> bool:
    """Tell whether the rows of a server belong to more than one pod."""
    first = server.rows[0].pod
    return any(row.pod != first for row in server.rows)


def _nodes_of(server: Server) -> list[TableNode]:
    if not shared_by_pods(server):
        pods = frozenset({server.rows[0].pod} - {""})
        return [TableNode(name=server.server_id, server=server, pods=pods, rows=_by_rank(list(server.rows)))]
    by_pod: dict[str, list[Row]] = {}
    for row in server.rows:
        by_pod.setdefault(row.pod, []).append(row)
    return [
        TableNode(
            name=f"{server.server_id}/{pod}" if pod else server.server_id,
            server=server,
            pods=frozenset({pod} - {""}),
            rows=_by_rank(rows),
        )
        for pod, rows in by_pod.items()
    ]


def _by_rank(rows: list[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: row.rank))
