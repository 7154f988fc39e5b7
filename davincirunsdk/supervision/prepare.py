"""From a command and a cluster to the processes that have to be started: checked, before any runs."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.cluster import WorkerSpec
from davincirunsdk.environment.worker import folders_of, scheduler_environment, worker_environment
from davincirunsdk.errors import PlatformError, WorkerSpawnError
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.logs.file import LogFile, open_log_files
from davincirunsdk.logs.limit import LimitedLogFile
from davincirunsdk.supervision.worker import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.cluster import Cluster
    from davincirunsdk.options import JobOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is started for one job on this node.

    Attributes:
        job_id: First part of the log files' names.
        mark: What marks every process of the job.
        specs: Processes in the order of their start, auxiliary ones first.
        files: Their log files, open.
        events: The file for the job's events, open.
        log_dir: Folder of the log files.
    """

    job_id: str
    mark: str
    specs: tuple[WorkerSpec, ...]
    files: tuple[LogFile, ...]
    events: LogFile
    log_dir: Path


def prepare(
    options: JobOptions,
    cluster: Cluster,
    *,
    inherited: Mapping[str, str],
    on_trouble: Callable[[str], None],
) -> Launch:
    """Make folders, choose a port, build environments, open log files; blocking, for a thread.

    Args:
        options: What the user asked for.
        cluster: The job's nodes, and which is this one.
        inherited: The launcher's environment.
        on_trouble: Takes a sentence when a log file loses bytes.

    Returns:
        What to start.

    Raises:
        WorkerSpawnError: The command is not there or cannot be executed.
        PlatformError: A folder cannot be made, or the port is taken.
    """
    command, work_dir, framework, extra = options.command, options.work_dir, options.framework, options.env
    log_dir = options.log_dir or cluster.log_dir or options.default_log_dir
    _make_folder(work_dir, "work_dir")
    _check_command(command, work_dir, {**inherited, **extra})
    _make_folder(log_dir, "log_dir")
    outer = inherited.get(JOB_MARK)
    own = os.urandom(8).hex()
    mark = f"{outer}/{own}" if outer else own
    port = _choose_port(cluster, options.master_port)
    cores = len(os.sched_getaffinity(0))
    environments = [
        worker_environment(
            cluster=cluster,
            device=device,
            master_port=port,
            framework=framework,
            inherited=inherited,
            extra=extra,
            mark=mark,
            cores=cores,
        )
        for device in cluster.node.devices
    ]
    for environment in environments:
        _make_log_folders(environment)
    devices = cluster.node.devices
    numbers = [cluster.worker_device_id(device) for device in devices]
    endings = [
        f"-proc-rank-{device.rank}-device-{number}.txt"
        for device, number in zip(devices, numbers, strict=True)
    ]
    with_scheduler = framework == "mindspore" and cluster.rank_table is None and cluster.node_rank == 0
    if with_scheduler:
        endings.insert(0, "-scheduler.txt")

    def open_file(path: Path) -> LogFile:
        if options.log_limit is None or path.suffix != ".txt":
            return LogFile(path, on_trouble)
        return LimitedLogFile(path, on_trouble, options.log_limit)

    try:
        name = options.name or cluster.job_id.replace(os.sep, "_")
        job_id, (events, *files) = open_log_files(log_dir, name, ["-events.jsonl", *endings], open_file)
    except OSError as error:
        raise PlatformError(
            f"log_dir {log_dir}: a log file cannot be opened: {error.filename}: {explain(error)}; "
            "give a folder that can be written, with log_dir or --log-dir"
        ) from None
    specs = [
        WorkerSpec(
            rank=device.rank,
            local_rank=device.local_rank,
            device_id=numbers[place],
            npu_id=device.device_id if cluster.npus else -1,
            name=f"rank {device.rank}",
            command=command,
            env=environments[place],
            work_dir=work_dir,
            log_path=files[place + with_scheduler].path,
        )
        for place, device in enumerate(devices)
    ]
    if with_scheduler:
        scheduler = WorkerSpec(
            rank=-1,
            local_rank=-1,
            device_id=-1,
            name="scheduler",
            command=command,
            env=scheduler_environment(environments[0], cluster.world_size),
            work_dir=work_dir,
            log_path=files[0].path,
            auxiliary=True,
        )
        specs.insert(0, scheduler)
    return Launch(
        job_id=job_id, mark=mark, specs=tuple(specs), files=tuple(files), events=events, log_dir=log_dir
    )


def _make_folder(folder: Path, name: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlatformError(
            f"{name} {folder} cannot be made: {error.strerror}: {error.filename}; "
            f"give a folder that can be written, with {name} or --{name.replace('_', '-')}"
        ) from None


def _make_log_folders(environment: dict[str, str]) -> None:
    """Make the folders that CANN and the frameworks log to; without one, they use their defaults."""
    for folder in folders_of(environment):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError:
            for name in [name for name, value in environment.items() if value == folder]:
                del environment[name]


def _check_command(command: tuple[str, ...], work_dir: Path, environment: Mapping[str, str]) -> None:
    word = command[0]
    if os.sep in word:
        found: Path | None = work_dir / word
        where = f"looked for {found}"
    else:
        on_path = shutil.which(word, path=environment.get("PATH", os.defpath))
        if on_path is not None:
            return
        anywhere = shutil.which(word, mode=os.F_OK, path=environment.get("PATH", os.defpath))
        found = Path(anywhere) if anywhere is not None else None
        where = "looked in the folders of PATH"
    if found is None or not found.exists():
        raise WorkerSpawnError(
            f"command not found: {word!r} ({where}); "
            "give its path (relative paths are seen from the work_dir) or check the spelling",
            errno=errno.ENOENT,
        )
    if found.is_dir():
        raise WorkerSpawnError(f"command {word!r} is a folder: {found}; name a program", errno=errno.EACCES)
    if not os.access(found, os.X_OK):
        raise WorkerSpawnError(
            f"command {word!r} is not executable: {found}; "
            "run `chmod +x` on it, or put its interpreter in front",
            errno=errno.EACCES,
        )


def _choose_port(cluster: Cluster, wanted: int | None) -> int:
    if wanted is not None and cluster.node_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", wanted))
            except OSError as error:
                raise PlatformError(
                    f"master port {wanted} cannot be used: {error.strerror}; end the process that holds it, "
                    "give another one with master_port or --master-port, or none for any free port"
                ) from None
    if cluster.master_port is not None:
        return cluster.master_port
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
