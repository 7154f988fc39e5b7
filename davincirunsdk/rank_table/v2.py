"""v2.0 (`rank_list`, Ascend 950): JSON to `RankTable` and back.

Here numbers are JSON numbers, and there are no servers: the ranks of one server share the network
instance of layer 0 and are told apart by `local_id`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.rank_table import check
from davincirunsdk.rank_table.findings import MISSING, UNKNOWN, digits, objects, show
from davincirunsdk.rank_table.rows import Block
from davincirunsdk.rank_table.table import Json, RankTable, Row, Server

if TYPE_CHECKING:
    from davincirunsdk.rank_table.findings import Findings, Missing

TOP_FIELDS = frozenset({"rank_list", "rank_count", "version"})
ROW_FIELDS = frozenset({"rank_id", "device_id"})
MOST_LEVELS = 8
MOST_ADDRESSES = 24
MOST_PORTS = 16
LONGEST_INSTANCE = 1024
LAST_DEVICE = 64
NET_TYPES = ("TOPO_FILE_DESC", "CLOS")
ADDRESS_TYPES = ("EID", "IPV4", "IPV6")


def read(top: dict[str, Json], findings: Findings) -> RankTable:
    """Read a `rank_list` table and check it.

    Args:
        top: The decoded text.
        findings: Takes faults and warnings.

    Returns:
        The table; of use only if no fault was found.
    """
    if _is_draft(top):
        findings.fault(
            "rank_list[0].level_list",
            "the shape of an early draft of version 2.0 (level, fabric_type, rank_addrs)",
            "net_layer, net_type and rank_addr_list of version 2.0; HCCL reads the draft no longer",
        )
        return RankTable(form="v2.0", servers=())
    if "status" in top:
        check.status(top["status"], findings)
    if top.get("version") != "2.0":
        findings.warn("version", show(top.get("version", MISSING)), '"2.0", for the content is that of v2.0')
        findings.rewrite = True
    items = objects(top.get("rank_list"), "rank_list", findings, expected="ranks")
    rows: list[Row] = []
    names: list[str] = []
    for index, item in items:
        where = f"rank_list[{index}]"
        rows.append(_read_row(item, where, findings))
        names.append(_levels(item.get("level_list", MISSING), f"{where}.level_list", findings))
    if isinstance(top.get("rank_list"), list):
        counted = _number(top.get("rank_count", MISSING), "rank_count", findings)
        check.declared(counted, len(items), "rank_count", "ranks in rank_list", findings)
    check.ranks([_RankList(server_id="", where="", key="", rows=rows)], findings)
    servers = [] if findings.faults else _servers(rows, names)
    for server in servers:
        _unique_devices(server, findings)
    if not findings.faults:
        check.device_order(
            [
                Block(server_id=server.server_id, where="", key="rank_list", rows=list(server.rows))
                for server in servers
            ],
            findings,
        )
    return RankTable(
        form="v2.0",
        servers=tuple(servers),
        extra={key: value for key, value in top.items() if key not in TOP_FIELDS},
    )


def write(table: RankTable) -> dict[str, Json]:
    """Shape a v2.0 table as it was read, in rank order."""
    rows = sorted((row for server in table.servers for row in server.rows), key=lambda row: row.rank)
    return {
        **table.extra,
        "version": "2.0",
        "rank_count": len(rows),
        "rank_list": [{"rank_id": row.rank, "device_id": row.device_id, **row.extra} for row in rows],
    }


def level_addresses(row: Row) -> list[str]:
    """List the IP addresses of a v2.0 rank on all its network levels; none for a row of another form."""
    levels = row.extra.get("level_list")
    found = []
    for level in levels if isinstance(levels, list) else ():
        entries = level.get("rank_addr_list") if isinstance(level, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            addr = entry.get("addr") if isinstance(entry, dict) and entry.get("addr_type") != "EID" else None
            if isinstance(addr, str):
                found.append(addr)
    return found


class _RankList(Block):
    """All ranks of a v2.0 table: rows stand in `rank_list` itself."""

    def place(self, index: int, name: str) -> str:
        """JSON path of a field of one rank."""
        return f"rank_list[{index}].{name}"


def _is_draft(top: dict[str, Json]) -> bool:
    ranks = top.get("rank_list")
    first = ranks[0] if isinstance(ranks, list) and ranks else None
    levels = first.get("level_list") if isinstance(first, dict) else None
    level = levels[0] if isinstance(levels, list) and levels else None
    return isinstance(level, dict) and "net_layer" not in level and "fabric_type" in level


def _read_row(item: dict[str, Json], where: str, findings: Findings) -> Row:
    device_id = _number(item.get("device_id", MISSING), f"{where}.device_id", findings)
    if device_id > LAST_DEVICE:
        findings.fault(f"{where}.device_id", str(device_id), f"a device from 0 to {LAST_DEVICE}")
    extra = {key: value for key, value in item.items() if key not in ROW_FIELDS}
    extra["local_id"] = _number(item.get("local_id", MISSING), f"{where}.local_id", findings)
    for name in ("device_port", "host_port"):
        if name in item:
            port = _number(item[name], f"{where}.{name}", findings)
            if port != UNKNOWN and not 0 < port < 65536:
                findings.fault(f"{where}.{name}", str(port), "a port from 1 to 65535")
            extra[name] = port
    return Row(
        rank=_number(item.get("rank_id", MISSING), f"{where}.rank_id", findings),
        device_id=device_id,
        extra=extra,
    )


def _number(value: Json | Missing, where: str, findings: Findings) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**10:
        return value
    if isinstance(value, str) and digits(value):
        findings.rewrite = True
        return int(value)
    findings.fault(where, show(value), "a whole number")
    return UNKNOWN


def _levels(value: Json | Missing, where: str, findings: Findings) -> str:
    """Check the network levels of a rank; return its network instance at layer 0, "" without one."""
    levels = objects(value, where, findings, expected="network levels")
    if len(levels) > MOST_LEVELS:
        findings.fault(where, f"a list of {len(levels)}", f"at most {MOST_LEVELS} network levels")
    last = UNKNOWN
    innermost = ""
    for index, level in levels:
        place = f"{where}[{index}]"
        layer = _number(level.get("net_layer", MISSING), f"{place}.net_layer", findings)
        if layer != UNKNOWN:
            if layer >= MOST_LEVELS or layer <= last:
                findings.fault(f"{place}.net_layer", str(layer), "layers from 0 to 7, increasing")
            last = max(layer, last)
        name = level.get("net_instance_id", MISSING)
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_INSTANCE:
            findings.fault(
                f"{place}.net_instance_id", show(name), f"a name of 1 to {LONGEST_INSTANCE} characters"
            )
        elif layer == 0:
            innermost = name
        kinds = NET_TYPES[:1] if layer == 0 else NET_TYPES
        _one_of(level.get("net_type", MISSING), kinds, f"{place}.net_type", findings)
        _addresses(level.get("rank_addr_list", MISSING), f"{place}.rank_addr_list", findings)
    return innermost


def _one_of(value: Json | Missing, words: tuple[str, ...], where: str, findings: Findings) -> None:
    if value not in words:
        findings.fault(where, show(value), " or ".join(words))


def _addresses(value: Json | Missing, where: str, findings: Findings) -> None:
    if not isinstance(value, list) or len(value) > MOST_ADDRESSES:
        findings.fault(where, show(value), f"a list of at most {MOST_ADDRESSES} addresses")
        return
    for index, item in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(item, dict):
            findings.fault(place, show(item), "an object: one address")
            continue
        kind = item.get("addr_type", MISSING)
        _one_of(kind, ADDRESS_TYPES, f"{place}.addr_type", findings)
        addr = item.get("addr", MISSING)
        if not isinstance(addr, str) or not addr:
            findings.fault(f"{place}.addr", show(addr), "an address as a string")
        elif kind in ("IPV4", "IPV6"):
            check.address(addr, f"{place}.addr", findings)
        ports = item.get("ports", MISSING)
        if (
            not isinstance(ports, list)
            or len(ports) > MOST_PORTS
            or not all(isinstance(p, str) for p in ports)
        ):
            findings.fault(f"{place}.ports", show(ports), f"a list of at most {MOST_PORTS} port names")


def _servers(rows: list[Row], names: list[str]) -> list[Server]:
    """Group ranks by network instance; a local_id seen before starts the next server of that instance."""
    grouped: dict[tuple[str, int], list[Row]] = {}
    current: dict[str, int] = {}
    for row, name in sorted(zip(rows, names, strict=True), key=lambda pair: pair[0].rank):
        turn = current.setdefault(name, 0)
        if any(other.extra["local_id"] == row.extra["local_id"] for other in grouped.get((name, turn), ())):
            turn = current[name] = turn + 1
        grouped.setdefault((name, turn), []).append(row)
    return [
        Server(server_id=f"{name}#{turn}" if current[name] else name, rows=tuple(members))
        for (name, turn), members in grouped.items()
    ]


def _unique_devices(server: Server, findings: Findings) -> None:
    seen: set[int] = set()
    for row in server.rows:
        if row.device_id in seen:
            findings.fault(
                "rank_list",
                f"device_id {row.device_id} again on {server.server_id or 'the server'} (rank {row.rank})",
                "each device of a server once",
            )
        seen.add(row.device_id)
