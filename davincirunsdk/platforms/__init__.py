"""Where we run: which nodes and devices the job has, and which node this one is."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from davincirunsdk.cluster import Fact
from davincirunsdk.concurrency import in_thread
from davincirunsdk.environment.stale import TABLES
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import cann, devices, interfaces
from davincirunsdk.platforms import (
    ascendjob,
    host,
    modelarts,
    openmpi,
    paths,
    pet,
    places,
    rendezvous,
    slurm,
    volcano,
    without_table,
)
from davincirunsdk.platforms.paths import job_id, log_root
from davincirunsdk.platforms.trust import WORDS, relied_upon

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.cluster import Cluster
    from davincirunsdk.host.interfaces import Interface
    from davincirunsdk.options import Wish
    from davincirunsdk.platforms.site import Platform, Site
    from davincirunsdk.rank_table import RankTable

__all__ = [
    "PLATFORMS",
    "detect",
    "job_id",
    "locate",
    "log_root",
    "prepare_rank_table",
    "read_table",
    "sites_of",
]

PLATFORMS: tuple[Platform, ...] = (
    modelarts,  # before volcano: it is built on Volcano and sets the same VC_* variables
    ascendjob,
    volcano,  # before slurm: Slurm may run in pods, then the pods are what counts
    slurm,
    pet,  # torchrun's names: whoever sets them may run on any of those above
    openmpi,
    host,  # last: it is always present
)

DEFAULT_TIMEOUT = 1800.0
"""Seconds to wait for a complete table: as long as HCCL itself waits."""

SHORT_WAIT = 5.0
"""Seconds for which a file that nobody is known to be writing may still appear.

A shared file system shows a new file late; longer than that, it is a wrong path."""

TIMEOUT_VARIABLE = "DAVINCIRUN_RANK_TABLE_TIMEOUT"

OUTER_MARKS = ("DAVINCIRUN_JOB", "TORCHELASTIC_RUN_ID")
"""Set for the workers of a davincirun or torchrun: what else stands there is the worker's, not ours."""

OUTER_VARIABLES = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "RANK_ID", "RANK_SIZE", "RANK_START", "DEVICE_ID", "ASCEND_DEVICE_ID",
        "MA_NUM_HOSTS", "DLS_TASK_NUMBER", "DLS_TASK_INDEX", "SLURM_NODEID", "SLURM_NNODES",
        "SLURM_JOB_NODELIST",
    }
)  # fmt: skip

OUTER_PREFIXES = ("PET_", "OMPI_", "VC_", "VK_", "MS_", "SLURM_STEP_")
"""The outer launcher has used up what these say: its worker is one process on one node."""

_log = logging.getLogger("davincirunsdk")
_T = TypeVar("_T")


def detect(env: Mapping[str, str]) -> Platform:
    """Tell which platform we run on: the first in `PLATFORMS` that is present."""
    return next(platform for platform in PLATFORMS if platform.is_present(env))


