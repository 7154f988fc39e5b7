"""How agents get onto the nodes of a Ray cluster, and how the driver speaks to them there."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from davincirunsdk.concurrency import Patience, in_thread
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.engines.ray_agent import ACTOR_ENVIRONMENT, HEAD_STEP, RayAgent
from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from davincirunsdk.engines.messages import NodeFacts, NodePlan, NodeReport, NodeStarted
    from davincirunsdk.engines.node import NodeHandle


def _look_for_head(place: str) -> None:
    """Tell at once that nothing listens at an address, for which Ray itself would wait.

    Raises:
        PlatformError: So it is.
    """
    host, colon, port = place.rpartition(":")
    if not colon or "/" in place or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_STEP).close()
    except (OSError, OverflowError) as error:
        raise PlatformError(
            f"found no Ray cluster at {place} ({error}); expected its head there: `ray start --head`, and "
            "the address that it prints in RAY_ADDRESS"
        ) from None


class _Connection:
    """A process has one connection to a cluster: its jobs share it, and the last one closes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


_connection = _Connection()


class RayPlacement:
    """One agent on each of several nodes of a Ray cluster.

    Args:
        nnodes: Number of nodes.
        nproc_per_node: Devices to occupy on each, None for all NPUs of a node.
        resource: `NPU` or `CPU`.
        address: Of the cluster's head, None to look for it.
        timeout: Seconds to wait for free nodes.
        notify: Takes a line when nodes have to be waited for.
    """

    def __init__(
        self,
        *,
        nnodes: int,
        nproc_per_node: int | None,
        resource: str,
        address: str | None,
        timeout: float,
        notify: Callable[[str], None],
    ) -> None:
        self._nnodes = nnodes
        self._wanted = nproc_per_node
        self._resource = resource
        self._address = address
        self._timeout = timeout
        self._notify = notify
        self._attached = False
        self._given_up = False
        self._group: Any = None
        self._actors: list[Any] = []

    async def open(self) -> Sequence[NodeHandle]:
        """Attach to the cluster, reserve the nodes and place the agents.

        Returns:
            One handle per node.

        Raises:
            PlatformError: Ray is not installed, there is no cluster, or the nodes do not get free in time.
        """
        waits = Patience(lambda: None)
        try:
            await self._attach_in_time()
            count = self._wanted if self._wanted is not None else await waits.wait(in_thread(self._most))
            await waits.wait(in_thread(self._reserve, count))
            waits.settle()
            await self._wait_for_nodes(count)
            self._actors = await waits.wait(in_thread(self._place_agents, count))
            waits.settle()
        except BaseException:
            if not self._given_up:
                await waits.wait(in_thread(self._close))
            raise
        shared = _Shared()
        return [_RayNode(actor, shared) for actor in self._actors]

    async def close(self) -> None:
        """Kill the actors, give the nodes back, leave the cluster if it was not entered before."""
        await in_thread(self._close)

    async def _attach_in_time(self) -> None:
        # Ray tries for ever where a head does not answer, and nothing can end its call.
        attaching = in_thread(self._attach)
        try:
            done, _ = await asyncio.wait({attaching}, timeout=self._timeout)
        except asyncio.CancelledError:
            self._give_up()
            raise
        if not done:
            self._give_up()
            raise PlatformError(
                f"found no answer of the Ray cluster at {self._head_address()} within {self._timeout:g} s; "
                "expected its head there: look whether `ray status` answers"
            )
        attaching.result()

    def _give_up(self) -> None:
        """Leave a call that may come back some day, and then has to close what it opened."""
        self._given_up = True
        in_thread(self._detach)

    def _head_address(self) -> str:
        return self._address or os.environ.get("RAY_ADDRESS") or "auto"

    def _attach(self) -> None:
        try:
            import ray
        except ImportError:
            raise PlatformError(
                "Ray is not installed here; expected it on every node: pip install 'davincirunsdk[ray]'"
            ) from None
        with _connection.lock:
            if not _connection.users and ray.is_initialized():
                return
            if not _connection.users:
                self._connect()
            _connection.users += 1
            self._attached = True
        if self._given_up:
            self._detach()

    def _detach(self) -> None:
        if not self._attached:
            return
        import ray

        with _connection.lock:
            if self._attached:
                self._attached = False
                _connection.users -= 1
                if not _connection.users:
                    ray.shutdown()

    def _connect(self) -> None:
        import ray

        _look_for_head(self._head_address())
        # Only what has been set before its import is seen by Ray, so nothing is set here. Output comes to
        # the driver by our reports, so Ray's own forwarding is off.
        try:
            ray.init(
                address=self._head_address(),
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="davincirun",
            )
        except ConnectionError as error:
            raise PlatformError(
                f"found no Ray cluster ({_first_line(error)}); expected one that runs: `ray start --head` on "
                "one node, `ray start --address=HEAD:6379` on the others, or its address in RAY_ADDRESS"
            ) from None

    def _most(self) -> int:
        """Tell how many devices as many nodes as wanted have, each."""
        counts = sorted(self._capacities(), reverse=True)
        if len(counts) < self._nnodes or counts[self._nnodes - 1] < 1:
            raise PlatformError(
                f"found {sum(count >= 1 for count in counts)} nodes with NPUs in the Ray cluster; expected "
                f"{self._nnodes}: start Ray on the nodes that have NPUs, or ask for CPUs (resource='CPU', "
                "--resource CPU) and give nproc_per_node"
            )
        return counts[self._nnodes - 1]

    def _capacities(self) -> list[int]:
        import ray

        return [int(node["Resources"].get(self._resource, 0)) for node in ray.nodes() if node["Alive"]]

    def _reserve(self, count: int) -> None:
        from ray.util.placement_group import placement_group

        self._group = placement_group([{self._resource: count}] * self._nnodes, strategy="STRICT_SPREAD")

    async def _wait_for_nodes(self, count: int) -> None:
        ready = asyncio.wrap_future(self._group.ready().future())
        # A group that is given back while we wait makes this fail, when nobody wants to know.
        ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        words = (
            f"{self._nnodes} node{'s' if self._nnodes > 1 else ''} with {count} {self._resource} free on each"
        )
        done, _ = await asyncio.wait({ready}, timeout=min(2.0, self._timeout))
        if not done:
            self._notify(f"waiting for {words}; {await self._what_there_is()}")
            done, _ = await asyncio.wait({ready}, timeout=max(0.0, self._timeout - 2.0))
        if done:
            ready.result()
            return
        ready.cancel()
        raise PlatformError(
            f"found no {words} within {self._timeout:g} s; {await self._what_there_is()}: "
            "wait for other jobs, ask for fewer, or add nodes"
        )

    async def _what_there_is(self) -> str:
        waits = Patience(lambda: None)
        capacities = sorted(await waits.wait(in_thread(self._capacities)), reverse=True)
        waits.settle()
        listed = ", ".join(map(str, capacities[:16])) or "none"
        return f"the cluster has nodes with {listed} in all, free or not"

    def _place_agents(self, count: int) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = ray.remote(RayAgent)
        needs: dict[str, Any] = {"num_cpus": count} if self._resource == "CPU" else {"num_cpus": 0}
        if self._resource != "CPU":
            needs["resources"] = {self._resource: count}
        return [
            remote.options(
                **needs,
                max_restarts=0,
                runtime_env={"env_vars": ACTOR_ENVIRONMENT},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=place
                ),
            ).remote()
            for place in range(self._nnodes)
        ]

    def _close(self) -> None:
        try:
            import ray
        except ImportError:
            return
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._group = [], None
        self._detach()


