"""Where we run: which nodes and devices the job has, and which node this one is."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from davincirunsdk.cluster import Cluster, Device, Node, Wish
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.platforms import host, machine, modelarts, own_node, slurm, volcano
from davincirunsdk.platforms.site import TORCH_PORT, Platform, Site, shared_port, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.rank_table import RankTable
    from davincirunsdk.rank_table.file import Place

__all__ = ["PLATFORMS", "detect", "job_id", "locate", "log_root", "prepare_rank_table"]

PLATFORMS: tuple[Platform, ...] = (
    modelarts,  # before volcano: it is built on Volcano and sets the same VC_* variables
    volcano,  # before slurm: Slurm may run in pods, then the pods are what counts
    slurm,
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
    }
)  # fmt: skip

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
        notify: Takes lines for people: what is waited for, and warnings (which are logged as well).
        root: Folder that stands for `/` in all fixed paths.

    Returns:
        The cluster.

    Raises:
        RankTableError: The table is wrong, or contradicts the wish.
        RankTableTimeoutError: It did not become complete in time.
        PlatformError: Devices, nodes or our place cannot be told.

    Cancellation ends the waiting; nothing is left running but a read that hangs.
    """
    env = _own(env)
    platform = detect(env)
    site = platform.site(env)
    if wish.nnodes is not None and wish.node_rank is not None and wish.node_rank >= wish.nnodes:
        raise PlatformError(
            f"found node rank {wish.node_rank} of {wish.nnodes} nodes; expected 0 to {wish.nnodes - 1}"
        )
    place = await _in_thread(lambda: _find_table(wish.rank_table, env, root))
    if place is None:
        return await _in_thread(lambda: _without_table(wish, env, platform.NAME, site, root))
    table = await _read_table(place, env, site, wish.rank_table_timeout, notify)
    return await _in_thread(lambda: _with_table(table, place, wish, env, platform.NAME, site, root))


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
    env = _own(env)
    site = detect(env).site(env)
    place = await _in_thread(lambda: _find_table(None, env, root))
    if place is None:
        return None
    table = await _read_table(place, env, site, None, notify)

    def prepare() -> dict[str, str]:
        nodes = table.nodes()
        own = nodes[
            own_node.find(
                nodes, env=env, site=site, wanted=None, npus=machine.npus(root), path=str(place.path)
            )
        ]
        target = _documented_target(env, root)
        path = place.path.absolute() if _usable(table, place.path) else _write(table, place.path, target, env)
        return {
            "RANK_TABLE_FILE": str(path),
            "MA_CURRENT_HOST_IP": own.server.server_id,
            "RANK_START": str(own.rows[0].rank),
            "RANK_SIZE": str(table.world_size),
        }

    return await _in_thread(prepare)


def job_id(env: Mapping[str, str]) -> str:
    """Name the job, as ModelArts' own tools do: it stands in the names of log files."""
    if env.get("BATCH_JOB_ID"):
        return env["BATCH_JOB_ID"]
    if env.get("MA_VJ_NAME"):
        return env["MA_VJ_NAME"].replace("ma-job", "modelarts-job", 1)
    return machine.host_name()


def log_root(env: Mapping[str, str], *, command_line: bool = True) -> Path:
    """Tell the folder for the logs that CANN and the frameworks write.

    Args:
        env: The environment.
        command_line: True for the rule of the command line: $BATCH_TASK_LOG_PATH if it exists, else
            $MA_MOUNT_PATH/log if it exists, else /tmp/log. False for the documented Python API's: /tmp/logdir.

    Returns:
        The folder; it need not exist.
    """
    if not command_line:
        return Path("/tmp/logdir")
    if env.get("BATCH_TASK_LOG_PATH") and Path(env["BATCH_TASK_LOG_PATH"]).is_dir():
        return Path(env["BATCH_TASK_LOG_PATH"])
    if env.get("MA_MOUNT_PATH") and Path(env["MA_MOUNT_PATH"], "log").is_dir():
        return Path(env["MA_MOUNT_PATH"], "log")
    return Path("/tmp/log")


def _own(env: Mapping[str, str]) -> Mapping[str, str]:
    if any(env.get(mark) for mark in OUTER_MARKS):
        return {name: value for name, value in env.items() if name not in OUTER_VARIABLES}
    return env


async def _in_thread(work: Callable[[], _T]) -> _T:
    # A thread of our own: an embedding program's default executor may be busy, and work that hangs on
    # a dead network file system must not be waited for after a cancellation.
    pool = ThreadPoolExecutor(1, thread_name_prefix="davincirun-platform")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


def _find_table(given: Path | None, env: Mapping[str, str], root: Path) -> Place | None:
    # Here and not at the top: without a table the launcher starts without a JSON library.
    from davincirunsdk.rank_table import file

    return file.find(env, given=given, root=root)


