"""How agents get onto the nodes of a Ray cluster, and how the driver speaks to them there."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from davincirunsdk import __version__
from davincirunsdk.concurrency import Patience, in_thread
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.engines.ray_agent import (
    ACTOR_ENVIRONMENT,
    HEAD_STEP,
    RayAgent,
    head_place,
    is_reachable,
    patience,
    until_unreachable,
)
from davincirunsdk.engines.ray_reservation import LOOK, Reservation, through_client
from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import LogPiece, NodeFacts, NodePlan, NodeReport, NodeStarted
    from davincirunsdk.engines.node import NodeHandle
    from davincirunsdk.engines.ray_reservation import Bundle


def _look_for_head(place: str) -> None:
    """Tell at once that nothing listens at an address, for which Ray itself would wait.

    Raises:
        PlatformError: So it is.
    """
    address = place.removeprefix("ray://")
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_STEP).close()
    except (OSError, OverflowError) as error:
        raise PlatformError(
            f"found no Ray cluster at {place} ({error}); expected its head there: `ray start --head`, and "
            "the address that it prints in RAY_ADDRESS"
        ) from None


def _way_in() -> tuple[str, int]:
    """Host and port that this program reaches the head by; a client outside may have no other way."""
    if not through_client():
        return head_place()
    import ray

    host, _, port = ray.util.client.ray.get_context().client_worker._conn_str.rpartition(":")
    return host.strip("[]"), int(port)


_NODE_ID = re.compile(r"\b[0-9a-f]{56}\b")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MISSING = re.compile(r"No module named '([\w.]+)'")

_SLACK = 15.0
"""Seconds between the workers' end for a lost head and Ray's; with less, the agents let us act first."""

_WAITING_STEP = 10.0
"""Seconds between two lines about what nodes wait for."""

_CLOSING = 5.0
"""Seconds for all that giving the nodes back takes."""


class _Connection:
    """A process has one connection to a cluster: its jobs share it, and the last one closes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


_connection = _Connection()


