"""New rank tables: from what a host itself shows, and from the tables of several hosts."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host import addresses, devices
from davincirunsdk.host.tools import ask, find_tool
from davincirunsdk.rank_table import dump, parse
from davincirunsdk.rank_table.findings import show
from davincirunsdk.rank_table.super_pod import find_super_pod
from davincirunsdk.rank_table.table import NO_FIELDS, RankTable, Row, Server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from davincirunsdk.rank_table.table import Json

_LOGICAL_SUPER_POD = "HCCL_LOGIC_SUPERPOD_ID"
"""By this variable a physical super pod is divided into logical ones."""
_TOOL_LINE = re.compile(r"^\s*(?:ipaddr|ipv6_address)\s*:\s*(\S+)", re.MULTILINE)
_CONF_LINE = re.compile(r"^\s*address_(\d+)\s*=\s*(\S+)", re.MULTILINE)


def make(
    *,
    root: Path = Path("/"),
    device_ids: Sequence[int] = (),
    server_id: str | None = None,
    search_path: str | None = None,
) -> RankTable:
    """Make the table of one host: its devices in increasing number, ranks from 0.

    The devices are the device files; their addresses are what hccn_tool says, else
    `/etc/hccn.conf`, else left out, which HCCL accepts on one server. Where npu-smi knows of a super
    pod (Atlas A3) the table is v1.2 and tells the host's place in it, else v1.0.

    Args:
        root: Folder to look below for all of this: `/`, or a tree collected from another host.
        device_ids: Physical numbers to use; all that are there if empty.
        server_id: What to call the host; its address, else its name, if None.
        search_path: Where to look for hccn_tool and npu-smi as well, as in PATH; only used with `/` as
            root.

    Returns:
        The table.

    Raises:
        PlatformError: No devices, or not those asked for, or no name for the host, or facts of a super
            pod that contradict each other.
    """
    present = devices.npus(root)
    chosen = tuple(sorted(set(device_ids))) or present
    if not chosen:
        raise PlatformError(
            f"found no NPU (no device file such as {root / 'dev/davinci0'}); expected at least one: run this "
            "on a host with NPUs, or say which it has with --devices"
        )
    missing = [str(number) for number in chosen if present and number not in present]
    if missing:
        raise PlatformError(
            f"found NPUs {', '.join(map(str, present))}; expected {', '.join(missing)} as well, as asked for "
            "with --devices"
        )
    found = _addresses(root, chosen, search_path)
    name = server_id or _server_id(root)
    smi = find_tool("npu-smi", root, search_path)
    pod = find_super_pod(smi, present or chosen, chosen) if smi else None
    rows = tuple(
        Row(
            rank=rank,
            device_id=number,
            device_ip=found.get(number),
            extra={"super_device_id": pod.device_ids[number]} if pod else NO_FIELDS,
        )
        for rank, number in enumerate(chosen)
    )
    extra: dict[str, Json] = {}
    if pod:
        logical = os.environ.get(_LOGICAL_SUPER_POD) if root == Path("/") else None
        extra["super_pod_list"] = [
            {"super_pod_id": logical or pod.name, "server_list": [{"server_id": name}]}
        ]
    server = Server(server_id=name, rows=rows)
    return parse(dump(RankTable(form="v1.2" if pod else "v1.0", servers=(server,), extra=extra)))


def merge(tables: Sequence[tuple[str, RankTable]], *, keep_order: bool = False) -> RankTable:
    """Join the tables of several hosts into one, ranks numbered anew.

    Args:
        tables: Name (for messages) and table of each.
        keep_order: True to rank the servers in the order given. False to rank them in text order of
            their ids: the same result for any order of the arguments, and what MindSpore expects.

    Returns:
        The table, v1.2 if any of them is.

    Raises:
        RankTableError: A server stands in two tables, or the result breaks a rule.
    """
    seen: dict[str, str] = {}
    servers: list[Server] = []
    extra: dict[str, Json] = {}
    super_pods: dict[str, dict[str, Json]] = {}
    for name, table in tables:
        if table.form == "v2.0":
            raise RankTableError(
                f"rank table {name}: found version 2.0; expected v0.1 or v1.x to merge", path=name
            )
        for server in sorted(table.servers, key=lambda server: min(row.rank for row in server.rows)):
            if server.server_id in seen:
                raise RankTableError(
                    f"rank table {name}: found server {show(server.server_id)}, which is in "
                    f"{seen[server.server_id]} as well; expected each server once",
                    path=name,
                )
            seen[server.server_id] = name
            servers.append(server)
        for key, value in table.extra.items():
            if key != "super_pod_list":
                extra.setdefault(key, value)
        _add_super_pods(super_pods, table.extra)
    if super_pods:
        extra["super_pod_list"] = [
            super_pods[key] for key in (super_pods if keep_order else sorted(super_pods))
        ]
    if not keep_order:
        servers.sort(key=lambda server: server.server_id)
    form = "v1.2" if any(table.form == "v1.2" for _, table in tables) else "v1.0"
    merged = RankTable(form=form, servers=tuple(_renumbered(servers)), extra=extra)
    return parse(dump(merged), path="(merged)")


def _renumbered(servers: list[Server]) -> list[Server]:
    rank = 0
    result = []
    for server in servers:
        rows = [
            msgspec.structs.replace(row, rank=rank + place)
            for place, row in enumerate(sorted(server.rows, key=lambda row: row.rank))
        ]
        rank += len(rows)
        result.append(replace(server, rows=tuple(rows)))
    return result


def _add_super_pods(pods: dict[str, dict[str, Json]], extra: Mapping[str, Json]) -> None:
    """Add a table's super pods; hosts of one super pod come in several tables under one id."""
    listed = extra.get("super_pod_list")
    for pod in listed if isinstance(listed, list) else ():
        if not isinstance(pod, dict):
            continue
        known = pods.setdefault(str(pod.get("super_pod_id")), {**pod, "server_list": []})
        members, more = known["server_list"], pod.get("server_list")
        if isinstance(members, list) and isinstance(more, list):
            known["server_list"] = sorted([*members, *more], key=str)


def _addresses(root: Path, numbers: Sequence[int], search_path: str | None) -> dict[int, str]:
    tool = find_tool("hccn_tool", root, search_path)
    found: dict[int, str] = {}
    for number in numbers if tool else ():
        address = _ask_address(str(tool), number)
        if address is not None:
            found[number] = address
    conf = root / "etc/hccn.conf"
    if len(found) < len(numbers):
        try:
            text = conf.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return found
        for match in _CONF_LINE.finditer(text):
            if int(match[1]) in numbers and addresses.is_address(match[2]):
                found.setdefault(int(match[1]), match[2])
    return found


def _ask_address(tool: str, number: int) -> str | None:
    for words in (["-ip", "-g"], ["-ip", "-inet6", "-g"]):
        match = _TOOL_LINE.search(ask([tool, "-i", str(number), *words]))
        if match and addresses.is_address(match[1]):
            return match[1]
    return None


def _server_id(root: Path) -> str:
    if root != Path("/"):
        try:
            name = (root / "etc/hostname").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            name = ""
        if not name:
            raise PlatformError(
                f"found no host name in {root / 'etc/hostname'}; expected one: give --server-id"
            )
        return name
    name = addresses.host_name()
    try:
        looked_up = socket.gethostbyname(name)
    except OSError:
        looked_up = ""
    if addresses.distinctive(looked_up):
        return looked_up
    # Many hosts list their own name as 127.0.1.1, by which nobody else would find them.
    own = sorted(address for address in addresses.own() if ":" not in address)
    return own[0] if len(own) == 1 else name
