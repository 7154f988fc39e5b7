"""The rules that HCCL, MindSpore and a launcher hold a rank table to; each names the place it was broken.

A broken rule that would stop the job is a fault, one that some software or chip alone minds is a
warning. Rules leave alone what could not be read: that is a fault already.
"""

from __future__ import annotations

from bisect import bisect_right
from ipaddress import ip_address
from itertools import accumulate
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING

from davincirunsdk.rank_table.findings import UNKNOWN, digits, show
from davincirunsdk.rank_table.rows import PORT_FIELDS, UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk.rank_table.findings import Findings, Missing
    from davincirunsdk.rank_table.rows import Block
    from davincirunsdk.rank_table.table import Json, Row

READY = frozenset({"completed", "complete"})
"""Words for a finished table, in any case: official pages have both, HCCL itself reads the first only."""

IPV4, IPV6 = int(AF_INET), int(AF_INET6)

RING = 4
"""Devices of one ring on an Atlas 910A board: 0-3 and 4-7."""


def status(value: Json | Missing, findings: Findings) -> None:
    """The table must be finished."""
    if not isinstance(value, str) or value.lower() not in READY:
        findings.fault("status", show(value), '"completed"')
    elif value != "completed":
        findings.rewrite = True


def declared(number: int, counted: int, where: str, what: str, findings: Findings) -> None:
    """A declared count must be the true one."""
    if number not in (counted, UNKNOWN):
        findings.fault(where, f'"{number}"', f'"{counted}", the number of {what}')


def unique_servers(blocks: list[Block], findings: Findings) -> None:
    """v1.x: each server stands once."""
    seen: dict[str, str] = {}
    for block in blocks:
        place = f"{block.where}.server_id"
        if block.server_id in seen:
            findings.fault(
                place,
                f"{show(block.server_id)} again (first at {seen[block.server_id]})",
                "a different server_id for each server",
            )
        elif block.server_id:
            seen[block.server_id] = place


def ranks(blocks: list[Block], findings: Findings) -> None:
    """Ranks are 0..n-1, each once, in any order."""
    size = sum(len(block.rows) for block in blocks)
    seen = bytearray(size)
    odd: list[tuple[Block, int, int]] = []
    unread = False
    for block in blocks:
        for index, row in enumerate(block.rows):
            rank = row.rank
            if rank == UNKNOWN:
                unread = True
            elif rank >= size or seen[rank]:
                odd.append((block, index, rank))
            else:
                seen[rank] = 1
    if not odd:
        return
    free = [rank for rank, taken in enumerate(seen) if not taken]
    missing = "" if unread else f"; no row has {_some(free)}"
    for block, index, rank in odd:
        again = " again" if rank < size else ""
        findings.fault(
            block.place(index, "rank_id"),
            f'"{rank}"{again}',
            f"every rank from 0 to {size - 1} once, for there are {size} devices{missing}",
        )


def devices(blocks: list[Block], findings: Findings, *, shared: bool) -> None:
    """A device stands once per server.

    Args:
        blocks: The rows.
        findings: Takes the faults.
        shared: True where several blocks may be on one server, as pods in v0.1.
    """
    by_server: dict[str, list[Block]] = {}
    for block in blocks:
        by_server.setdefault(block.server_id if shared and block.server_id else block.where, []).append(block)
    for group in by_server.values():
        ids = [row.device_id for block in group for row in block.rows]
        if len(set(ids)) < len(ids):
            _repeated_devices(group, findings)


def _repeated_devices(blocks: list[Block], findings: Findings) -> None:
    seen: dict[int, str] = {}
    for block in blocks:
        for index, row in enumerate(block.rows):
            place = block.place(index, "device_id")
            if row.device_id in seen:
                findings.fault(
                    place,
                    f'"{row.device_id}" again (first at {seen[row.device_id]})',
                    "each device of a server once",
                )
            elif row.device_id != UNKNOWN:
                seen[row.device_id] = place


_OWN = {
    "device_ip": "a different address for each device of the job",
    "super_device_id": "a different super_device_id for each device of a super pod",
}


