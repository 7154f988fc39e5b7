"""Ray places one agent on each of several nodes: `await run(["python", "train.py"], nnodes=4)`.

The cluster has to run already (`ray start`), with this package installed on every node. Each agent
is an asynchronous actor, the actors stand in a placement group that spreads them strictly, and each
asks for the NPUs of its node. Ray itself needs 13 s to tell that a node's raylet has died and
64 s for a cut link; `HEALTH_CHECKS` brings both down to a few seconds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from davincirunsdk.arguments import node_range, refuse_unknown
from davincirunsdk.engines.driver import NodesManager
from davincirunsdk.engines.ray_placement import RayPlacement
from davincirunsdk.engines.whole import called_like, to_its_end, to_its_end_blocking
from davincirunsdk.options import JobKeywords, JobOptions, spelled_out

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.types import Event, RunResult

logger: logging.Logger = logging.getLogger("davincirunsdk")

HEALTH_CHECKS: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Variables for `ray start --head`, with which the loss of a node is known after about 5 s."""


@spelled_out(JobKeywords)
def manager(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] | None = "./log",
    *,
    nnodes: int | str | None = None,
    rank_table: str | os.PathLike[str] | None = None,
    rank_table_timeout: float | None = None,
    resource: str = "NPU",
    address: str | None = None,
    placement_timeout: float = 300.0,
    collect: str = "all",
    collect_logs: bool = False,
    notify: Callable[[str], None] | None = None,
    on_event: Callable[[Event], object] | None = None,
    **keywords: Unpack[JobKeywords],
) -> NodesManager:
    """Describe a job over a Ray cluster, to be used as `async with manager(...) as job`.

    Args:
        command: See `NodesManager`, as for all arguments that are not named here.
        work_dir: See there.
        log_dir: See there.
        nnodes: Nodes of the job; or the least and the most, such as `"2:4"`: then the job takes as many
            as are free, and after the loss of a node goes on with as many as are left. Not needed with a
            rank table.
        rank_table: Rank table that says which nodes and devices to use, and their ranks. Its nodes are
            found among Ray's by name, `server_id` or `host_ip`, and are reserved whole.
        rank_table_timeout: Seconds to wait for a complete rank table, here, or on nodes that need their
            platform's.
        resource: Ray's name of what a worker occupies: `NPU`, or `CPU` to run without NPUs.
        address: Of the cluster's head; by default RAY_ADDRESS, or the cluster on this machine. With
            `ray://HOST:10001` this program may be outside of the cluster (`pip install 'ray[client]'`). A
            program that is connected already stays with its cluster.
        placement_timeout: Seconds to wait for nodes that are free.
        collect: See there.
        collect_logs: See there.
        notify: See there.
        on_event: See there.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        The manager, not started yet.

    Raises:
        TypeError: As for `NodesManager`.
        ValueError: As for `NodesManager`.
    """
    refuse_unknown(keywords, JobKeywords.__annotations__)
    least, most = (None, None) if nnodes is None else node_range("nnodes", nnodes)
    options = JobOptions.of(
        command,
        work_dir,
        log_dir,
        nnodes=most,
        rank_table=rank_table,
        rank_table_timeout=rank_table_timeout,
        **keywords,
    )
    return manager_of(
        options,
        least_nodes=least,
        resource=resource,
        address=address,
        placement_timeout=placement_timeout,
        collect=collect,
        collect_logs=collect_logs,
        notify=notify,
        on_event=on_event,
    )


def manager_of(
    options: JobOptions,
    *,
    least_nodes: int | None = None,
    resource: str = "NPU",
    address: str | None = None,
    placement_timeout: float = 300.0,
    collect: str = "all",
    collect_logs: bool = False,
    notify: Callable[[str], None] | None = None,
    on_event: Callable[[Event], object] | None = None,
) -> NodesManager:
    """Do what `manager` does with options that have been checked before.

    `nnodes` must be among them, or a rank table.

    Args:
        options: What to run.
        least_nodes: Nodes that are enough, by default all of `nnodes`.
        resource: See `manager`, as for all others.
        address: See there.
        placement_timeout: See there.
        collect: See there.
        collect_logs: See there.
        notify: See there.
        on_event: See there.

    Raises:
        ValueError: Something that a job over a cluster needs was not given.
    """
    most, table = options.nnodes, options.rank_table
    if most is None and table is None:
        raise ValueError("nnodes is missing: expected the number of nodes that the job is to have")
    if table is not None and least_nodes not in (None, most):
        raise ValueError(f"nnodes is {least_nodes}:{most}, but a rank table names its nodes: leave it out")
    if resource not in ("NPU", "CPU"):
        raise ValueError(f"resource is {resource!r}: expected NPU or CPU")
    if resource == "CPU" and options.nproc_per_node is None and table is None:
        raise ValueError(
            "nproc_per_node is missing: without NPUs nothing else says how many workers to start"
        )
    placement = RayPlacement(
        least=least_nodes or most or 1,
        most=most or 1,
        nproc_per_node=options.nproc_per_node,
        resource=resource,
        address=address,
        timeout=placement_timeout,
        table_timeout=options.rank_table_timeout,
        grace_period=options.grace_period,
        notify=notify or (lambda text: logger.warning("%s", text)),
    )
    return NodesManager.from_options(
        placement, options, collect=collect, collect_logs=collect_logs, notify=notify, on_event=on_event
    )


@called_like(manager)
async def run(*arguments: Any, **options: Any) -> RunResult:
    """Run a command on several nodes of a Ray cluster and wait for its end on all of them.

    Cancelling stops the workers of all nodes with their grace period, then lets the cancellation
    through; `asyncio.timeout` around it works.

    Args:
        *arguments: See `manager`.
        **options: See `manager`.

    Returns:
        The result: workers of all nodes in rank order, paths as they are on the nodes.

    Raises:
        DistributedRuntimeError: A worker failed by itself, or a node was lost.
        PlatformError: There is no such cluster, or its nodes or their devices cannot be had.
        RankTableError: The nodes' NPUs make no rank table, or are not those of the one that was given.
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
        **options: See `manager`.

    Returns:
        As `run`.

    Raises:
        DistributedRuntimeError: As `run`, and so for all its other errors.
    """
    return to_its_end_blocking(manager(*arguments, **options))