async def locate(
    wish: Wish,
    env: Mapping[str, str],
    *,
    notify: Callable[[str], None],
    root: Path = Path("/"),
) -> Cluster:
    """Find out which nodes and devices the job has, and which node this one is.

    With a rank table (the wish's, else the environment's, else one at a place where platforms are
    known to put it) everything comes from it. It is waited for until it is complete, for at most
    `wish.rank_table_timeout` seconds, else DAVINCIRUN_RANK_TABLE_TIMEOUT, else 1800 as in HCCL.
    A *missing* file is waited for that long only where it can be expected to come: on ModelArts and
    Kubernetes, or if a time limit was given. Elsewhere it is most likely a wrong path, so the error
    comes after 5 seconds, and at once if the folder is missing too.

    A table that HCCL cannot read as it stands (v0.1, lab mode, numbers instead of strings) is
    written anew, as `Cluster.rank_table`, under a name made from its content: no other job's table
    is overwritten, the source is never touched.

    Without a table the node count and our place are the wish's, else the platform's; the devices
    are `nproc_per_node`, else one per NPU device file.

    Args:
        wish: What the user asked for.
        env: The environment. The ranks and addresses that an outer davincirun or torchrun set for
            its worker are not taken for wishes.
        notify: Takes lines for people about what is waited for. Warnings are logged.
        root: Folder that stands for `/` in all fixed paths.

    Returns:
        The cluster.

    Raises:
        RankTableError: The table is wrong, or contradicts the wish.
        RankTableTimeoutError: It did not become complete in time.
        PlatformError: Devices, nodes or our place cannot be told.

    Cancellation ends the waiting; nothing is left running but a read that hangs.
    """
    env = without_outer_job(env)
    platform = (await in_thread(lambda: detect(env))).NAME
    if wish.nnodes is not None and wish.node_rank is not None and wish.node_rank >= wish.nnodes:
        raise PlatformError(
            f"found node rank {wish.node_rank} of {wish.nnodes} nodes; expected 0 to {wish.nnodes - 1}"
        )
    place = await in_thread(lambda: places.find(env, given=wish.rank_table, root=root))
    sites = relied_upon(
        await in_thread(lambda: sites_of(env)),
        wish,
        table=str(place.path) if place else "",
        ignore=wish.ignore_platform,
        notify=notify,
    )
    notes: list[str] = []
    if place is None:
        cluster = await in_thread(
            lambda: without_table.cluster(wish, env, platform=platform, sites=sites, root=root)
        )
    else:
        table = await read_table(place, env, sites, wish.rank_table_timeout, notify)
        cluster = await in_thread(
            lambda: _from_table(table, place.path, wish, env, platform, sites, root, notes.append)
        )
    if wish.bind != "none":
        cluster = await in_thread(lambda: _bound(cluster, wish.bind, env, root, notes.append))
    if cluster.device_files:
        notes.append(await in_thread(lambda: cann.missing(env, root)))
    for note in filter(None, notes):
        notify(note)
    cluster = await in_thread(lambda: _with_interface(cluster, wish.iface))
    if len(cluster.nodes) > 1:
        told = {fact.name for fact in cluster.facts if fact.believed and not fact.source.startswith("rank")}
        await rendezvous.check(
            cluster,
            pods=any(site.pods for site in sites),
            from_table=place is not None and WORDS["master_addr"] not in told,
            ignore=wish.ignore_platform,
            notify=notify,
        )
    return cluster


def _bound(
    cluster: Cluster, mode: str, env: Mapping[str, str], root: Path, notify: Callable[[str], None]
) -> Cluster:
    """Choose the CPUs of this node's workers."""
    from davincirunsdk.host import binding

    if mode == "auto" and env.get(binding.AFFINITY, "0").strip()[:1] not in ("0", ""):
        notify(f"workers are not bound to CPUs: {binding.AFFINITY} has torch_npu do that")
        return cluster
    topology = binding.read_topology(root)
    ordered = sorted(cluster.node.devices, key=lambda device: device.local_rank)
    numbers = [device.device_id for device in ordered]
    near = None
    if cluster.npus:
        near = binding.nodes_of_npus(numbers, devices.npus(root), topology, root, env.get("PATH"))
    bound, why_not = binding.plan(mode, numbers, near, topology)
    if not bound:
        notify(f"workers are not bound to CPUs: {why_not}")
        return cluster
    by_number = dict(zip(numbers, bound, strict=True))
    own = tuple(by_number[device.device_id] for device in cluster.node.devices)
    facts = [
        Fact(
            name=f"CPUs of rank {device.rank}",
            value=devices.span(sorted(one.cpus)),
            source=f"--bind {mode}: {one.why}",
            believed=True,
        )
        for device, one in zip(cluster.node.devices, own, strict=True)
    ]
    return replace(cluster, binding=own, facts=(*cluster.facts, *facts))


def _with_interface(cluster: Cluster, wanted: str) -> Cluster:
    """Find the interface to the other nodes; one that was named counts for one node, too."""
    if wanted == "none":
        return cluster
    if wanted != "auto":
        found: Interface | None = interfaces.named(wanted)
    else:
        found = interfaces.towards(cluster.master_addr) if len(cluster.nodes) > 1 else None
    if found is None:
        return cluster
    fact = Fact(
        name="network interface", value=f"{found.name} ({found.address})", source=found.why, believed=True
    )
    return replace(cluster, interface=found, facts=(*cluster.facts, fact))


def _from_table(
    table: RankTable,
    path: Path,
    wish: Wish,
    env: Mapping[str, str],
    platform: str,
    sites: tuple[Site, ...],
    root: Path,
    notify: Callable[[str], None],
) -> Cluster:
    from davincirunsdk.platforms import from_table

    return from_table.cluster(
        table, path, wish, env, platform=platform, sites=sites, root=root, notify=notify
    )


def sites_of(env: Mapping[str, str], nnodes: int | None = None) -> tuple[Site, ...]:
    """Ask every platform that is present.

    Args:
        env: The environment.
        nnodes: Leave out those that speak of another number of nodes.

    Returns:
        What they say, in order of trust.
    """
    present = [platform for platform in PLATFORMS if platform.is_present(env)]
    if modelarts in present and volcano in present:
        present.remove(volcano)
    sites = [platform.site(env) for platform in present]
    return tuple(site for site in sites if nnodes is None or site.nnodes == nnodes)


