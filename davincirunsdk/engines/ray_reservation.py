"""Which nodes of a Ray cluster a job gets, and the waiting for them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from davincirunsdk.cluster import printable
from davincirunsdk.concurrency import Patience, in_thread
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.types import readable_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.engines.given_table import GivenTable

LOOK = 2.0
"""Seconds between two looks at the nodes that are waited for."""

_LAST_CALL = 30.0
"""Seconds for which more nodes may still come when enough are there, but fewer than wanted."""

_REMINDER = 60.0
"""Seconds after which is said anew what is waited for, though nothing has changed."""

_MOST_LISTED = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What is reserved on one node: devices, and which node where that is not Ray's choice."""

    count: int
    address: str = ""

    def needs(self, resource: str) -> dict[str, float]:
        """Put it in Ray's words."""
        # Each node has one of these, and a little of it is enough to be there.
        place = {f"node:{self.address}": 0.001} if self.address else {}
        return {resource: self.count, **place}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A living node of the cluster, and how many devices are free there, of how many."""

    host: str
    address: str
    free: float
    total: float


class Reservation:
    """The nodes of one job: as many as are wanted, or as are there and enough, or those of a rank table.

    Args:
        least: Nodes below which there is no job.
        most: Nodes that are wanted.
        count: Devices to occupy on each, None for all that so many nodes have.
        resource: `NPU` or `CPU`.
        notify: Takes a line when nodes have to be waited for.

    Attributes:
        given: Rank table that names the nodes. They are reserved whole, for Ray chooses NPUs by itself.
        group: Ray's placement group, None while nothing is reserved.
    """

    def __init__(
        self, *, least: int, most: int, count: int | None, resource: str, notify: Callable[[str], None]
    ) -> None:
        self._least = least
        self._most = most
        self._count = count
        self._resource = resource
        self._notify = notify
        self.given: GivenTable | None = None
        self.group: Any = None

    async def take(self, bound: float) -> list[Bundle]:
        """Reserve the nodes, and wait until they are ours.

        Args:
            bound: Seconds to wait.

        Returns:
            What is reserved on each node.

        Raises:
            PlatformError: They do not get free in time.
            RankTableError: The rank table's nodes are not in the cluster, or smaller than it says.
        """
        began = time.monotonic()
        number, bundles = self._most, list[Bundle]()
        ready: asyncio.Future[Any] | None = None
        told, told_at = "", 0.0
        # Ray tells nobody that its nodes have changed, so they are looked at.
        while True:
            nodes = await _at_once(self._nodes)
            if self.given is None and self._count is None:
                self._count = self._common_count(nodes)
            if ready is None and (bundles := self._bundles(nodes, number)):
                ready = await self._reserve(bundles)
            there, able = self._what_there_is(nodes, number)
            passed = time.monotonic() - began
            if passed >= bound:
                raise self._not_found(there, bound)
            await _either(ready, min(LOOK, bound - passed))
            if ready is not None and ready.done():
                ready.result()
                return bundles
            if self._least <= able < number and passed >= _LAST_CALL:
                number, ready = able, None
                await _at_once(self.release)
            elif there != told or time.monotonic() - told_at >= _REMINDER:
                left = f"{readable_time(max(0.0, bound - passed))} more at most (--placement-timeout)"
                if self._least <= able < number:
                    left = f"{readable_time(max(0.0, _LAST_CALL - passed))} more, then going on with {able}"
                self._notify(f"waiting for {self._words()}, {left}; {there}")
                told, told_at = there, time.monotonic()

    def release(self) -> None:
        """Give the nodes back; blocks."""
        from ray.util.placement_group import remove_placement_group

        if self.group is not None:
            remove_placement_group(self.group)
        self.group = None

    async def _reserve(self, bundles: Sequence[Bundle]) -> asyncio.Future[Any]:
        from ray.util.placement_group import placement_group

        def ask() -> Any:
            needs = [bundle.needs(self._resource) for bundle in bundles]
            self.group = placement_group(needs, strategy="STRICT_SPREAD")
            return self.group.ready().future()

        ready: asyncio.Future[Any] = asyncio.wrap_future(await _at_once(ask))
        # A group that is given back while we wait makes this fail, when nobody wants to know.
        ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        return ready

    def _common_count(self, nodes: Sequence[_Node]) -> int | None:
        """Tell how many devices each of the nodes that are wanted, or there, has; None if too few are there.

        Raises:
            PlatformError: No node has any, so that waiting for more is most likely in vain.
        """
        able = sorted((int(node.total) for node in nodes if node.total >= 1), reverse=True)[: self._most]
        if not able:
            raise PlatformError(
                f"found no node with NPUs in the Ray cluster; expected {self._wanted()}: start Ray on those "
                "that have NPUs, or ask for CPUs (resource='CPU', --resource CPU) and give nproc_per_node"
            )
        return able[-1] if len(able) >= self._least else None

    def _bundles(self, nodes: Sequence[_Node], number: int) -> list[Bundle]:
        """Say what to reserve; nothing while nodes are missing that would settle it."""
        if self.given is None:
            return [] if self._count is None else [Bundle(count=self._count)] * number
        bundles = []
        for part, place in zip(self.given.nodes, self._places(nodes), strict=True):
            if place is None:
                return []
            node = nodes[place]
            if len(part.rows) > node.total:
                raise RankTableError(
                    f"rank table {self.given.path}: found {len(part.rows)} devices of "
                    f"{printable(part.name)}; expected at most {node.total:g}, the {self._resource} that Ray "
                    f"has on it ({node.host}): give the table of these nodes",
                    path=str(self.given.path),
                )
            bundles.append(Bundle(count=self._needed(node, len(part.rows)), address=node.address))
        return bundles

    def _needed(self, node: _Node, rows: int) -> int:
        return rows if self._resource == "CPU" else int(node.total)

    def _places(self, nodes: Sequence[_Node]) -> list[int | None]:
        assert self.given is not None
        return self.given.places_among([(node.host, node.address) for node in nodes])

    def _wanted(self) -> str:
        return f"{self._most}" if self._least == self._most else f"{self._least} to {self._most}"

    def _words(self) -> str:
        if self.given is not None:
            return f"the nodes of rank table {self.given.path}"
        nodes = f"{self._wanted()} node{'s' if self._most > 1 else ''}"
        return f"{nodes} with {self._count or ''} {self._resource} free on each".replace("  ", " ")

    def _not_found(self, there: str, bound: float) -> PlatformError:
        what, do = f"no {self._words()}", "wait for other jobs, ask for fewer, add nodes"
        if self.given is not None:
            what = f"not all nodes of rank table {self.given.path} free in the Ray cluster"
            do = "give the table of its nodes, start Ray on those that are missing, wait for other jobs"
        return PlatformError(
            f"found {what} within {bound:g} s; {there}: {do}, or wait longer with "
            "--placement-timeout (placement_timeout)"
        )

    def _what_there_is(self, nodes: Sequence[_Node], number: int) -> tuple[str, int]:
        """Say what is free, and how many of the nodes that are wanted that makes."""
        if self.given is not None:
            return self._what_there_is_of_table(nodes)
        able = sum(node.free >= (self._count or 1) for node in nodes)
        found = sorted((node for node in nodes if node.total), key=lambda one: (-one.free, one.host))
        listed = _some([f"{one.host} {one.free:g} of {one.total:g}" for one in found])
        return f"{able} of {number} now; {self._resource} free: {listed or 'on no node'}", able

    def _what_there_is_of_table(self, nodes: Sequence[_Node]) -> tuple[str, int]:
        assert self.given is not None
        missing, busy = [], []
        for part, place in zip(self.given.nodes, self._places(nodes), strict=True):
            if place is None:
                missing.append(printable(part.name))
            elif (node := nodes[place]).free < self._needed(node, len(part.rows)):
                busy.append(f"{node.host} {node.free:g} of {node.total:g}")
        able = len(self.given.nodes) - len(missing) - len(busy)
        parts = [f"{able} of {len(self.given.nodes)} now"]
        if missing:
            known = _some(sorted(f"{node.host} ({node.address})" for node in nodes))
            parts.append(f"{_some(missing)} not among {known or 'no nodes'}")
        if busy:
            parts.append(f"{self._resource} free: {_some(busy)}")
        return "; ".join(parts), able

    def _nodes(self) -> list[_Node]:
        """Look at the living nodes; blocks."""
        import ray

        # A client of the cluster (`ray://`) has no state of its own to look at.
        free = ray.get(ray.remote(num_cpus=0)(_free).remote()) if through_client() else _free()
        return [
            _Node(
                host=str(node["NodeManagerHostname"]),
                address=str(node["NodeManagerAddress"]),
                free=float(free.get(node["NodeID"], {}).get(self._resource, 0)),
                total=float(node["Resources"].get(self._resource, 0)),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]


def through_client() -> bool:
    """Tell whether this program is outside of the cluster that it is connected to: `ray://`."""
    import ray

    return bool(ray.util.client.ray.is_connected())


def _free() -> dict[str, dict[str, float]]:
    """What is free on each living node, by its number and the name of the resource."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more


async def _either(future: asyncio.Future[Any] | None, seconds: float) -> None:
    """Wait for a future where there is one, at most some seconds."""
    if future is None:
        await asyncio.sleep(seconds)
    else:
        await asyncio.wait({future}, timeout=seconds)


async def _at_once(function: Callable[[], T]) -> T:
    """Call Ray in a thread, and see the call to its end before a cancellation goes on."""
    waits = Patience(lambda: None)
    result = await waits.wait(in_thread(function))
    waits.settle()
    return result
