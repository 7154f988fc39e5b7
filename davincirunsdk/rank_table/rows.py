"""Device rows as v0.1 and v1.x share them: JSON objects to `Row`s, with the place each came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.rank_table.findings import MISSING, UNKNOWN, number, show
from davincirunsdk.rank_table.table import NO_FIELDS, Json, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.rank_table.findings import Findings, Missing

PORT_FIELDS = ("device_port", "host_port", "device_vnic_port", "backup_device_port")
STRING_FIELDS = frozenset({*PORT_FIELDS, "super_device_id", "backup_device_ip"})
KNOWN_FIELDS = frozenset({"device_id", "device_ip", "rank_id"})

SMALL: Mapping[Json, int] = {str(number): number for number in range(64)}
"""Device numbers as they are written, but for the strangest tables."""

UNREADABLE = "\0"
"""Stands for an address that was no text; its fault is noted already."""

NO_ROW = Row(rank=UNKNOWN, device_id=UNKNOWN, device_ip=UNREADABLE)
"""Keeps the place of a list item that is no object."""


@dataclass(slots=True, kw_only=True)
class Block:
    """The devices that stand together in the text, for the rules to walk over.

    Attributes:
        server_id: The server they are on, "" if it could not be read.
        where: JSON path of the server or instance.
        key: Name of the list in it.
        rows: One per list item, so that the index is the place in the text.
    """

    server_id: str
    where: str
    key: str
    rows: list[Row]

    def place(self, index: int, name: str) -> str:
        """JSON path of a field of one row."""
        return f"{self.where}.{self.key}[{index}].{name}"


def read_rows(
    value: Json | Missing,
    where: str,
    findings: Findings,
    *,
    numbered: bool = True,
    rank: int = UNKNOWN,
    pod: str = "",
) -> list[Row]:
    """Read the device list of a server or instance.

    Args:
        value: The list as decoded.
        where: JSON path of the list.
        findings: Takes the faults.
        numbered: True where each row has its `rank_id`.
        rank: Rank of the rows where they have none.
        pod: Name of the pod that owns the devices.

    Returns:
        One row per item; fields that could not be read are `UNKNOWN`.
    """
    if not isinstance(value, list) or not value:
        findings.fault(where, show(value), "a list of devices, at least one")
        return []
    rows: list[Row] = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            findings.fault(f"{where}[{index}]", show(item), "an object: one device")
            rows.append(NO_ROW)
            continue
        # The usual case stands in line: the largest tables have over a hundred thousand rows.
        get = item.get
        raw = get("device_id", MISSING)
        device_id = SMALL.get(raw) if type(raw) is str else None
        if device_id is None:
            device_id = number(raw, f"{where}[{index}].device_id", findings)
        known = 1
        if numbered:
            raw = get("rank_id", MISSING)
            if type(raw) is str and len(raw) < 11 and raw.isascii() and raw.isdigit():
                rank = int(raw)
            else:
                rank = number(raw, f"{where}[{index}].rank_id", findings)
            known = 2
        device_ip = get("device_ip")
        if device_ip is not None:
            known += 1
            if type(device_ip) is not str:
                findings.fault(f"{where}[{index}].device_ip", show(device_ip), "an IP address as a string")
                device_ip = UNREADABLE
        if len(item) == known:
            rows.append(Row(rank=rank, device_id=device_id, device_ip=device_ip, pod=pod, extra=NO_FIELDS))
        else:
            extra = _extra(item, findings)
            owner = pod or _pod(extra)
            rows.append(Row(rank=rank, device_id=device_id, device_ip=device_ip, pod=owner, extra=extra))
    return rows


def _extra(item: dict[str, Json], findings: Findings) -> Mapping[str, Json]:
    return strings(
        {key: value for key, value in item.items() if key not in KNOWN_FIELDS}, STRING_FIELDS, findings
    )


def rest(item: dict[str, Json], known: frozenset[str]) -> Mapping[str, Json]:
    """Take the fields that we do not know; mostly there are none."""
    if item.keys() <= known:
        return NO_FIELDS
    return {key: value for key, value in item.items() if key not in known}


def strings(fields: dict[str, Json], names: frozenset[str], findings: Findings) -> dict[str, Json]:
    """Turn numbers into strings where HCCL accepts nothing else; it reads no JSON number in v1.x."""
    for key in names & fields.keys():
        value = fields[key]
        if isinstance(value, int) and not isinstance(value, bool):
            fields[key] = str(value)
            findings.rewrite = True
    return fields


def _pod(extra: Mapping[str, Json]) -> str:
    # Our own addition to a v1.0 file where pods share a server; HCCL leaves unknown keys alone.
    pod = extra.get("pod_name")
    return pod if isinstance(pod, str) else ""