class _Places:
    """Paths of rows by their number in all blocks: cheap to keep, and made a path for faults only."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._ends = list(accumulate(len(block.rows) for block in blocks))

    def path(self, number: int, name: str) -> str:
        """JSON path of a field of the n-th row."""
        at = bisect_right(self._ends, number)
        block = self._blocks[at]
        return block.place(number - self._ends[at] + len(block.rows), name)

    def repeated(
        self, block: Block, index: int, name: str, value: str, first: int, findings: Findings
    ) -> None:
        """Report a field that has to be each device's own and is not.

        Args:
            block: Where it stands again.
            index: Row in it.
            name: Of the field.
            value: What stands there.
            first: Number of the row where it stands first.
            findings: Takes the fault.
        """
        findings.fault(
            block.place(index, name),
            f"{show(value)} again (first at {self.path(first, name)})",
            _OWN[name],
        )


def addresses(blocks: list[Block], findings: Findings, *, needed: bool) -> None:
    """Device addresses are valid, one family, equally many per device, and no two alike.

    Args:
        blocks: The rows.
        findings: Takes the faults.
        needed: True where HCCL wants an address for each device: several servers outside one super pod.
    """
    places = _Places(blocks)
    seen: dict[bytes, int] = {}
    shape: tuple[int, int] | None = None  # family and number of the first device's addresses
    first_place = ""
    count = -1
    for block in blocks:
        for index, row in enumerate(block.rows):
            count += 1
            text = row.device_ip
            if not text:
                if needed:
                    found = "nothing" if text is None else '""'
                    findings.fault(
                        block.place(index, "device_ip"),
                        found,
                        "the address of the device's network port, for there are several servers",
                    )
                continue
            if text == UNREADABLE:
                continue
            parts = text.split(",") if "," in text else (text,)
            family = IPV6 if ":" in text else IPV4
            for part in parts:
                try:
                    packed = inet_pton(family, part)
                except (OSError, ValueError):
                    findings.fault(
                        block.place(index, "device_ip"),
                        show(text),
                        "an IPv4 or IPv6 address, or several of one family with commas between",
                    )
                    break
                if packed in seen:
                    places.repeated(block, index, "device_ip", part, seen[packed], findings)
                else:
                    seen[packed] = count
            else:
                if shape is None:
                    shape, first_place = (family, len(parts)), block.place(index, "device_ip")
                elif shape != (family, len(parts)):
                    findings.fault(
                        block.place(index, "device_ip"),
                        f"{_addresses(family, len(parts))} ({show(text)})",
                        f"{_addresses(*shape)}, as at {first_place}",
                    )


def _addresses(family: int, count: int) -> str:
    name = "IPv6" if family == IPV6 else "IPv4"
    return f"{count} {name} address{'es' if count > 1 else ''}"


def address(value: Json | Missing, where: str, findings: Findings) -> None:
    """An optional address of a server is a valid one."""
    if value is None or value == "":
        return
    try:
        ip_address(value if isinstance(value, str) else "no text")
    except ValueError:
        findings.fault(where, show(value), "an IPv4 or IPv6 address")


def row_fields(blocks: list[Block], findings: Findings) -> None:
    """Optional fields of a row: ports, backup addresses, the super pod's device number."""
    with_sdid = without_sdid = ""
    for block in blocks:
        for index, row in enumerate(block.rows):
            if not row.extra:
                without_sdid = without_sdid or block.place(index, "super_device_id")
                continue
            for name in PORT_FIELDS:
                if name in row.extra:
                    _port(row.extra[name], block.place(index, name), findings)
            if "backup_device_ip" in row.extra:
                _backup(row.extra["backup_device_ip"], block.place(index, "backup_device_ip"), findings)
            place = block.place(index, "super_device_id")
            if "super_device_id" not in row.extra:
                without_sdid = without_sdid or place
                continue
            with_sdid = place
            sdid = row.extra["super_device_id"]
            if not isinstance(sdid, str) or not digits(sdid):
                findings.fault(place, show(sdid), "the SDID in decimal digits, as a string")
    if with_sdid and without_sdid:
        findings.warn(
            without_sdid, "nothing", "a super_device_id, as other devices have one: on all or on none"
        )


