"""Where the workers of a job meet: address and port of node 0."""

from __future__ import annotations

import asyncio
import logging
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.platforms.site import whole
from davincirunsdk.platforms.trust import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.cluster import Cluster

LOOPBACK = "127.0.0.1"

TORCH_PORT = 29500
"""torchrun's own default, for several nodes of which nobody told the port."""

POD_WAIT = 60.0
"""Seconds for which the name of another pod may still appear: it is known when that pod has started."""

HOST_WAIT = 5.0
"""Seconds for a name server that does not answer; one that knows no such name is believed at once."""

_log = logging.getLogger("davincirunsdk")


def claims(env: Mapping[str, str]) -> tuple[Claim, ...]:
    """List what torch's own variables say, which a user or a pod has set."""
    port = whole(env, "MASTER_PORT", least=1, most=65535)
    found = []
    if env.get("MASTER_ADDR"):
        found.append(Claim(name="master_addr", value=env["MASTER_ADDR"], source="MASTER_ADDR"))
    if port is not None:
        found.append(Claim(name="master_port", value=port, source="MASTER_PORT"))
    return tuple(found)


async def check(
    cluster: Cluster, *, pods: bool, from_table: bool, ignore: bool, notify: Callable[[str], None]
) -> None:
    """Make sure, before anything is started, that the nodes can meet at the address of node 0.

    Args:
        cluster: The job, of several nodes.
        pods: True where the nodes are pods: their names appear as they start, and the address may
            be a service's, which no pod has itself.
        from_table: True if the address is the rank table's: with one, not every framework needs it.
        ignore: True if the user allows contradictions.
        notify: Takes lines for people.

    Raises:
        PlatformError: Nobody knows the name; or this host has the address and is not node 0, or is
            node 0 and does not have it.
    """
    address = cluster.master_addr
    try:
        found = await _looked_up(address, pods, notify)
    except OSError as error:
        words = f"the address of node 0, {address!r}, cannot be looked up on this host ({error.strerror})"
        if from_table:
            _log.warning(
                "%s: whatever meets by MASTER_ADDR will not find it; give --master-addr (master_addr)", words
            )
            return
        raise PlatformError(
            f"{words}; expected an IP address or a name that every node knows: correct it with --master-addr "
            "(master_addr) or MASTER_ADDR, or make the name known"
        ) from None
    if any(ip_address(one).is_loopback for one in found):
        _log.warning(
            "the address of node 0, %r, is this machine's own loopback: nodes on other machines will not "
            "meet there",
            address,
        )
        return
    own = await in_thread(addresses.own)
    here = not found.isdisjoint(own)
    if ignore or from_table:
        return
    if here and cluster.node_rank != 0:
        raise PlatformError(
            f"found node rank {cluster.node_rank} on this host ({addresses.host_name()}), which has the "
            f"address of node 0, {address!r}; expected node rank 0 here and on no other host: correct "
            "--node-rank (node_rank) or --master-addr (master_addr), or allow it with --ignore-platform "
            "(ignore_platform)"
        )
    if not here and own and not pods and cluster.node_rank == 0:
        raise PlatformError(
            f"found node rank 0 on this host ({addresses.host_name()}), but {address!r}, the address of node "
            "0, belongs to another; expected node rank 0 on the host of that address: correct "
            "--node-rank (node_rank) or --master-addr (master_addr), or allow it with --ignore-platform "
            "(ignore_platform)"
        )


async def _looked_up(address: str, pods: bool, notify: Callable[[str], None]) -> frozenset[str]:
    """Look a name up, again and again where it may still appear."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    told = False
    while True:
        try:
            answers = await in_thread(lambda: socket.getaddrinfo(address, None))
        except socket.gaierror as error:
            patience = POD_WAIT if pods else HOST_WAIT if error.errno == socket.EAI_AGAIN else 0.0
            if loop.time() - started >= patience:
                raise
            if not told:
                notify(f"waiting for the name of node 0, {address!r}, to be known (up to {patience:g} s)")
                told = True
        except UnicodeError:
            raise OSError(0, "not a name") from None
        else:
            return frozenset(str(answer[4][0]).partition("%")[0] for answer in answers)
        await asyncio.sleep(1.0)
