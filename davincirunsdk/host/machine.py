"""What this machine itself tells: device files, driver, names and addresses. All of it blocks shortly."""

from __future__ import annotations

import os
import re
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DEVICE = re.compile(r"davinci([0-9]+)")
_PHYSICAL_DRIVER = "Version=20.1.0"


def npus(root: Path) -> tuple[int, ...]:
    """List the physical numbers of the NPUs whose device files are here.

    Args:
        root: Folder that stands for `/`.

    Returns:
        The numbers, increasing; `davinci_manager` and the like are no devices.
    """
    try:
        entries = os.listdir(root / "dev")
    except OSError:
        return ()
    return tuple(sorted(int(match[1]) for entry in entries if (match := _DEVICE.fullmatch(entry))))


def visible(env: Mapping[str, str], present: tuple[int, ...]) -> tuple[int, ...]:
    """Leave the NPUs that ASCEND_RT_VISIBLE_DEVICES lets a process see.

    As CANN reads it: indexes into the devices present, strictly increasing, up to the first entry
    that is none.

    Args:
        env: The environment.
        present: Numbers of the NPUs whose device files are here.

    Returns:
        Their physical numbers; all if the variable is unset.
    """
    text = env.get("ASCEND_RT_VISIBLE_DEVICES")
    if text is None:
        return present
    chosen: list[int] = []
    for part in text.split(","):
        if not (part.isascii() and part.isdigit() and len(part) < 10) or int(part) >= len(present):
            break
        if chosen and int(part) <= chosen[-1]:
            break
        chosen.append(int(part))
    return tuple(present[index] for index in chosen)


def wants_physical_ids(root: Path) -> bool:
    """Tell the one driver release whose DEVICE_ID is the physical number and that has no ASCEND_DEVICE_ID."""
    try:
        with open(root / "usr/local/Ascend/driver/version.info", encoding="utf-8", errors="replace") as file:
            return file.readline().strip() == _PHYSICAL_DRIVER
    except OSError:
        return False


def host_name() -> str:
    """Name of this machine, or of the pod."""
    return os.uname().nodename


def addresses() -> frozenset[str]:
    """This machine's own addresses that another machine could know it by: no loopback, no link-local."""
    import psutil  # here: only several servers in a table make us look

    texts = {
        entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries
    }
    return frozenset(text for text in texts if distinctive(text))


def distinctive(text: str) -> bool:
    """Tell whether a text is an address of one machine only; every machine is 127.0.0.1 to itself."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def is_address(text: str) -> bool:
    """Tell whether a text is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