async def _read_table(
    place: Place,
    env: Mapping[str, str],
    site: Site,
    limit: float | None,
    notify: Callable[[str], None],
) -> RankTable:
    from davincirunsdk.rank_table import file

    if limit is None:
        limit = _seconds(env)
    asked = limit is not None
    limit = DEFAULT_TIMEOUT if limit is None else limit
    patience = file.Patience(
        limit=limit,
        missing=limit if asked or site.writes_table else SHORT_WAIT,
        missing_folder=limit if asked or site.writes_table else 0.0,
        hint=site.hint,
    )
    table, _ = await file.wait_for(place, patience=patience, notify=notify)
    for warning in table.warnings:
        line = f"rank table {place.path}: {warning}"
        _log.warning("%s", line)
        notify(line)
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
            f"found no such number in the environment variable {TIMEOUT_VARIABLE}; expected seconds, 0 or more"
        )
    return value


def _with_table(
    table: RankTable, place: Place, wish: Wish, env: Mapping[str, str], platform: str, site: Site, root: Path
) -> Cluster:
    path = place.path
    nodes = table.nodes()
    if wish.nnodes is not None and wish.nnodes != len(nodes):
        raise RankTableError(
            f"rank table {path}: found {len(nodes)} nodes; expected {wish.nnodes}, the nnodes asked for: "
            "drop that figure, or give the table of this job",
            path=str(path),
        )
    present = machine.npus(root)
    place_here = own_node.find(nodes, env=env, site=site, wanted=wish.node_rank, npus=present, path=str(path))
    own = nodes[place_here]
    if wish.nproc_per_node is not None and wish.nproc_per_node != len(own.rows):
        raise RankTableError(
            f"rank table {path}: found {len(own.rows)} devices on this node ({own.name}); expected "
            f"{wish.nproc_per_node}, the nproc_per_node asked for: with a table the two must agree, so drop "
            "that figure or give another table",
            path=str(path),
        )
    if _usable(table, path):
        rank_table = path.absolute()
    else:
        rank_table = _write(table, path, _own_target(table, env, root), env)
    devices = {row.device_id for row in own.rows}
    same_site = site if site.nnodes == len(nodes) else Site()
    return Cluster(
        nodes=tuple(
            Node(
                node_rank=node_rank,
                name=node.name,
                devices=tuple(
                    Device(device_id=row.device_id, rank=row.rank, device_ip=row.device_ip or "")
                    for row in node.rows
                ),
            )
            for node_rank, node in enumerate(nodes)
        ),
        node_rank=place_here,
        master_addr=_first(wish.master_addr, env.get("MASTER_ADDR"))
        or (same_site.master_addr if len(nodes) > 1 else None)
        or (own_node.address_of(nodes[0]) if len(nodes) > 1 else "127.0.0.1"),
        master_port=_master_port(wish, env, same_site, len(nodes), key=lambda: _digest(table)),
        job_id=job_id(env),
        rank_table=rank_table,
        log_root=log_root(env),
        log_dir=_log_dir(env, platform, site),
        # On a bare host that sees more NPUs than the table gives it, index 0 would be another's device.
        logical_devices="ASCEND_RT_VISIBLE_DEVICES" in env or not devices < set(present),
        physical_device_id=machine.wants_physical_ids(root),
        npus=True,
        platform=platform,
    )


def _without_table(wish: Wish, env: Mapping[str, str], platform: str, site: Site, root: Path) -> Cluster:
    if wish.nnodes is not None and wish.nnodes != site.nnodes:
        site = Site(log_dir=site.log_dir)  # the user's job is another one than the platform's
    nnodes = wish.nnodes or site.nnodes or 1
    node_rank = wish.node_rank if wish.node_rank is not None else site.node_rank
    if node_rank is None and nnodes == 1:
        node_rank = 0
    if node_rank is None or node_rank >= nnodes:
        found = "no node rank" if node_rank is None else f"node rank {node_rank}"
        raise PlatformError(
            f"found {found} for a job of {nnodes} node{'s' if nnodes > 1 else ''} without a rank table "
            f"(platform {platform}); expected 0 to {nnodes - 1}: give --node-rank"
        )
    master_addr = _first(wish.master_addr, env.get("MASTER_ADDR"), site.master_addr if nnodes > 1 else None)
    if master_addr is None:
        if nnodes > 1:
            raise PlatformError(
                f"found no address of node 0 for a job of {nnodes} nodes without a rank table; "
                "expected one: give --master-addr or set MASTER_ADDR"
            )
        master_addr = "127.0.0.1"
    ids, npus = _devices(wish.nproc_per_node, env, root)
    own_name = machine.host_name()
    names = site.hosts or tuple(own_name if i == node_rank else f"node {i}" for i in range(nnodes))
    return Cluster(
        nodes=tuple(
            Node(
                node_rank=i,
                name=names[i],
                devices=tuple(
                    Device(device_id=device_id, rank=i * len(ids) + local)
                    for local, device_id in enumerate(ids)
                ),
            )
            for i in range(nnodes)
        ),
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=_master_port(wish, env, site, nnodes),
        job_id=job_id(env),
        rank_table=None,
        log_root=log_root(env),
        log_dir=_log_dir(env, platform, site),
        physical_device_id=machine.wants_physical_ids(root),
        npus=npus,
        platform=platform,
    )


