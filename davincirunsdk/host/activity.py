"""What processes do, as the kernel counts it: bytes read and written, processor time, stopped or not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a process and all below it have done so far.

    Attributes:
        io: Bytes read and written by each living process, pipes and caches included.
        cpu: Seconds of processor time, also of children that have ended.
        stopped: The process itself is stopped, by SIGSTOP or a debugger.
    """

    io: Mapping[int, int]
    cpu: float
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    session: int
    state: str
    cpu: float


def look_at(pids: Iterable[int]) -> dict[int, Activity]:
    """Look at processes and everything below them; blocking, and a sick driver may hold it up for long.

    Args:
        pids: Processes that lead sessions of their own.

    Returns:
        What each does; those that have ended are left out.
    """
    stats = {pid: stat for pid in _all_pids() if (stat := _stat(pid)) is not None}
    members: dict[int, list[int]] = {pid: [] for pid in pids}
    for pid in stats:
        if (leader := _leader(pid, stats, members)) is not None:
            members[leader].append(pid)
    return {
        leader: Activity(
            io={pid: count for pid in pids if (count := _io(pid)) is not None},
            cpu=sum(stats[pid].cpu for pid in pids),
            stopped=stats[leader].state in "Tt",
        )
        for leader, pids in members.items()
        if leader in stats
    }


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _leader(pid: int, stats: Mapping[int, _Stat], leaders: Mapping[int, list[int]]) -> int | None:
    """Find whose a process is: its session's, or that of an ancestor."""
    seen = set()
    while pid in stats and pid not in seen:
        if pid in leaders:
            return pid
        if stats[pid].session in leaders:
            return stats[pid].session
        seen.add(pid)
        pid = stats[pid].parent
    return None


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before may hold anything, brackets too.
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(words) < 15:
        return None
    return _Stat(
        parent=int(words[1]),
        session=int(words[3]),
        state=words[0].decode(),
        cpu=sum(map(int, words[11:15])) / _TICK,
    )


def _io(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            counts = dict(line.split(b": ", 1) for line in file.read().splitlines())
    except (OSError, ValueError):
        # Ended, or another user's.
        return None
    return sum(int(counts.get(name, 0)) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))
