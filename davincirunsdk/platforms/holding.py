"""Cards and HCCL's host ports of this node, held for a job as long as it lasts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.cluster import printable
from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import claims, ports
from davincirunsdk.host.holders import holders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.cluster import Cluster

BASE_PORT = "HCCL_IF_BASE_PORT"
SHARED = "HCCL_NPU_SOCKET_PORT_RANGE"
"""Set by whoever wants several processes on one card; HCCL needs it for that."""

_LOOK = 1.0
"""Seconds between two looks at a port or a process, of which nobody tells when it lets go."""


async def hold(
    cluster: Cluster,
    held: claims.Claims,
    env: Mapping[str, str],
    *,
    wait: float | None,
    notify: Callable[[str], None],
    root: Path = Path("/"),
) -> Cluster:
    """Claim this node's cards, and a block of host ports that no other job of this host has.

    Args:
        cluster: The job.
        held: Takes the claims; also what was claimed before an error.
        env: The environment of the workers to come.
        wait: Seconds to wait for cards and ports, None not to: only then processes of other programs
            are looked for.
        notify: Takes lines for people.
        root: Folder that stands for `/` where the device files are.

    Returns:
        The cluster, with the first of the ports where it is not HCCL's usual one.

    Raises:
        PlatformError: A card is held by another job, or a port that the user chose is taken.
    """
    if not cluster.device_files:
        return cluster
    loop = asyncio.get_running_loop()
    until = loop.time() + (wait or 0.0)
    if not env.get(SHARED):
        for device in cluster.node.devices:
            await _card(device.device_id, held, until, wait, notify)
            if wait is not None:
                await _closed(device.device_id, root, until, wait, notify)
    chosen = env.get(BASE_PORT, "")
    if chosen.isascii() and chosen.isdigit():
        await _port_block(int(chosen), until, wait, notify)
        return cluster
    base = await in_thread(lambda: _free_block(held))
    return replace(cluster, hccl_base_port=base if base != ports.HCCL_BASE else None)


async def _card(
    number: int, held: claims.Claims, until: float, wait: float | None, notify: Callable[[str], None]
) -> None:
    thing = f"npu/{number}"
    loop = asyncio.get_running_loop()
    told = ""
    while not held.take(thing):
        who = await in_thread(claims.holder, thing) or "another job"
        left = until - loop.time()
        if left <= 0:
            waited = f" after {wait:g} s" if wait else ""
            raise PlatformError(
                f"found NPU {number} of this node still held{waited} by {who}; expected it free: choose "
                "others with --devices (devices), wait with --wait-devices (wait_devices), or end that job "
                "(davincirunctl stop)"
            )
        if who != told:
            notify(f"waiting for NPU {number}, held by {who} (up to {left:.0f} s)")
            told = who
        await claims.until_free(thing, left)


async def _closed(number: int, root: Path, until: float, wait: float, notify: Callable[[str], None]) -> None:
    """Wait until no process has a card open, as far as this user may see."""
    loop = asyncio.get_running_loop()
    told: set[int] = set()
    while found := await in_thread(holders, root, (number,)):
        who = ", ".join(f"process {one.pid} ({printable(one.command)})" for one in found)
        left = until - loop.time()
        if left <= 0:
            raise PlatformError(
                f"found NPU {number} of this node still held open after {wait:g} s by {who}; expected it "
                "free: end that, or choose others with --devices (devices)"
            )
        if not told.issuperset(one.pid for one in found):
            notify(f"waiting for NPU {number}, held open by {who} (up to {left:.0f} s)")
            told.update(one.pid for one in found)
        await asyncio.sleep(min(_LOOK, left))


async def _port_block(base: int, until: float, wait: float | None, notify: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    told = False
    while wait is not None and not await in_thread(ports.block_is_free, base):
        left = until - loop.time()
        span = f"ports {base} to {base + ports.HCCL_COUNT - 1} ({BASE_PORT})"
        if left <= 0:
            raise PlatformError(
                f"found one of {span} still taken after {wait:g} s; expected all of them free for HCCL: end "
                "the process that has it (ss -ltnp), or choose another block"
            )
        if not told:
            notify(f"waiting for {span} to be free (up to {left:.0f} s)")
            told = True
        await asyncio.sleep(min(_LOOK, left))


def _free_block(held: claims.Claims) -> int:
    for base in ports.HCCL_BASES:
        if ports.block_is_free(base) and held.take(f"hccl/{base}"):
            return base
    # Each is taken by somebody: then HCCL's own choice is as good as any.
    return ports.HCCL_BASE
