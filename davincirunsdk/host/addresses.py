"""Names and addresses of this machine, and of others."""

from __future__ import annotations

import os
from ipaddress import ip_address


def host_name() -> str:
    """Name of this machine, or of the pod."""
    return os.uname().nodename


def own() -> frozenset[str]:
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
