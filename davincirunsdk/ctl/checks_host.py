"""Checks of the machine itself: names, ports, memory, disks, limits, clock, left-over processes."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
from typing import TYPE_CHECKING

from davincirunsdk.findings import Finding, Level
from davincirunsdk.host.ports import HCCL_BASE, HCCL_COUNT, is_free

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.ctl.doctor import Site

GIB = 1 << 30
_LOOKUP_SECONDS = 5.0
_FILES = 65536
"""Open files that a job of some hundred ranks and data loaders may need."""


def names(site: Site) -> list[Finding]:
    """Every name of a node must be known here."""
    wanted = [site.env[name] for name in ("MASTER_ADDR", "MS_SCHED_HOST") if site.env.get(name)]
    wanted += [host for host in site.env.get("VC_WORKER_HOSTS", "").split(",") if host]
    wanted += site.nodes
    findings = []
    for name in dict.fromkeys(wanted):
        try:
            socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:
            findings.append(
                Finding(
                    where="names",
                    found=f"no address of {name!r} ({error})",
                    expected="give its address instead, or add it to /etc/hosts or the name server",
                )
            )
    if wanted and not findings:
        findings.append(_ok("names", f"{len(set(wanted))} names of nodes are known"))
    return findings


def ports(site: Site) -> list[Finding]:
    """The ports that HCCL and the rendezvous take must be free."""
    base = site.env.get("HCCL_IF_BASE_PORT", "")
    first = int(base) if base.isdigit() else HCCL_BASE
    wanted = {port: "HCCL" for port in range(first, first + HCCL_COUNT) if port < 65536}
    master = site.env.get("MASTER_PORT", "")
    if master.isdigit() and site.env.get("RANK", "0") == "0":
        wanted[int(master)] = "the rendezvous (MASTER_PORT)"
    taken = [port for port in wanted if not is_free(port)]
    if not taken:
        return [_ok("ports", f"{first}-{first + HCCL_COUNT - 1} are free for HCCL")]
    shown = ", ".join(f"{port} of {wanted[port]}" for port in taken[:4])
    return [
        Finding(
            where="ports",
            found=f"taken: {shown}{' and more' if len(taken) > 4 else ''}",
            expected="end the job that holds them (`ss -ltnp`), or set HCCL_IF_BASE_PORT to a free block",
            level=Level.WARNING,
        )
    ]


def shared_memory(site: Site) -> list[Finding]:
    """Data loaders and collectives inside a node need shared memory; a container's default is 64 MiB."""
    folder = site.root / "dev/shm"
    if not folder.is_dir():
        return [
            Finding(
                where="shared memory",
                found="no /dev/shm",
                expected="a memory file system there: data loaders cannot work without it",
            )
        ]
    usage = shutil.disk_usage(folder)
    if usage.total < GIB:
        return [
            Finding(
                where="shared memory",
                found=f"/dev/shm has {usage.total >> 20} MiB",
                expected="at least 1 GiB: docker run --shm-size=16g; in a pod an emptyDir of medium Memory",
                level=Level.FAULT if usage.total < GIB // 4 else Level.WARNING,
            )
        ]
    if usage.free < usage.total / 10:
        return [
            Finding(
                where="shared memory",
                found=f"/dev/shm has {usage.free >> 20} MiB free of {usage.total >> 20}",
                expected="files of dead jobs may lie there: `ls -la /dev/shm`, remove what nobody uses",
                level=Level.WARNING,
            )
        ]
    return [_ok("shared memory", f"/dev/shm has {usage.free / GIB:.1f} GiB free")]


def disks(site: Site) -> list[Finding]:
    """Logs and checkpoints need room, and folders that can be written."""
    findings = []
    for label, folder in (("log folder", site.log_dir), ("work folder", site.work_dir)):
        place = _existing(folder.absolute())
        if not os.access(place, os.W_OK | os.X_OK):
            findings.append(
                Finding(
                    where=label,
                    found=f"{place} cannot be written by this user",
                    expected="another folder, or other rights",
                )
            )
            continue
        free = shutil.disk_usage(place).free
        if free < 10 * GIB:
            findings.append(
                Finding(
                    where=label,
                    found=f"{free / GIB:.1f} GiB free at {place}",
                    expected="10 GiB or more: checkpoints and logs of days need it",
                    level=Level.FAULT if free < GIB // 4 else Level.WARNING,
                )
            )
        else:
            findings.append(_ok(label, f"{free / GIB:.0f} GiB free at {place}"))
        status = os.statvfs(place)
        if status.f_files and status.f_favail < 10000:
            findings.append(
                Finding(
                    where=label,
                    found=f"{status.f_favail} inodes free at {place}",
                    expected="10000 or more: remove small files",
                    level=Level.WARNING,
                )
            )
    return findings


def limits(site: Site) -> list[Finding]:
    """Limits of this shell that a training job runs into."""
    findings = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FILES:
        findings.append(
            Finding(
                where="open files",
                found=f"a limit of {hard}",
                expected=f"{_FILES} or more (`ulimit -n`, or nofile in /etc/security/limits.conf)",
                level=Level.WARNING,
            )
        )
    else:
        findings.append(_ok("open files", f"a limit of {soft}, at most {'any number' if hard < 0 else hard}"))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= processes < 4096:
        findings.append(
            Finding(
                where="processes",
                found=f"a limit of {processes}",
                expected="4096 or more (`ulimit -u`): data loaders and their threads count",
                level=Level.WARNING,
            )
        )
    else:
        findings.append(_ok("processes", f"a limit of {'any number' if processes < 0 else processes}"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= locked < 64 << 20 and _has_npus(site):
        findings.append(
            Finding(
                where="locked memory",
                found=f"a limit of {locked >> 10} KiB",
                expected="no limit (`ulimit -l unlimited`): RDMA locks its buffers",
                level=Level.WARNING,
            )
        )
    return findings


def clock(site: Site) -> list[Finding]:
    """Whether the clock is kept right: logs of several nodes are put in order by it."""
    # adjtimex(2) with nothing to set only reads; struct timex is at most 208 bytes.
    buffer = ctypes.create_string_buffer(256)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state == 5:  # TIME_ERROR
        return [
            Finding(
                where="clock",
                found="not synchronised",
                expected="a running NTP client (chrony, ntpd): logs of several nodes are ordered by time",
                level=Level.WARNING,
            )
        ]
    return [_ok("clock", "synchronised")] if state >= 0 else []


def leftovers(site: Site) -> list[Finding]:
    """Processes of jobs whose launcher is gone."""
    from davincirunsdk.ctl.jobs import dead_processes

    left = dead_processes()
    if not left:
        return [_ok("left-over processes", "none of earlier jobs")]
    shown = ", ".join(f"{one.pid} ({one.command})" for one in left[:4])
    return [
        Finding(
            where="left-over processes",
            found=f"{len(left)} of jobs that are over: {shown}{' and more' if len(left) > 4 else ''}",
            expected="`davincirunctl clean` shows them all, `davincirunctl clean --yes` ends them",
        )
    ]


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _has_npus(site: Site) -> bool:
    from davincirunsdk.host.devices import npus

    return bool(npus(site.root))


def _ok(where: str, found: str) -> Finding:
    return Finding(where=where, found=found, level=Level.OK)
