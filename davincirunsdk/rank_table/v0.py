"""v0.1 (cloud mode) and lab mode (`group_list`): JSON to `RankTable`, ranks worked out on the way.

v0.1 writes no ranks. Three orders are in use (HCCL's, MindSpore's, ModelArts'); ModelArts' one is
kept because the scripts of ModelArts users count on it: instances by the number after the last `-`
of their pod name, devices as listed, groups in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.rank_table import check
from davincirunsdk.rank_table.findings import MISSING, UNKNOWN, digits, number, objects, show, text
from davincirunsdk.rank_table.rows import Block, read_rows, rest
from davincirunsdk.rank_table.table import Json, RankTable, Row, Server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.rank_table.findings import Findings

LONGEST_NAME = 127
TOP_FIELDS = frozenset({"status", "group_count", "group_list", "version", "server_count", "server_list"})
LAB_FIELDS = frozenset(
    {
        "board_id",
        "chip_info",
        "deploy_mode",
        "para_plane_nic_location",
        "para_plane_nic_name",
        "para_plane_nic_num",
    }
)
# `device` is what v1.0 calls the list: an unknown field of that name cannot be carried over.
INSTANCE_FIELDS = frozenset({"pod_name", "server_id", "devices", "device", "rank_id"})
GROUP_COUNTS = ("device_count", "instance_count")


@dataclass(slots=True, kw_only=True)
class _Instance:
    """A pod's entry (v0.1) or one device's (lab mode), with what is needed to rank it."""

    block: Block
    pod: str
    extra: Mapping[str, Json]
    rows: list[Row]  # in the order they are ranked; `block` keeps that of the text


def read(top: dict[str, Json], findings: Findings) -> RankTable:
    """Read a `group_list` table, check it and number its ranks.

    Args:
        top: The decoded text.
        findings: Takes faults and warnings.

    Returns:
        The table as v1.0 would say it; of use only if no fault was found.
    """
    findings.rewrite = True
    check.status(top.get("status", MISSING), findings)
    groups = objects(top.get("group_list"), "group_list", findings, expected="groups")
    lab = _is_lab(top, groups)
    _count(top, "group_count", "group_count", len(groups), "groups in group_list", findings)
    names: dict[str, str] = {}
    listed: list[_Instance] = []
    ordered: list[_Instance] = []
    for index, group in groups:
        where = f"group_list[{index}]"
        if not lab:
            _group_name(group, where, names, findings)
        instances = _read_group(group, where, findings, lab=lab)
        listed += instances
        ordered += instances if lab else _in_order(instances, where, findings)
    if groups and not ordered and not findings.faults:
        findings.fault("group_list", "only groups without devices", "at least one device")
    blocks = [instance.block for instance in listed]
    if not lab:
        _unique_pods(listed, findings)
    check.devices(blocks, findings, shared=True)
    check.addresses(blocks, findings, needed=len({block.server_id for block in blocks}) > 1)
    check.row_fields(blocks, findings)
    servers = _merge(ordered, numbered=lab)
    if lab:
        check.ranks(blocks, findings)
        servers.sort(key=lambda server: min(row.rank for row in server.rows))
    merged = [
        Block(server_id=s.server_id, where="group_list", key="devices", rows=list(s.rows)) for s in servers
    ]
    check.order(merged, findings, ring=True, by_device=not lab)
    dropped = TOP_FIELDS | LAB_FIELDS if lab else TOP_FIELDS
    return RankTable(
        form="lab" if lab else "v0.1",
        servers=tuple(servers),
        extra={key: value for key, value in top.items() if key not in dropped},
    )


def _is_lab(top: dict[str, Json], groups: list[tuple[int, dict[str, Json]]]) -> bool:
    """Tell lab mode by its mark, or by instances that have a rank and no pod."""
    if "deploy_mode" in top:
        return True
    listed = groups[0][1].get("instance_list") if groups else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return isinstance(first, dict) and "rank_id" in first and "pod_name" not in first


def _read_group(group: dict[str, Json], where: str, findings: Findings, *, lab: bool) -> list[_Instance]:
    listed = group.get("instance_list", MISSING)
    if listed == [] and group.get("device_count") in ("0", 0):
        findings.warn(where, "a group without devices", "devices in every group; this one is left out")
        return []
    items = objects(listed, f"{where}.instance_list", findings, expected="instances")
    instances = [_read_instance(item, f"{where}.instance_list[{i}]", findings, lab=lab) for i, item in items]
    devices = sum(len(instance.block.rows) for instance in instances)
    servers = len({instance.block.server_id for instance in instances})
    if isinstance(listed, list):
        for key, counted, what in (
            ("instance_count", len(listed), "instances in instance_list"),
            ("device_num" if lab else "device_count", devices, "devices in all instances of the group"),
        ):
            _count(group, key, f"{where}.{key}", counted, what, findings)
        if lab and "server_num" in group:
            _count(
                group,
                "server_num",
                f"{where}.server_num",
                servers,
                "different servers in the group",
                findings,
            )
    return instances


def _read_instance(item: dict[str, Json], where: str, findings: Findings, *, lab: bool) -> _Instance:
    pod = ""
    rank = UNKNOWN
    if lab:
        rank = number(item.get("rank_id", MISSING), f"{where}.rank_id", findings)
    else:
        pod = text(
            item.get("pod_name", MISSING),
            f"{where}.pod_name",
            findings,
            expected="the name of the pod",
            most=LONGEST_NAME,
        )
    server_id = text(
        item.get("server_id", MISSING),
        f"{where}.server_id",
        findings,
        expected="the name or address of the server",
        most=64,
    )
    rows = read_rows(
        item.get("devices", MISSING), f"{where}.devices", findings, numbered=False, rank=rank, pod=pod
    )
    if lab and len(rows) > 1:
        findings.fault(
            f"{where}.devices", f"a list of {len(rows)}", "one device, for the instance has one rank_id"
        )
    return _Instance(
        block=Block(server_id=server_id, where=where, key="devices", rows=rows),
        pod=pod,
        rows=rows,
        extra=rest(item, INSTANCE_FIELDS),
    )


def _group_name(group: dict[str, Json], where: str, names: dict[str, str], findings: Findings) -> None:
    place = f"{where}.group_name"
    name = group.get("group_name", MISSING)
    if not isinstance(name, str):
        # The conversion leaves it out, so a table without it can be used all the same.
        findings.warn(place, show(name), "a name; HCCL itself would refuse the table")
    elif len(name) > LONGEST_NAME:
        findings.fault(place, f"a text of {len(name)} characters", f"at most {LONGEST_NAME} characters")
    elif name in names:
        findings.fault(
            place, f"{show(name)} again (first at {names[name]})", "a different name for each group"
        )
    else:
        names[name] = place


def _count(
    fields: dict[str, Json], key: str, where: str, counted: int, what: str, findings: Findings
) -> None:
    value = fields.get(key, MISSING)
    if value is MISSING:
        findings.warn(
            where, show(MISSING), f'"{counted}", the number of {what}; HCCL itself would refuse the table'
        )
        return
    check.declared(number(value, where, findings), counted, where, what, findings)


def _unique_pods(instances: list[_Instance], findings: Findings) -> None:
    seen: dict[str, str] = {}
    for instance in instances:
        place = f"{instance.block.where}.pod_name"
        if not instance.pod:
            continue
        if instance.pod in seen:
            findings.fault(
                place,
                f"{show(instance.pod)} again (first at {seen[instance.pod]})",
                "a different pod_name for each",
            )
        seen.setdefault(instance.pod, place)


def _in_order(instances: list[_Instance], where: str, findings: Findings) -> list[_Instance]:
    if len(instances) < 2:
        return instances
    numbers = [_pod_number(instance.pod) for instance in instances]
    if UNKNOWN not in numbers:
        return [pair[1] for pair in sorted(zip(numbers, instances, strict=True), key=lambda pair: pair[0])]
    odd = instances[numbers.index(UNKNOWN)]
    findings.warn(
        f"{odd.block.where}.pod_name",
        show(odd.pod),
        f"a number after the last '-'; without it the instances of {where} are ranked in HCCL's own order, "
        "by server_id as text and then by device_id",
    )
    for instance in instances:
        instance.rows = sorted(instance.rows, key=lambda row: row.device_id)
    return sorted(
        instances, key=lambda it: (it.block.server_id, it.rows[0].device_id if it.rows else UNKNOWN)
    )


def _pod_number(pod: str) -> int:
    tail = pod.rpartition("-")[2]
    return int(tail) if digits(tail) else UNKNOWN


def _merge(instances: list[_Instance], *, numbered: bool) -> list[Server]:
    """Join the instances of a server: HCCL wants each server once, and its ranks without a gap.

    Args:
        instances: In the order they are ranked.
        numbered: True where the rows have their ranks already.

    Returns:
        The servers in the order of their first instance.
    """
    by_server: dict[str, list[_Instance]] = {}
    for instance in instances:
        if instance.rows:
            by_server.setdefault(instance.block.server_id, []).append(instance)
    rank = 0
    servers = []
    for server_id, members in by_server.items():
        rows = [row for instance in members for row in instance.rows]
        if not numbered:
            rows = [
                Row(
                    rank=rank + place,
                    device_id=row.device_id,
                    device_ip=row.device_ip,
                    pod=row.pod,
                    extra=row.extra,
                )
                for place, row in enumerate(rows)
            ]
        rank += len(rows)
        extra: Mapping[str, Json] = members[0].extra
        for instance in members[1:]:
            extra = {**instance.extra, **extra}
        servers.append(Server(server_id=server_id, rows=tuple(rows), extra=extra))
    return servers