def _port(value: Json, where: str, findings: Findings) -> None:
    if not isinstance(value, str) or not digits(value) or not 0 < int(value) < 65536:
        findings.fault(where, show(value), 'a port from "1" to "65535"')


def _backup(value: Json, where: str, findings: Findings) -> None:
    parts = value.split(",") if isinstance(value, str) else ["no text"]
    for part in parts if value != "" else ():
        try:
            ip_address(part)
        except ValueError:
            findings.fault(where, show(value), "an IPv4 or IPv6 address, or several with commas between")
            return


def one_super_pod(extra: dict[str, Json], blocks: list[Block]) -> bool:
    """Tell whether all servers are in one super pod, inside which HCCL needs no device addresses."""
    pods = extra.get("super_pod_list")
    single = not isinstance(pods, list) or len(pods) == 1
    return single and all("super_device_id" in row.extra for block in blocks for row in block.rows)


def super_pods(extra: dict[str, Json], blocks: list[Block], findings: Findings) -> None:
    """v1.2: super pods are named, cover every server once, and do not repeat a device number."""
    if "super_pod_list" not in extra:
        _super_devices({"": blocks}, findings)
        return
    listed = extra["super_pod_list"]
    if not isinstance(listed, list) or not listed:
        findings.fault("super_pod_list", show(listed), "a list of super pods, at least one")
        return
    by_id = {block.server_id: block for block in blocks}
    owner: dict[str, str] = {}
    members: dict[str, list[Block]] = {}
    names: dict[str, str] = {}
    for index, pod in enumerate(listed):
        where = f"super_pod_list[{index}]"
        if not isinstance(pod, dict):
            findings.fault(where, show(pod), "an object: one super pod")
            continue
        _super_pod_name(pod.get("super_pod_id"), f"{where}.super_pod_id", names, findings)
        for place, server_id in _super_pod_servers(pod.get("server_list"), f"{where}.server_list", findings):
            if server_id in owner:
                findings.fault(
                    place, f"{show(server_id)} again (first at {owner[server_id]})", "each server once"
                )
            elif server_id not in by_id:
                findings.fault(place, show(server_id), "the server_id of a server in the top server_list")
            else:
                members.setdefault(where, []).append(by_id[server_id])
            owner.setdefault(server_id, place)
    for block in blocks:
        if block.server_id and block.server_id not in owner:
            findings.fault(
                f"{block.where}.server_id",
                show(block.server_id),
                "every server in one super pod of super_pod_list",
            )
    _super_devices(members, findings)
    _together(blocks, members, findings)


def _super_pod_name(value: Json, where: str, names: dict[str, str], findings: Findings) -> None:
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name:
        findings.fault(where, show(value), "the name of the super pod, not empty")
    elif name in names:
        findings.fault(
            where, f"{show(value)} again (first at {names[name]})", "a different name for each super pod"
        )
    else:
        names[name] = where