async def prepare_rank_table(
    env: Mapping[str, str], *, notify: Callable[[str], None], root: Path = Path("/")
) -> dict[str, str] | None:
    """Do the work of `init_rank_table()`: find, await and convert the table; say what to set.

    A table that HCCL reads as it stands is left where it is. Any other is written to
    `${MA_HOME}`, else `${MA_MOUNT_PATH}`, else `/home/ma-user`, below it `rank_table/jobstart_hccl.json`,
    in one step; if that folder cannot be written, to a private one, with a warning. With the
    variables set, a second call gives the same. Waiting is as in `locate`.

    Args:
        env: The environment.
        notify: Takes lines for people.
        root: Folder that stands for `/` in all fixed paths.

    Returns:
        RANK_TABLE_FILE (a file), MA_CURRENT_HOST_IP, RANK_START and RANK_SIZE; None when no table
        is named and none is at a known place.

    Raises:
        RankTableError: The table is wrong.
        RankTableTimeoutError: It did not become complete in time.
        PlatformError: This host cannot be found in it.
    """
    env = without_outer_job(env, keep_table=True)
    place = await in_thread(lambda: places.find(env, root=root))
    if place is None:
        return None
    table = await read_table(place, env, await in_thread(lambda: sites_of(env)), None, notify)

    def prepare() -> dict[str, str]:
        from davincirunsdk.platforms import from_table, own_node

        nodes = from_table.nodes_of(table, len(devices.visible(env, devices.npus(root))), str(place.path))
        own = nodes[own_node.find(nodes, env=env, sites=sites_of(env, len(nodes)), path=str(place.path))]
        return {
            "RANK_TABLE_FILE": str(paths.file_for_hccl(table, place.path, env, root, documented=True)),
            "MA_CURRENT_HOST_IP": own.server.server_id,
            "RANK_START": str(own.rows[0].rank),
            "RANK_SIZE": str(table.world_size),
        }

    return await in_thread(prepare)


def without_outer_job(env: Mapping[str, str], *, keep_table: bool = False) -> Mapping[str, str]:
    """Leave out what an outer davincirun or torchrun set or used for its worker, its marks included.

    That worker is one process on one node: a job that it starts is on this node, unless it is told more.
    The outer job's rank table would start all of its ranks once more, from each of them.

    Args:
        env: The environment.
        keep_table: Leave the rank table, for a script that only asks for it.
    """
    if any(env.get(mark) for mark in OUTER_MARKS):
        outer = OUTER_VARIABLES.union(OUTER_MARKS)
        return {
            name: value
            for name, value in env.items()
            if name not in outer
            and not name.startswith(OUTER_PREFIXES)
            and (keep_table or name not in TABLES)
        }
    return env


async def read_table(
    place: places.Place,
    env: Mapping[str, str],
    sites: tuple[Site, ...],
    limit: float | None,
    notify: Callable[[str], None],
) -> RankTable:
    """Wait for a rank table as `locate` does, and read it.

    Args:
        place: Where it is, or should be.
        env: The environment.
        sites: What the platforms say: a missing file may be one that they write.
        limit: Seconds to wait, None for the environment's or the default.
        notify: Takes lines for people about what is waited for. Warnings are logged.

    Raises:
        RankTableError: The table is wrong, or is not there.
        RankTableTimeoutError: It did not become complete in time.
        PlatformError: The environment's limit is no number.
    """
    # Not at the top: without a table the launcher starts without a JSON library. In a thread first:
    # the import takes longer than the loop may be held up.
    await in_thread(lambda: import_module("davincirunsdk.rank_table.file"))
    from davincirunsdk.rank_table import file

    if limit is None:
        limit = _seconds(env)
    asked = limit is not None
    limit = DEFAULT_TIMEOUT if limit is None else limit
    writes = any(site.writes_table for site in sites)
    patience = file.Patience(
        limit=limit,
        missing=limit if asked or writes else SHORT_WAIT,
        missing_folder=limit if asked or writes else 0.0,
        hint=next((site.hint for site in sites if site.hint), ""),
    )
    table, _ = await file.wait_for(place.path, patience=patience, named_by=place.named_by, notify=notify)
    for warning in table.warnings:
        _log.warning("rank table %s: %s", place.path, warning)
    return table


def _seconds(env: Mapping[str, str]) -> float | None:
    text = env.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise PlatformError(
            f"found something else than seconds in the environment variable {TIMEOUT_VARIABLE}; "
            "expected 0 or more"
        )
    return value
