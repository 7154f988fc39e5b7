"""From a command and a cluster to the processes that have to be started: checked, before any runs.

`prepare` does what is the job's once; what each attempt needs anew (log files, port, environments) is a
`Launch`: the first comes with it, `Preparation.again` makes the next.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from davincirunsdk.cluster import WorkerSpec, file_name
from davincirunsdk.environment.worker import folders_of, scheduler_environment, worker_environment
from davincirunsdk.errors import PlatformError, WorkerSpawnError, explain
from davincirunsdk.host.memory import memory_kills
from davincirunsdk.host.ports import free_port
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.logs.file import LogFile, keep_attempt, open_log_files
from davincirunsdk.logs.kept import keep_newest, numbers_of, point_to
from davincirunsdk.logs.limit import LimitedLogFile
from davincirunsdk.supervision.placeholders import fill
from davincirunsdk.supervision.script_file import check_module, check_script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from davincirunsdk.cluster import Cluster, Device
    from davincirunsdk.options import JobOptions


_MANY_RUNS = 50
"""Runs that may be kept without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one attempt starts on this node.

    Attributes:
        specs: Processes in the order of their start, auxiliary ones first.
        files: Their log files, open.
    """

    specs: tuple[WorkerSpec, ...]
    files: tuple[LogFile, ...]

    def close(self) -> None:
        """Close the files of an attempt that is not begun."""
        for file in self.files:
            file.close()


class _Own(NamedTuple):
    """What a user has given, with one worker's numbers filled in."""

    command: tuple[str, ...]
    work_dir: Path
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What is the same for every attempt of one job on this node.

    Attributes:
        options: What the user asked for.
        cluster: The job's nodes, and which is this one.
        inherited: The launcher's environment.
        on_trouble: Takes a sentence when a log file loses bytes.
        job_id: First part of the log files' names.
        mark: What marks every process of the job.
        log_dir: Folder of the log files.
        memory_kills: The kernel's count of kills for memory here, None if unknown.
        events: The file for the job's events, open.
        first: What the first attempt starts.
    """

    options: JobOptions
    cluster: Cluster
    inherited: Mapping[str, str]
    on_trouble: Callable[[str], None]
    job_id: str
    mark: str
    log_dir: Path
    memory_kills: int | None
    events: LogFile
    first: Launch

    def again(self, number: int, port: int | None = None) -> Launch:
        """Prepare another attempt when the one before has closed its files; blocking, for a thread.

        The log files of the attempt before get its number into their names; the port is chosen
        anew unless it was given.

        Args:
            number: Of the attempt, from 1.
            port: For the rendezvous, where all nodes have agreed on another one.

        Raises:
            PlatformError: A log file cannot be opened, or the port is taken.
        """
        try:
            for spec in self.first.specs:
                keep_attempt(spec.log_path, number - 1)
            files = [_open_log(spec.log_path, self.options, self.on_trouble) for spec in self.first.specs]
        except OSError as error:
            raise _log_error(self.log_dir, error) from None
        return Launch(
            specs=_specs(
                self.options,
                self.cluster if port is None else replace(self.cluster, master_port=port),
                self.inherited,
                mark=self.mark,
                paths=[file.path for file in files],
                attempt=number,
                job_id=self.job_id,
            ),
            files=tuple(files),
        )

    def close(self) -> None:
        """Close the files of a job that is not begun."""
        self.first.close()
        self.events.close()


def prepare(
    options: JobOptions,
    cluster: Cluster,
    *,
    inherited: Mapping[str, str],
    on_trouble: Callable[[str], None],
) -> Preparation:
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
        PlatformError: A folder cannot be made, the port is taken, or /proc is not there.
    """
    attempt = options.driven_attempt or 0
    log_dir = options.log_dir or cluster.log_dir or options.default_log_dir
    _check(options, cluster, inherited, attempt=attempt, log_dir=log_dir)
    outer = inherited.get(JOB_MARK)
    own = os.urandom(8).hex()
    mark = f"{outer}/{own}" if outer else own
    # Nodes may write to one folder, where the files of ranks do not meet.
    place = f"-node-{cluster.node_rank}" if len(cluster.nodes) > 1 else ""
    endings = [f"{place}-events.jsonl", *_endings(options, cluster)]
    try:
        name = options.name or file_name(cluster.job_id)
        for ending in endings if attempt else ():
            keep_attempt(log_dir / f"{name}{ending}", attempt - 1)
        job_id, (events, *files) = open_log_files(
            log_dir, name, endings, lambda path: _open_log(path, options, on_trouble)
        )
    except OSError as error:
        raise _log_error(log_dir, error) from None
    _look_after_kept(options, [file.path for file in (events, *files)], on_trouble)
    if cluster.node_rank == 0 and not attempt:
        point_to(files[-len(cluster.node.devices)].path)
    try:
        specs = _specs(
            options,
            cluster,
            inherited,
            mark=mark,
            paths=[file.path for file in files],
            attempt=attempt,
            job_id=job_id,
        )
    except BaseException:
        for file in (events, *files):
            file.close()
        raise
    return Preparation(
        options=options,
        cluster=cluster,
        inherited=inherited,
        on_trouble=on_trouble,
        job_id=job_id,
        mark=mark,
        log_dir=log_dir,
        memory_kills=memory_kills(),
        events=events,
        first=Launch(specs=specs, files=tuple(files)),
    )


