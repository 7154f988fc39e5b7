"""v1.0 and v1.2 (`server_list`): JSON to `RankTable` and back.

All scalars are strings, for HCCL reads nothing else. v1.2 adds super pods to the same shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.rank_table import check
from davincirunsdk.rank_table.findings import MISSING, number, objects, show, text
from davincirunsdk.rank_table.rows import Block, read_rows, rest, strings
from davincirunsdk.rank_table.table import Json, RankTable, Server, shared_by_pods

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.rank_table.findings import Findings
    from davincirunsdk.rank_table.table import Row

TOP_FIELDS = frozenset({"status", "version", "server_count", "server_list"})
SERVER_FIELDS = frozenset({"server_id", "device"})
LONGEST_SERVER_ID = 64


def read(top: dict[str, Json], findings: Findings) -> RankTable:
    """Read a `server_list` table and check it.

    Args:
        top: The decoded text.
        findings: Takes faults and warnings.

    Returns:
        The table; of use only if no fault was found.
    """
    items = objects(top.get("server_list"), "server_list", findings, expected="servers")
    blocks = []
    extras: list[Mapping[str, Json]] = []
    for index, item in items:
        where = f"server_list[{index}]"
        server_id = text(
            item.get("server_id", MISSING),
            f"{where}.server_id",
            findings,
            expected="the name or address of the server",
            most=LONGEST_SERVER_ID,
        )
        rows = read_rows(item.get("device", MISSING), f"{where}.device", findings)
        blocks.append(Block(server_id=server_id, where=where, key="device", rows=rows))
        more = rest(item, SERVER_FIELDS)
        check.address(more.get("host_ip"), f"{where}.host_ip", findings)
        extras.append(more)
    declared = top.get("server_count", MISSING)
    if declared is not MISSING and isinstance(top.get("server_list"), list):
        counted = number(declared, "server_count", findings)
        check.declared(counted, len(items), "server_count", "servers in server_list", findings)
    extra = {key: value for key, value in top.items() if key not in TOP_FIELDS}
    form = _form(top, blocks, findings)
    check.status(top.get("status", MISSING), findings)
    check.unique_servers(blocks, findings)
    check.ranks(blocks, findings)
    check.devices(blocks, findings, shared=False)
    check.addresses(blocks, findings, needed=len(blocks) > 1 and not check.one_super_pod(extra, blocks))
    check.row_fields(blocks, findings)
    check.super_pods(extra, blocks, findings)
    check.order(blocks, findings, ring=form == "v1.0")
    _stringify_super_pods(extra, findings)
    return RankTable(
        form=form,
        servers=tuple(
            Server(server_id=block.server_id, rows=tuple(block.rows), extra=more)
            for block, more in zip(blocks, extras, strict=True)
        ),
        extra=extra,
    )


def write(table: RankTable) -> dict[str, Json]:
    """Shape a table as v1.x: one that was read as v0.1 or lab mode becomes v1.0 by this.

    Args:
        table: Any table but a v2.0 one.

    Returns:
        The object to encode; every scalar that HCCL knows is a string.
    """
    return {
        "status": "completed",
        "version": "1.2" if table.form == "v1.2" else "1.0",
        "server_count": str(len(table.servers)),
        "server_list": [_write_server(server) for server in table.servers],
        **table.extra,
    }


def _write_server(server: Server) -> dict[str, Json]:
    name_pods = shared_by_pods(server)
    return {
        "server_id": server.server_id,
        "device": [_write_row(row, name_pod=name_pods) for row in server.rows],
        **server.extra,
    }


def _write_row(row: Row, *, name_pod: bool) -> Json:
    item: dict[str, Json] = {"device_id": str(row.device_id)}
    if row.device_ip is not None:
        item["device_ip"] = row.device_ip
    item["rank_id"] = str(row.rank)
    if name_pod:
        item["pod_name"] = row.pod
    item.update(row.extra)
    return item


def _form(top: dict[str, Json], blocks: list[Block], findings: Findings) -> str:
    super_pod = "super_pod_list" in top or any(
        "super_device_id" in row.extra for block in blocks for row in block.rows
    )
    version = top.get("version", MISSING)
    # A plain table may call itself 1.2 (a super pod machine in plain mode): HCCL reads both alike.
    if version == "1.2":
        return "v1.2"
    form = "v1.2" if super_pod else "v1.0"
    if version != form[1:]:
        findings.rewrite = True
        findings.warn(
            "version",
            show(version),
            f'"{form[1:]}", for the content is that of {form}; HCCL gets a corrected copy',
        )
    return form


def _stringify_super_pods(extra: dict[str, Json], findings: Findings) -> None:
    pods = extra.get("super_pod_list")
    if not isinstance(pods, list):
        return
    extra["super_pod_list"] = [
        strings(dict(pod), frozenset({"super_pod_id"}), findings) if isinstance(pod, dict) else pod
        for pod in pods
    ]
