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
    from davincirunsdk.engines.messages import NodeFacts

ACTOR_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""An actor that has to go would kill the guardian, its child, which then could not end the rest."""

_FROM_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_JOB_ID", *ACTOR_ENVIRONMENT)
"""What Ray sets for an actor and means for it alone: one thread, its own debugger, its own job."""

HEAD_STEP = 5.0
"""Seconds between two looks whether the head can be reached."""

_HEAD_PATIENCE = 60.0
"""Seconds without the head after which a node ends its workers; so long Ray lets a head restart.

By then the driver, if it is on the head's side of a cut, has ended the other nodes long ago.
"""

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

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        """See `NodeAgent.inspect`; the watch over the node's place in the cluster begins here."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return await super().inspect(nproc_per_node)

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
        head = asyncio.create_task(_until_unreachable(self._head()))
        await asyncio.wait({raylet, head}, return_when=asyncio.FIRST_COMPLETED)
        if raylet.done():
            await self.leave("its raylet has died, or was killed")
        else:
            await self.leave(f"the cluster's head could not be reached for {_HEAD_PATIENCE:g} s")
        await asyncio.sleep(_LAST_WORDS)
        os._exit(1)

    def _head(self) -> tuple[str, int]:
        import ray

        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        return host.strip("[]"), int(port)


async def _until_unreachable(place: tuple[str, int]) -> None:
    """Wait until no connection to a place has come about for a while, trying every few seconds."""
    reached = time.monotonic()
    while time.monotonic() - reached < _HEAD_PATIENCE:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*place), HEAD_STEP)
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(1.0)
        else:
            reached = time.monotonic()
            writer.close()
            await asyncio.sleep(HEAD_STEP)


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