def _check(
    options: JobOptions, cluster: Cluster, inherited: Mapping[str, str], *, attempt: int, log_dir: Path
) -> None:
    """Refuse what could not run, and make the folders, before anything of the job is written."""
    _check_proc()
    ranks = [device.rank for device in cluster.node.devices]
    if options.debug is not None and options.debug not in ranks:
        raise PlatformError(
            f"debug names rank {options.debug}: expected one of this node's, {ranks[0]} to {ranks[-1]}"
        )
    owns = dict.fromkeys(_own(options, cluster, device, attempt) for device in cluster.node.devices)
    for one in owns:
        _make_folder(one.work_dir, "work_dir")
        _check_command(one.command, one.work_dir, {**inherited, **dict(one.env)})
        check_script(one.command, one.work_dir)
    # One look takes as long as a Python's start, and what one worker lacks the job lacks.
    first = next(iter(owns))
    check_module(first.command, first.work_dir, {**inherited, **dict(first.env)})
    _make_folder(log_dir, "log_dir")
    if cluster.node_rank == 0:
        for document in ("report", "html", "metrics"):
            _check_document(getattr(options, document), document)


def _check_proc() -> None:
    if not Path("/proc/self/stat").exists():
        raise PlatformError(
            "found no /proc file system; expected one, for the processes of a job are found there: mount it "
            "(mount -t proc proc /proc), or start the container without hiding it"
        )


def _endings(options: JobOptions, cluster: Cluster) -> list[str]:
    """Name the log files of this node's processes, in the order of their start, behind the job's name."""
    endings = [
        f"-proc-rank-{device.rank}-device-{cluster.worker_device_id(device)}.txt"
        for device in cluster.node.devices
    ]
    return ["-scheduler.txt", *endings] if _has_scheduler(options, cluster) else endings


def _has_scheduler(options: JobOptions, cluster: Cluster) -> bool:
    here = cluster.node_rank == 0 and not cluster.scheduler_elsewhere
    return options.framework == "mindspore" and cluster.rank_table is None and here


def _open_log(path: Path, options: JobOptions, on_trouble: Callable[[str], None]) -> LogFile:
    if options.log_limit is None or path.suffix != ".txt":
        return LogFile(path, on_trouble)
    return LimitedLogFile(path, on_trouble, options.log_limit)


def _look_after_kept(options: JobOptions, files: Sequence[Path], on_trouble: Callable[[str], None]) -> None:
    if options.keep_logs is not None:
        keep_newest(files, options.keep_logs)
        return
    events = files[0]
    # One look: they are counted only where there are many.
    if events.with_name(f"{events.stem}.{_MANY_RUNS + 1}{events.suffix}").exists():
        count = len(numbers_of(events))
        if count > _MANY_RUNS:
            on_trouble(
                f"log_dir {events.parent} keeps {count} earlier runs of this job: --keep-logs (keep_logs) "
                "says how many are to stay"
            )


def _log_error(log_dir: Path, error: OSError) -> PlatformError:
    return PlatformError(
        f"log_dir {log_dir}: a log file cannot be opened: {error.filename}: {explain(error)}; "
        "give a folder that can be written, with --log-dir (log_dir)"
    )