def _super_pod_servers(value: Json, where: str, findings: Findings) -> Iterator[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        findings.fault(where, show(value), "a list of servers, at least one")
        return
    for index, item in enumerate(value):
        server_id = item.get("server_id") if isinstance(item, dict) else None
        place = f"{where}[{index}].server_id"
        if isinstance(server_id, str):
            yield place, server_id
        else:
            findings.fault(place, show(server_id), "the server_id of a server in the top server_list")


def _super_devices(members: dict[str, list[Block]], findings: Findings) -> None:
    for blocks in members.values():
        places = _Places(blocks)
        seen: dict[str, int] = {}
        count = -1
        for block in blocks:
            for index, row in enumerate(block.rows):
                count += 1
                sdid = row.extra.get("super_device_id") if row.extra else None
                if not isinstance(sdid, str):
                    continue
                if sdid in seen:
                    places.repeated(block, index, "super_device_id", sdid, seen[sdid], findings)
                else:
                    seen[sdid] = count


def _together(blocks: list[Block], members: dict[str, list[Block]], findings: Findings) -> None:
    pod_of = {block.server_id: pod for pod, inside in members.items() for block in inside}
    ended: set[str] = set()
    last = ""
    for block in blocks:
        pod = pod_of.get(block.server_id, "")
        if pod != last:
            ended.add(last)
            last = pod
            if pod and pod in ended:
                findings.warn(
                    f"{block.where}.server_id", show(block.server_id), f"the servers of {pod} listed together"
                )


def order(blocks: list[Block], findings: Findings, *, ring: bool, by_device: bool = False) -> None:
    """Warnings about rank order and device choice that some software or chip minds.

    Args:
        blocks: One per server.
        findings: Takes the warnings.
        ring: True to look for 910A rings crossed.
        by_device: True where HCCL, reading the table itself, would rank by device number.
    """
    if findings.faults:
        return
    ranked = sorted(blocks, key=lambda block: min(row.rank for row in block.rows))
    for block in ranked:
        low = min(row.rank for row in block.rows)
        high = max(row.rank for row in block.rows)
        if high - low + 1 != len(block.rows):
            findings.warn(
                f"{block.where}.{block.key}",
                f"ranks from {low} to {high} on {len(block.rows)} devices of server {show(block.server_id)}",
                "the ranks of a server without a gap",
            )
    ids = [block.server_id for block in ranked]
    if ids != sorted(ids):
        at = next(i for i in range(1, len(ids)) if ids[i] < ids[i - 1])
        findings.warn(
            ranked[at].where,
            f"server {show(ids[at])} ranked after server {show(ids[at - 1])}",
            "ranks in the text order of server_id, which MindSpore counts on with several servers "
            "(and HCCL in v0.1); the order of the table is kept",
        )
    device_order(ranked, findings, by_device=by_device)
    counts = {len(block.rows) for block in blocks}
    if len(counts) > 1:
        findings.warn(
            blocks[0].where,
            f"from {min(counts)} to {max(counts)} devices per server",
            "equally many on each; HCCL refuses others on all chips but 910B and 910_93",
        )
    if ring and len(blocks) == 1:
        _ring(blocks[0], findings)


def device_order(blocks: list[Block], findings: Findings, *, by_device: bool = False) -> None:
    """Ranks follow the device numbers, as scripts count on that work a card out of the rank; one warning."""
    odd: list[tuple[Block, list[int]]] = []
    for block in blocks:
        by_pod: dict[str, list[int]] = {}
        for row in sorted(block.rows, key=lambda row: row.rank):
            by_pod.setdefault(row.pod, []).append(row.device_id)
        odd += [(block, ids) for ids in by_pod.values() if ids != sorted(ids)]
    if not odd:
        return
    block, ids = odd[0]
    others = f", and likewise {len(odd) - 1} times more" if len(odd) > 1 else ""
    listed = ", by which HCCL itself would rank a v0.1 table; they are ranked as listed" if by_device else ""
    findings.warn(
        f"{block.where}.{block.key}" if block.where else block.key,
        f"the ranks of server {show(block.server_id)} on devices {_some(ids)}, in this order{others}",
        f"increasing device_id{listed}; each rank gets the device of its row, but a script that takes "
        f"rank % {len(ids)} for its card opens another's",
    )


def _ring(block: Block, findings: Findings) -> None:
    rows: list[Row] = block.rows
    if max(row.device_id for row in rows) >= 2 * RING:
        return
    ids = sorted(row.device_id for row in rows)
    if len(ids) not in (1, 2, 4, 8):
        findings.warn(
            f"{block.where}.{block.key}",
            f"{len(ids)} devices",
            "1, 2, 4 or 8 if this is a 910A board; other boards have no such rule",
        )
    elif len(ids) in (2, 4) and ids[0] < RING <= ids[-1]:
        findings.warn(
            f"{block.where}.{block.key}",
            f"devices {_some(ids)}",
            "all in 0-3 or all in 4-7 if this is a 910A board, whose two rings a job of "
            f"{len(ids)} must not cross; other boards have no such rule",
        )


def _some(numbers: list[int]) -> str:
    listed = ", ".join(str(number) for number in numbers[:16])
    return listed if len(numbers) <= 16 else f"{listed} ... ({len(numbers)} in all)"
