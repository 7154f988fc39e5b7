"""Ports of this machine: one way to find a free one, and the block that HCCL takes."""

from __future__ import annotations

import random
import socket

from davincirunsdk.errors import PlatformError
from davincirunsdk.host.addresses import host_name

PORTS = range(20000, 30000)
"""Where ports for a rendezvous come from, whether drawn or derived.

Below Linux' range for outgoing connections (from 32768), out of which another process may get the port
by chance before the workers listen, and below Kubernetes' node ports (from 30000)."""

HCCL_BASE = 60000
"""First of the host ports that HCCL takes by default."""

HCCL_COUNT = 32
"""Host ports that HCCL takes."""

HCCL_BASES: tuple[int, ...] = (HCCL_BASE, *range(61000, 65520 - HCCL_COUNT, HCCL_COUNT))
"""Where a block may begin: HCCL's own place, then above Linux' range for outgoing connections."""

_TRIES = 100


def is_free(port: int) -> bool:
    """Tell whether a listener could have a port; connections that have just ended do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Find a free port for a rendezvous; blocks shortly.

    Raises:
        PlatformError: A hundred ports are all taken.
    """
    for port in random.sample(PORTS, _TRIES):
        if is_free(port):
            return port
    raise PlatformError(
        f"found no free port from {PORTS.start} to {PORTS.stop - 1} on {host_name()} in {_TRIES} tries; "
        "expected one for the rendezvous: give --master-port (master_port)"
    )


def block_is_free(base: int) -> bool:
    """Tell whether all ports of a block of HCCL's are free."""
    return all(is_free(port) for port in range(base, base + HCCL_COUNT))
