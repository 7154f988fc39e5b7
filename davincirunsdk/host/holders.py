"""Who has the devices of this machine open."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a device open.

    Attributes:
        device: Number of the NPU.
        pid: The process.
        command: Name of its program.
    """

    device: int
    pid: int
    command: str


def holders(root: Path, numbers: Iterable[int]) -> tuple[Holder, ...]:
    """Find the processes, other than this one, that have NPUs open; blocks for some milliseconds.

    Processes of other users show only to root.

    Args:
        root: Folder that stands for `/` where the device files are.
        numbers: Numbers of the NPUs.

    Returns:
        One entry per process and device, in the order of devices, then of pids.
    """
    files = {str(root / f"dev/davinci{number}"): number for number in numbers}
    found = [
        Holder(device=device, pid=pid, command=_command(pid))
        for pid in _pids()
        for device in sorted({files[path] for path in _open_files(pid) if path in files})
    ]
    return tuple(sorted(found, key=lambda holder: (holder.device, holder.pid)))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"{folder}/{name}")
        except OSError:
            continue


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "a process that has ended"
