"""Network interfaces of this machine: which one leads to the other nodes."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address

from davincirunsdk.errors import PlatformError


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface of this machine and the address that others reach it by.

    Attributes:
        name: Such as `eth0`.
        address: One of its IP addresses.
        why: How it was found, for people.
    """

    name: str
    address: str
    why: str


def towards(address: str) -> Interface | None:
    """Find the interface by which this machine sends to an address; blocks shortly, sends nothing.

    Args:
        address: Name or IP address of another node, or of this one.

    Returns:
        The interface; None if there is no way, the name is not known, or it is the loopback, by
        which no other machine is reached.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, UnicodeError, IndexError):
        return None
    if ip_address(own).is_loopback:
        # The address is our own: then whoever has it is the way by which the others come.
        own = str(target[0]).partition("%")[0]
        if ip_address(own).is_loopback:
            return None
    name = next((name for name, texts in _addresses().items() if own in texts), None)
    return Interface(name=name, address=own, why=f"the way to {address}") if name else None


def named(name: str) -> Interface:
    """Find an interface by its name.

    Raises:
        PlatformError: This machine has none of that name, or it has no address.
    """
    found = _addresses()
    usable = [text for text in found.get(name, ()) if not ip_address(text).is_link_local]
    if usable:
        # HCCL prefers IPv4 unless told otherwise.
        return Interface(name=name, address=min(usable, key=lambda text: ":" in text), why="--iface (iface)")
    what = "has no address" if name in found else "is not one of this machine"
    others = ", ".join(one for one, texts in sorted(found.items()) if texts)
    raise PlatformError(
        f"found interface {name!r} asked for, which {what}; expected one of {others}: correct --iface (iface)"
    )


def _addresses() -> dict[str, list[str]]:
    import psutil  # here: a job of one node needs no interface

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in kinds]
        for name, entries in psutil.net_if_addrs().items()
    }