def _devices(wanted: int | None, env: Mapping[str, str], root: Path) -> tuple[tuple[int, ...], bool]:
    present = machine.visible(env, machine.npus(root))
    if wanted is None:
        if not present:
            raise PlatformError(
                "found no rank table and no NPU (no device file /dev/davinci0 or the like"
                f"{', or none that ASCEND_RT_VISIBLE_DEVICES lets see' if 'ASCEND_RT_VISIBLE_DEVICES' in env else ''}"
                "); expected to learn how many workers to start: give --nproc-per-node (argument "
                "nproc_per_node), or a rank table with --rank-table (argument rank_table) or RANK_TABLE_FILE"
            )
        return present, True
    if not present:
        return tuple(range(wanted)), False
    if wanted > len(present):
        raise PlatformError(
            f"found {len(present)} NPUs on this node; expected at least {wanted}, the nproc_per_node asked for: "
            "ask for fewer, or set ASCEND_RT_VISIBLE_DEVICES to nothing to run without NPUs"
        )
    return present[:wanted], True


def _master_port(
    wish: Wish,
    env: Mapping[str, str],
    site: Site,
    nnodes: int,
    key: Callable[[], str] | None = None,
) -> int | None:
    """Options, then the environment, then the platform; one node alone may use any free port."""
    port = (
        wish.master_port if wish.master_port is not None else whole(env, "MASTER_PORT", least=1, most=65535)
    )
    if port is not None or nnodes == 1:
        return port
    if site.master_port is not None:
        return site.master_port
    return shared_port(key()) if key is not None else TORCH_PORT


def _first(*values: str | None) -> str | None:
    return next((value for value in values if value), None)


def _log_dir(env: Mapping[str, str], platform: str, site: Site) -> Path | None:
    return site.log_dir or (log_root(env) if platform == modelarts.NAME else None)


def _digest(table: RankTable) -> str:
    from davincirunsdk.rank_table import dump
    from davincirunsdk.rank_table.file import digest

    return digest(dump(table))


def _usable(table: RankTable, path: Path) -> bool:
    """Tell whether HCCL reads the file as it stands; it refuses names without `.json`."""
    return table.as_is and path.suffix == ".json"


def _base(env: Mapping[str, str], root: Path) -> Path:
    return Path(_first(env.get("MA_HOME"), env.get("MA_MOUNT_PATH")) or root / "home/ma-user")


def _documented_target(env: Mapping[str, str], root: Path) -> Path:
    from davincirunsdk.rank_table.file import TABLE_NAME

    return _base(env, root) / "rank_table" / TABLE_NAME


def _own_target(table: RankTable, env: Mapping[str, str], root: Path) -> Path:
    """A name by content next to the documented target, where ModelArts' home exists; else a private folder."""
    name = f"jobstart_hccl_{_digest(table)}.json"
    base = _base(env, root)
    return base / "rank_table" / name if base.is_dir() else _private_folder(env) / name


def _write(table: RankTable, source: Path, target: Path, env: Mapping[str, str]) -> Path:
    from davincirunsdk.rank_table import dump
    from davincirunsdk.rank_table.file import digest, write_text

    text = dump(table)
    if target.exists() and target.samefile(source):
        target = target.with_name(f"jobstart_hccl_{digest(text)}.json")
    try:
        if target.is_file() and target.read_text(encoding="utf-8", errors="replace") == text:
            return target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(text, target)
    except OSError as error:
        private = _private_folder(env) / f"jobstart_hccl_{digest(text)}.json"
        if private == target:
            raise RankTableError(
                f"the v1.0 rank table cannot be written to {target} ({error.strerror}); expected a folder "
                "with room that this user may write: set TMPDIR",
                path=str(source),
            ) from error
        _log.warning(
            "rank table %s cannot be written (%s); using %s instead", target, error.strerror, private
        )
        return _write(table, source, private, env)
    return target.absolute()


def _private_folder(env: Mapping[str, str]) -> Path:
    """A folder for this user alone, the same every time, so that repeated runs leave no trail of folders."""
    parent = Path(env.get("TMPDIR") or "/tmp")
    folder = parent / f"davincirun-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
        if info.st_uid == os.geteuid() and info.st_mode & 0o170077 == 0o040000:
            return folder
    except OSError:
        pass
    # Somebody else made it, or opened it to others.
    try:
        return Path(tempfile.mkdtemp(prefix="davincirun-", dir=parent))
    except OSError as error:
        raise PlatformError(
            f"no private folder can be made in {parent} ({error.strerror}); expected one that this user may "
            "write: set TMPDIR"
        ) from error
