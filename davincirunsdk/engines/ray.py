"""Ray places one agent on each of several nodes: `await run(["python", "train.py"], nnodes=4)`.

The cluster has to run already (`ray start`), with this package installed on every node. Each agent
is an asynchronous actor, the actors stand in a placement group that spreads them strictly, and each
asks for the NPUs of its node. Ray itself needs 13 s to tell that a node's raylet has died and
64 s for a cut link; `HEALTH_CHECKS` brings both down to a few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from davincirunsdk.concurrency import Patience, in_thread
from davincirunsdk.engines.agent import NodeAgent
from davincirunsdk.engines.driver import NodeLostError, NodesManager
from davincirunsdk.engines.whole import called_like, to_its_end, to_its_end_blocking
from davincirunsdk.errors import PlatformError
from davincirunsdk.options import JobKeywords, JobOptions, refuse_unknown, spelled_out, whole_number

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.engines.driver import NodeHandle
    from davincirunsdk.engines.messages import NodeFacts, NodePlan, NodeReport, NodeStarted
    from davincirunsdk.types import RunResult

logger: logging.Logger = logging.getLogger("davincirunsdk")

P = ParamSpec("P")
T = TypeVar("T")

HEALTH_CHECKS: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Variables for `ray start --head`, with which the loss of a node is known after about 5 s."""

_ACTOR_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""An actor that has to go would kill the guardian, its child, which then could not end the rest."""

_FROM_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_JOB_ID", *_ACTOR_ENVIRONMENT)
"""What Ray sets for an actor and means for it alone: one thread, its own debugger, its own job."""

_HEAD_STEP = 5.0
"""Seconds between two looks whether the head can be reached."""

_HEAD_PATIENCE = 60.0
"""Seconds without the head after which a node ends its workers; so long Ray lets a head restart.

By then the driver, if it is on the head's side of a cut, has ended the other nodes long ago.
"""

_LAST_WORDS = 0.5
"""Seconds that an agent without a raylet stays, for its last report to reach the driver."""


@spelled_out(JobKeywords)
def manager(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] | None = "./log",
    *,
    nnodes: int,
    resource: str = "NPU",
    address: str | None = None,
    placement_timeout: float = 300.0,
    collect: str = "all",
    notify: Callable[[str], None] | None = None,
    **keywords: Unpack[JobKeywords],
) -> NodesManager:
    """Describe a job over a Ray cluster, to be used as `async with manager(...) as job`.

    Args:
        command: See `NodesManager`, as for all arguments that are not named here.
        work_dir: See there.
        log_dir: See there.
        nnodes: Nodes of the job.
        resource: Ray's name of what a worker occupies: `NPU`, or `CPU` to run without NPUs.
        address: Of the cluster's head; by default RAY_ADDRESS, or the cluster on this machine. A
            program that is connected already stays with its cluster.
        placement_timeout: Seconds to wait for nodes that are free.
        collect: See there.
        notify: See there.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        The manager, not started yet.

    Raises:
        TypeError: As for `NodesManager`.
        ValueError: As for `NodesManager`.
    """
    refuse_unknown(keywords, JobKeywords.__annotations__)
    options = JobOptions.of(command, work_dir, log_dir, nnodes=whole_number("nnodes", nnodes, 1), **keywords)
    return manager_of(
        options,
        resource=resource,
        address=address,
        placement_timeout=placement_timeout,
        collect=collect,
        notify=notify,
    )


def manager_of(
    options: JobOptions,
    *,
    resource: str = "NPU",
    address: str | None = None,
    placement_timeout: float = 300.0,
    collect: str = "all",
    notify: Callable[[str], None] | None = None,
) -> NodesManager:
    """Do what `manager` does with options that have been checked before; `nnodes` must be among them.

    Args:
        options: What to run.
        resource: See `manager`, as for all others.
        address: See there.
        placement_timeout: See there.
        collect: See there.
        notify: See there.

    Raises:
        ValueError: Something that a job over a cluster needs was not given.
    """
    if options.nnodes is None:
        raise ValueError("nnodes is missing: expected the number of nodes that the job is to have")
    if resource not in ("NPU", "CPU"):
        raise ValueError(f"resource is {resource!r}: expected NPU or CPU")
    if resource == "CPU" and options.nproc_per_node is None:
        raise ValueError(
            "nproc_per_node is missing: without NPUs nothing else says how many workers to start"
        )
    placement = RayPlacement(
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        resource=resource,
        address=address,
        timeout=placement_timeout,
        notify=notify or (lambda text: logger.warning("%s", text)),
    )
    return NodesManager.from_options(placement, options, collect=collect, notify=notify)


@called_like(manager)
async def run(*arguments: Any, **options: Any) -> RunResult:
    """Run a command on several nodes of a Ray cluster and wait for its end on all of them.

    Cancelling stops the workers of all nodes with their grace period, then lets the cancellation
    through; `asyncio.timeout` around it works.

    Args:
        *arguments: See `manager`.
        **options: See `manager`; `nnodes` is needed.

    Returns:
        The result: workers of all nodes in rank order, paths as they are on the nodes.

    Raises:
        DistributedRuntimeError: A worker failed by itself, or a node was lost.
        PlatformError: There is no such cluster, or its nodes or their devices cannot be had.
        RankTableError: The nodes' NPUs make no rank table.
        WorkerSpawnError: The command cannot be started on one of the nodes.
    """
    return await to_its_end(manager(*arguments, **options))


@called_like(manager)
def run_blocking(*arguments: Any, **options: Any) -> RunResult:
    """Do what `run` does in code that is not asynchronous, in a notebook's cell too.

    Ctrl-C stops the workers of all nodes with their grace period, a second one at once, and
    `KeyboardInterrupt` is raised when they are gone. In the main thread of a program that has the
    default action for SIGTERM, that signal does the same and then ends the program.

    Args:
        *arguments: See `manager`.
        **options: See `manager`; `nnodes` is needed.

    Returns:
        As `run`.

    Raises:
        DistributedRuntimeError: As `run`, and so for all its other errors.
    """
    return to_its_end_blocking(manager(*arguments, **options))


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
            _, writer = await asyncio.wait_for(asyncio.open_connection(*place), _HEAD_STEP)
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(1.0)
        else:
            reached = time.monotonic()
            writer.close()
            await asyncio.sleep(_HEAD_STEP)


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


def _look_for_head(place: str) -> None:
    """Tell at once that nothing listens at an address, for which Ray itself would wait.

    Raises:
        PlatformError: So it is.
    """
    host, colon, port = place.rpartition(":")
    if not colon or "/" in place or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_STEP).close()
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
                runtime_env={"env_vars": _ACTOR_ENVIRONMENT},
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