class _Shared:
    """The rank table in Ray's store: thousands of rows go to each node once, not through the driver."""

    def __init__(self) -> None:
        self._text = ""
        self._reference: Any = ""

    def reference(self, text: str) -> Any:
        if text != self._text:
            import ray

            self._text, self._reference = text, ray.put(text)
        return self._reference


class _RayNode:
    """The way to one actor; see `NodeHandle`."""

    def __init__(self, actor: Any, shared: _Shared) -> None:
        self._actor = actor
        self._shared = shared

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        facts: NodeFacts = await _answer(self._actor.inspect.remote(nproc_per_node))
        return facts

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        started: NodeStarted = await _answer(self._actor.start.remote(plan, self._shared.reference(table)))
        return started

    async def report(self) -> NodeReport:
        report: NodeReport = await _answer(self._actor.report.remote())
        return report

    async def stop(self, now: bool) -> None:
        await _answer(self._actor.stop.remote(now))

    async def signal(self, number: int) -> None:
        await _answer(self._actor.signal.remote(number))

    async def ranks_ended(self) -> None:
        await _answer(self._actor.ranks_ended.remote())


async def _answer(reference: Awaitable[Any]) -> Any:
    from ray.exceptions import RayError, RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        # The agent's own error, which Ray wraps.
        raise error.cause from None
    except RayError as error:
        raise NodeLostError(_why(error)) from None


def _why(error: BaseException) -> str:
    """Take the line of Ray's long message that says why."""
    return next((line for line in str(error).splitlines() if " because " in line), _first_line(error))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
