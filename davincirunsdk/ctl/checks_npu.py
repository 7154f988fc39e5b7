"""Checks of the NPUs: device files, who holds them, health, links, and the rank table against all that.

Words of the tools as in Huawei's references of npu-smi and hccn_tool; what they say in other words is
shown as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.errors import DavinciRunError
from davincirunsdk.findings import Finding, Level
from davincirunsdk.host.devices import npus, visible
from davincirunsdk.host.holders import holders as find_holders
from davincirunsdk.host.tools import ask, find_tool

if TYPE_CHECKING:
    from davincirunsdk.ctl.doctor import Site

_SERVICES = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Device files that CANN needs beside those of the NPUs."""

_HEALTH = re.compile(r"^\s*Health(?: Status)?\s*:\s*(\S+)", re.MULTILINE)
_CODE = re.compile(r"^\s*Error Code\s*:\s*(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"link status\s*:\s*(\S+)", re.IGNORECASE)
_TABLES = ("RANK_TABLE_FILE", "RANK_TABLE_FILE_V_1_0")


def devices(site: Site) -> list[Finding]:
    """Device files must be there and usable."""
    present = npus(site.root)
    if not present:
        return [
            Finding(
                where="devices",
                found="no NPU device files (/dev/davinci0, ...)",
                expected="nothing for a job on CPU; else the driver, and in a container "
                "--device=/dev/davinci0 or the Ascend runtime",
                level=Level.WARNING,
            )
        ]
    findings = []
    try:
        seen = visible(site.env, present)
    except DavinciRunError as error:
        findings.append(Finding(where="devices", found=str(error), expected="a mask that CANN reads"))
        seen = present
    wanted = [f"davinci{number}" for number in present] + list(_SERVICES)
    missing = [name for name in wanted if not (site.root / "dev" / name).exists()]
    closed = [
        name
        for name in wanted
        if name not in missing and not os.access(site.root / "dev" / name, os.R_OK | os.W_OK)
    ]
    if missing:
        findings.append(
            Finding(
                where="devices",
                found=f"no /dev/{', /dev/'.join(missing)}",
                expected="these beside the NPUs' own: pass them into the container",
            )
        )
    if closed:
        findings.append(
            Finding(
                where="devices",
                found=f"no right to use /dev/{', /dev/'.join(closed)}",
                expected="this user in their group: `ls -l /dev/davinci*`, `usermod -aG HwHiAiUser USER`",
            )
        )
    masked = "" if seen == present else f", of which {len(seen)} are visible ({_listed(seen)})"
    findings.append(
        Finding(where="devices", found=f"{len(present)} NPUs ({_listed(present)}){masked}", level=Level.OK)
    )
    return findings


def holders(site: Site) -> list[Finding]:
    """No process should hold an NPU before the job starts; only those of this container can be seen."""
    present = npus(site.root)
    if not present:
        return []
    held: dict[str, list[int]] = {}
    for one in find_holders(site.root, present):
        held.setdefault(f"{one.pid} ({one.command})", []).append(one.device)
    if not held:
        return [Finding(where="device holders", found="no process holds an NPU", level=Level.OK)]
    return [
        Finding(
            where="device holders",
            found=f"process {who} holds NPU {_listed(devices)}",
            expected="end it, or leave its NPUs out with --devices or ASCEND_RT_VISIBLE_DEVICES",
            level=Level.WARNING,
        )
        for who, devices in held.items()
    ]


def health(site: Site) -> list[Finding]:
    """What npu-smi says of each NPU."""
    present = npus(site.root)
    tool = find_tool("npu-smi", site.root, site.env.get("PATH"))
    if not present:
        return []
    if tool is None:
        return [_no_tool("health", "npu-smi")]
    findings = []
    for number in present:
        said = ask([tool, "info", "-t", "health", "-i", str(number)])
        found = _HEALTH.search(said)
        state = found[1] if found else "no answer"
        if state.upper() == "OK":
            continue
        code = _CODE.search(said)
        words = f"NPU {number}: {state}" + (f", error code {code[1]}" if code and code[1] != "NA" else "")
        bad = state.lower() in ("alarm", "critical")
        findings.append(
            Finding(
                where="health",
                found=words,
                expected="OK: look with `npu-smi info -t health`, reset or leave the NPU out",
                level=Level.FAULT if bad else Level.WARNING,
            )
        )
    return findings or [Finding(where="health", found=f"{len(present)} NPUs are OK", level=Level.OK)]


def links(site: Site) -> list[Finding]:
    """Whether each NPU's own network port is up, and whether TLS is alike on all."""
    present = npus(site.root)
    tool = find_tool("hccn_tool", site.root, site.env.get("PATH"))
    if not present:
        return []
    if tool is None:
        return [_no_tool("links", "hccn_tool")]
    findings = []
    switches: dict[str, list[int]] = {}
    for number in present:
        found = _LINK.search(ask([tool, "-i", str(number), "-link", "-g"]))
        state = found[1].upper() if found else "no answer"
        if state != "UP":
            findings.append(
                Finding(
                    where="links",
                    found=f"NPU {number}: link {state}",
                    expected="UP (not needed on one node): look at the optics, `hccn_tool -i N -optical -g`",
                    level=Level.WARNING,
                )
            )
        said = re.search(r"tls switch\[(\d)\]", ask([tool, "-i", str(number), "-tls", "-g"]))
        if said:
            switches.setdefault(said[1], []).append(number)
    if len(switches) > 1:
        findings.append(
            Finding(
                where="links",
                found=f"TLS differs: on for NPU {_listed(switches.get('1', []))}, off for "
                f"{_listed(switches.get('0', []))}",
                expected="the same on all NPUs of all nodes (EI0016): `hccn_tool -i N -tls -s enable 0`",
            )
        )
    return findings or [
        Finding(where="links", found=f"the links of {len(present)} NPUs are up", level=Level.OK)
    ]


def table(site: Site) -> list[Finding]:
    """The rank table, where there is one, must be right and fit this host."""
    from davincirunsdk.rank_table import examine

    path = site.rank_table
    if path is None:
        named = next((site.env[name] for name in _TABLES if site.env.get(name)), "")
        path = Path(named) if named and Path(named).is_file() else None
    if path is None:
        return []
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        return [Finding(where="rank table", found=f"{path}: {error.strerror}", expected="a file")]
    parsed, found = examine(text)
    findings = [
        Finding(
            where="rank table",
            found=f"{path}: {one.where}: {one.found}" if one.where else f"{path}: {one.found}",
            expected=one.expected,
            level=one.level,
        )
        for one in (*found.faults, *found.warnings)
    ]
    if parsed is None or found.faults:
        return findings
    present = npus(site.root)
    own = next(
        (server for server in parsed.servers if server.server_id in _own_names()),
        parsed.servers[0] if len(parsed.servers) == 1 else None,
    )
    if own is not None and present:
        absent = sorted({row.device_id for row in own.rows} - set(present))
        if absent:
            findings.append(
                Finding(
                    where="rank table",
                    found=f"{path}: devices {_listed(absent)} of {own.server_id} are not on this host",
                    expected=f"the devices that are: {_listed(present)}",
                )
            )
    if own is None and len(parsed.servers) > 1:
        findings.append(
            Finding(
                where="rank table",
                found=f"{path}: none of its {len(parsed.servers)} servers is this host",
                expected="this host's address or name as a server_id",
                level=Level.WARNING,
            )
        )
    if not findings:
        rows = sum(len(server.rows) for server in parsed.servers)
        findings.append(
            Finding(
                where="rank table",
                found=f"{path}: {rows} ranks on {len(parsed.servers)} nodes, no fault",
                level=Level.OK,
            )
        )
    return findings


def _own_names() -> set[str]:
    from davincirunsdk.host.addresses import host_name, own

    return {host_name(), *own()}


def _no_tool(where: str, tool: str) -> Finding:
    return Finding(
        where=where,
        found=f"no {tool}",
        expected=f"{tool} of the driver, in a container mounted from the host, to look at this",
        level=Level.WARNING,
    )


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
