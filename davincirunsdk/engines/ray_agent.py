"""The agent of a node as an actor of Ray."""

from __future__ import annotations

import asyncio
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.engines.agent import NodeAgent

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.engines.messages import NodeFacts, NodePlan, NodeStarted

ACTOR_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""An actor that has to go would kill the guardian, its child, which then could not end the rest."""

_FROM_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_JOB_ID", *ACTOR_ENVIRONMENT)
"""What Ray sets for an actor and means for it alone: one thread, its own debugger, its own job."""

HEAD_STEP = 5.0
"""Seconds between two looks whether the head can be reached."""

_REFUSED_STEP = 1.0
"""Seconds between two looks while it cannot be."""

_RAY_PATIENCE = 60.0
"""Seconds without the head after which Ray ends every process that is connected; so long one may restart."""

_LEAST_PATIENCE = 5.0

_SLACK = 10.0
"""Seconds between the last worker's end and Ray's, for what is reported and written."""

_LAST_WORDS = 0.5
"""Seconds that an agent without a raylet stays, for its last report to reach the driver."""


class RayAgent(NodeAgent):
    """A `NodeAgent` as an actor: it knows Ray's address of its node and outlives its raylet by moments."""

    def __init__(self) -> None:
        super().__init__()
        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        _forget_what_ray_set(raylet)
        self._raylet = raylet
        self._watching: asyncio.Task[None] | None = None
        self._grace_period = 0.0

    async def inspect(self, nproc_per_node: int | None, table_timeout: float | None = None) -> NodeFacts:
        """See `NodeAgent.inspect`; the watch over the node's place in the cluster begins here.

        Args:
            nproc_per_node: See there.
            table_timeout: Seconds to wait for the platform's rank table, None for the default.
        """
        self._table_timeout = table_timeout
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return await super().inspect(nproc_per_node)

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        """See `NodeAgent.start`."""
        self._grace_period = plan.options.grace_period
        return await super().start(plan, table)

    async def go(self) -> None:
        """End this actor, when the head, which otherwise does it, is gone."""
        asyncio.get_running_loop().call_later(_LAST_WORDS, os._exit, 0)

    def address(self) -> str:
        """Tell Ray's address of this node."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    async def _watch(self) -> None:
        """Leave when this node is lost to Ray, which does not end an actor for that."""
        # Ray learns of a killed raylet 13 s later. The driver still hears the agent itself, whose
        # answers do not go through the raylet.
        raylet = in_thread(_wait_for_end, self._raylet)
        head = asyncio.create_task(until_unreachable(head_place(), lambda: patience(self._grace_period)))
        await asyncio.wait({raylet, head}, return_when=asyncio.FIRST_COMPLETED)
        if raylet.done():
            await self.leave("its raylet has died, or was killed")
        else:
            await self.leave(f"Ray's head could not be reached for {patience(self._grace_period):g} s")
        await asyncio.sleep(_LAST_WORDS)
        os._exit(1)


def head_place() -> tuple[str, int]:
    """Host and port of the head of the cluster that this process is connected to."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def patience(grace_period: float, slack: float = _SLACK) -> float:
    """Seconds without the head after which workers are ended, so that they can save before Ray ends all.

    Args:
        grace_period: Seconds that they have for it.
        slack: Seconds for what comes after it.
    """
    try:
        limit = float(os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"])
    except (KeyError, ValueError):
        limit = _RAY_PATIENCE
    return max(_LEAST_PATIENCE, limit - grace_period - slack)


async def until_unreachable(
    place: tuple[str, int],
    bound: Callable[[], float],
    *,
    on_change: Callable[[bool], object] = lambda _: None,
) -> None:
    """Wait until no connection to a place has come about for a while, trying every few seconds.

    Args:
        place: Host and port.
        bound: Gives the seconds of that while, which begins with the first look that fails.
        on_change: Called when the place cannot be reached any more, with False, and when it can be again.
    """
    missed: float | None = None
    while True:
        if await is_reachable(place, HEAD_STEP):
            if missed is not None:
                missed = None
                on_change(True)
            await asyncio.sleep(HEAD_STEP)
            continue
        if missed is None:
            missed = time.monotonic()
            on_change(False)
        left = missed + bound() - time.monotonic()
        if left <= 0:
            return
        await asyncio.sleep(min(_REFUSED_STEP, left))


async def is_reachable(place: tuple[str, int], timeout: float) -> bool:
    """Tell whether a connection to a place comes about.

    Args:
        place: Host and port.
        timeout: Seconds to wait for it.
    """
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*place), timeout)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


def _wait_for_end(pid: int) -> None:
    """Wait until a process that is no child of ours has ended; blocks."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # Kernels before 5.3.
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.5)
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os.close(handle)


def _forget_what_ray_set(raylet: int) -> None:
    """Take out of this process's environment, which the workers get, what is not the node's own."""
    try:
        entries = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    except OSError:
        return
    own = {entry.partition(b"=")[0].decode(errors="replace") for entry in entries}
    for name in _FROM_RAY:
        if name not in own:
            os.environ.pop(name, None)