def _specs(
    options: JobOptions,
    cluster: Cluster,
    inherited: Mapping[str, str],
    *,
    mark: str,
    paths: Sequence[Path],
    attempt: int,
    job_id: str,
) -> tuple[WorkerSpec, ...]:
    """Build what is started, with a port and environments of this attempt."""
    port = _choose_port(cluster, options.master_port)
    cores = len(os.sched_getaffinity(0))
    with_scheduler = _has_scheduler(options, cluster)
    specs = []
    devices = cluster.node.devices
    binding = cluster.binding or (None,) * len(devices)
    for device, path, bound in zip(devices, paths[with_scheduler:], binding, strict=True):
        own = _own(options, cluster, device, attempt)
        if attempt:
            _make_folder(own.work_dir, "work_dir")
        environment = worker_environment(
            cluster=cluster,
            device=device,
            master_port=port,
            framework=options.framework,
            inherited=inherited,
            extra=dict(own.env),
            mark=mark,
            cores=cores if bound is None else bound.threads * len(devices),
            job_id=job_id,
            error_file=str(_error_file(path)),
            attempt=attempt,
            max_restarts=options.max_restarts,
        )
        _make_log_folders(environment)
        specs.append(
            WorkerSpec(
                rank=device.rank,
                local_rank=device.local_rank,
                device_id=cluster.worker_device_id(device),
                npu_id=device.device_id if cluster.npus else -1,
                cpus=None if bound is None else bound.cpus,
                name=f"rank {device.rank}",
                command=own.command,
                env=environment,
                work_dir=own.work_dir,
                log_path=path,
                terminal=device.rank == options.debug,
            )
        )
    if with_scheduler:
        specs.insert(0, _scheduler(specs[0], cluster, paths[0]))
    return tuple(specs)


def _own(options: JobOptions, cluster: Cluster, device: Device, attempt: int) -> _Own:
    values = {
        "rank": device.rank,
        "local_rank": device.local_rank,
        "node_rank": cluster.node_rank,
        "device": cluster.worker_device_id(device),
        "attempt": attempt,
    }
    command = options.command
    return _Own(
        tuple(fill(word, values) for word in command) if options.expand else command,
        Path(fill(str(options.work_dir), values)),
        tuple((name, fill(value, values)) for name, value in options.env.items()),
    )


def _scheduler(worker: WorkerSpec, cluster: Cluster, path: Path) -> WorkerSpec:
    """Say how MindSpore's scheduler is started: by the workers' command."""
    return WorkerSpec(
        rank=-1,
        local_rank=-1,
        device_id=-1,
        name="scheduler",
        command=worker.command,
        env=scheduler_environment(worker.env, cluster.world_size),
        work_dir=worker.work_dir,
        log_path=path,
        auxiliary=True,
    )


def _error_file(log: Path) -> Path:
    """Name the file beside a worker's log that torch's `record` writes; an earlier attempt's is removed."""
    file = log.with_name(f"{log.stem}-error.json")
    with suppress(OSError):
        file.unlink()
    return file


def _make_folder(folder: Path, name: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlatformError(
            f"{name} {folder} cannot be made: {error.strerror}: {error.filename}; "
            f"give a folder that can be written, with --{name.replace('_', '-')} ({name})"
        ) from None


def _check_document(path: Path | None, name: str) -> None:
    """Refuse a file that could not be written at the end, when it is too late to correct it.

    Raises:
        PlatformError: There can be no new file in its folder.
    """
    if path is None or (os.path.exists(path) and not os.path.isfile(path)):
        return
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise PlatformError(
            f"{name} {path} cannot be written: {error.strerror}: {path.parent}; give a file in a folder that "
            f"can be written, with --{name} ({name})"
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
    try:
        is_folder = found is not None and stat.S_ISDIR(found.stat().st_mode)
    except PermissionError as error:
        raise WorkerSpawnError(
            f"command {word!r} cannot be reached: {error.strerror}: {found}; let this user into its folders",
            errno=errno.EACCES,
        ) from None
    except OSError:
        found = None
    if found is None:
        raise WorkerSpawnError(
            f"command not found: {word!r} ({where}); "
            "check the spelling, or give its path, seen from --work-dir (work_dir)",
            errno=errno.ENOENT,
        )
    if is_folder:
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
                    "give another one with --master-port (master_port), or none for any free port"
                ) from None
    if cluster.master_port is not None:
        return cluster.master_port
    return free_port()