class RayPlacement:
    """One agent on each of several nodes of a Ray cluster.

    Args:
        least: Nodes below which there is no job.
        most: Nodes that are wanted.
        nproc_per_node: Devices to occupy on each, None for all NPUs of a node.
        resource: `NPU` or `CPU`.
        address: Of the cluster's head, None to look for it.
        timeout: Seconds to wait for free nodes.
        table_timeout: Seconds that nodes wait for a platform's rank table, None for the default.
        grace_period: Seconds that workers need at the end, which a lost head must leave them.
        notify: Takes a line when nodes have to be waited for, or the head does not answer.
    """

    def __init__(
        self,
        *,
        least: int,
        most: int,
        nproc_per_node: int | None,
        resource: str,
        address: str | None,
        timeout: float,
        table_timeout: float | None,
        grace_period: float,
        notify: Callable[[str], None],
    ) -> None:
        self._reservation = Reservation(
            least=least, most=most, count=nproc_per_node, resource=resource, notify=notify
        )
        self._resource = resource
        self._address = address
        self._timeout = timeout
        self.renewal_timeout: float = timeout
        self._table_timeout = table_timeout
        self._grace_period = grace_period
        self._notify = notify
        self._attached = False
        self._given_up = False
        self._head: tuple[str, int] | None = None
        self._actors: list[Any] = []

    async def open(self, table: GivenTable | None = None) -> Sequence[NodeHandle]:
        """Attach to the cluster, reserve the nodes and place the agents.

        Args:
            table: See `Placement.open`.

        Returns:
            One handle per node.

        Raises:
            PlatformError: Ray is not installed, there is no cluster, or the nodes do not get free in time.
            RankTableError: The table's nodes are not those of the cluster.
        """
        self._reservation.given = table
        waits = Patience(lambda: None)
        try:
            await self._attach_in_time()
            return await self._place(waits, self._timeout)
        except BaseException:
            if not self._given_up:
                await waits.wait(asyncio.ensure_future(self.close()))
            raise

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        """See `Placement.renew`.

        Raises:
            PlatformError: The nodes do not get free in time.
        """
        waits = Patience(lambda: None)
        returning = in_thread(self._return_nodes)
        await waits.within(_CLOSING, returning)
        waits.settle()
        if not returning.done():
            returning.add_done_callback(lambda future: future.cancelled() or future.exception())
            raise PlatformError(f"Ray's head did not take the nodes back within {_CLOSING:g} s")
        returning.result()
        return await self._place(waits, min(bound, self._timeout))

    async def _place(self, waits: Patience, bound: float) -> Sequence[NodeHandle]:
        """Reserve nodes and place an agent on each."""
        bundles = await self._reservation.take(bound)
        self._actors = await waits.wait(in_thread(self._place_agents, bundles))
        waits.settle()
        self._head = _way_in()
        hosts = await waits.wait(in_thread(self._hosts))
        waits.settle()
        shared = _Shared(self._notify)
        return [
            _RayNode(actor, shared, hosts, place, self._table_timeout)
            for place, actor in enumerate(self._actors)
        ]

    async def until_lost(self) -> str:
        """Wait until the head is gone for so long that workers can just be ended before Ray ends all."""
        assert self._head is not None
        place, bound = self._head, patience(self._grace_period, _SLACK)
        shown = f"Ray's head at {_written(place)}"

        def tell(well: bool) -> None:
            self._notify(
                f"{shown} can be reached again"
                if well
                else f"{shown} cannot be reached: without it the job is stopped in {bound:g} s"
            )

        await until_unreachable(place, lambda: bound, on_change=tell)
        return f"{shown} could not be reached for {bound:g} s; look at that host, and start the cluster anew"

    async def close(self) -> None:
        """Kill the actors, give the nodes back, leave the cluster if it was not entered before."""
        if self._head is None or await is_reachable(self._head, 1.0):
            closing = in_thread(self._close)
            await asyncio.wait({closing}, timeout=_CLOSING)
            if closing.done():
                closing.result()
                return
            closing.add_done_callback(lambda future: future.cancelled() or future.exception())
        await self._leave_without_head()

    async def _leave_without_head(self) -> None:
        """Part from a cluster whose head answers no call, and would hold this process as long as it lives."""
        import ray

        going = [asyncio.ensure_future(_gone(actor)) for actor in self._actors]
        self._actors, self._reservation.group = [], None
        if going:
            await asyncio.wait(going, timeout=1.0)
        if self._attached:
            atexit.unregister(ray.shutdown)
            leaving = in_thread(self._detach)
            leaving.add_done_callback(lambda future: future.cancelled() or future.exception())
            await asyncio.wait({leaving}, timeout=1.0)

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

    def _hosts(self) -> _Hosts:
        """Learn which host each agent is on, by the place of its bundle; blocks."""
        import ray
        from ray.util.placement_group import placement_group_table

        names = {node["NodeID"]: _host_name(node) for node in ray.nodes()}
        bundles = placement_group_table(self._reservation.group).get("bundles_to_node_id", {})
        return _Hosts(names, {int(place): names.get(of, "") for place, of in bundles.items()})

    def _place_agents(self, bundles: Sequence[Bundle]) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = ray.remote(RayAgent)
        return [
            remote.options(
                **(
                    {"num_cpus": bundle.count}
                    if self._resource == "CPU"
                    else {"num_cpus": 0, "resources": {self._resource: bundle.count}}
                ),
                max_restarts=0,
                runtime_env={"env_vars": ACTOR_ENVIRONMENT},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._reservation.group, placement_group_bundle_index=place
                ),
            ).remote()
            for place, bundle in enumerate(bundles)
        ]

    def _close(self) -> None:
        try:
            import ray  # noqa: F401 # without it there is nothing to give back
        except ImportError:
            return
        self._return_nodes()
        self._detach()

    def _return_nodes(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._reservation.release()


class _Shared:
    """What the ways to all nodes have in common.

    The rank table is in Ray's store: thousands of rows go to each node once, not through the driver.

    Args:
        notify: Takes lines about what nodes wait for.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._told_at = -_WAITING_STEP
        self._text = ""
        self._reference: Any = ""

    def tell(self, text: str) -> None:
        """Say what a node waits for; others mostly wait for the same."""
        if time.monotonic() - self._told_at >= _WAITING_STEP:
            self._told_at = time.monotonic()
            self._notify(text)

    def reference(self, text: str) -> Any:
        if text != self._text:
            import ray

            self._text, self._reference = text, ray.put(text)
        return self._reference


class _Hosts:
    """Names of the hosts: Ray's errors name nodes by 56 digits that nobody knows."""

    def __init__(self, names: Mapping[str, str], places: Mapping[int, str]) -> None:
        self._names = names
        self._places = places

    def of(self, place: int) -> str:
        """Name of the host of one agent."""
        return self._places.get(place) or f"node {place}"

    def named(self, text: str) -> str:
        """Put names for numbers, and leave out what colours a terminal."""
        return _NODE_ID.sub(lambda found: self._names.get(found[0], found[0]), _COLOUR.sub("", text))


class _RayNode:
    """The way to one actor; see `NodeHandle`."""

    def __init__(
        self, actor: Any, shared: _Shared, hosts: _Hosts, place: int, table_timeout: float | None
    ) -> None:
        self._actor = actor
        self._shared = shared
        self._hosts = hosts
        self._place = place
        self._table_timeout = table_timeout

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        call = self._actor.inspect.remote(nproc_per_node, self._table_timeout)
        inspecting: asyncio.Future[NodeFacts] = asyncio.ensure_future(self._answer(call))
        try:
            while not (await asyncio.wait({inspecting}, timeout=LOOK))[0]:
                if text := await self._answer(self._actor.waits_for.remote()):
                    self._shared.tell(f"{self._hosts.of(self._place)}: {text}")
            return inspecting.result()
        finally:
            inspecting.cancel()

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        call = self._actor.start.remote(plan, self._shared.reference(table))
        started: NodeStarted = await self._answer(call)
        return started

    async def report(self) -> NodeReport:
        report: NodeReport = await self._answer(self._actor.report.remote())
        return report

    async def stop(self, now: bool) -> None:
        await self._answer(self._actor.stop.remote(now))

    async def signal(self, number: int) -> None:
        await self._answer(self._actor.signal.remote(number))

    async def ranks_ended(self) -> None:
        await self._answer(self._actor.ranks_ended.remote())

    async def sees_file(self, path: str, beginning: bytes) -> bool:
        found: bool = await self._answer(self._actor.sees_file.remote(path, beginning))
        return found

    async def read_log(self, rank: int, start: int, size: int) -> LogPiece:
        piece: LogPiece = await self._answer(self._actor.read_log.remote(rank, start, size))
        return piece

    async def set_logs_aside(self, attempt: int) -> None:
        await self._answer(self._actor.set_logs_aside.remote(attempt))

    async def _answer(self, reference: Awaitable[Any]) -> Any:
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        try:
            return await reference
        except RayTaskError as error:
            # The agent's own error, which Ray wraps.
            raise error.cause from None
        except ActorUnavailableError:
            raise NodeLostError(
                f"{self._hosts.of(self._place)}: the connection to its agent has ended"
            ) from None
        except RayError as error:
            host, text = self._hosts.of(self._place), self._hosts.named(str(error))
            if missing := _MISSING.search(text):
                raise NodeLostError(
                    f"{host}: its Python has no {missing[1]}; expected davincirunsdk {__version__} there as "
                    "here: pip install it on that host"
                ) from None
            raise NodeLostError(f"{host}: {_why(text)}") from None


def _why(text: str) -> str:
    """Take the line of Ray's long message that says why."""
    return next((line for line in text.splitlines() if " because " in line), _first_of(text))


def _first_line(error: BaseException) -> str:
    return _first_of(str(error)) or type(error).__name__


def _first_of(text: str) -> str:
    return next(iter(text.splitlines()), "")


def _host_name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _written(place: tuple[str, int]) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _gone(actor: Any) -> None:
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):
        await actor.go.remote()
