"""OpenSSH reaches the nodes: `await run(["python", "train.py"], hosts="atlas[01-04]")`.

Each host has this package and an sshd; nothing of ours runs there before or after a job. The user's
own `ssh` carries the messages, with its keys, configuration, jump hosts and tickets: one connection
per host, over which an agent is started. The link's end ends the work on both sides.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from davincirunsdk.arguments import refuse_unknown
from davincirunsdk.engines.calls import Greeting
from davincirunsdk.engines.driver import NodesManager
from davincirunsdk.engines.hosts import choose, parse_hosts, read_hostfile
from davincirunsdk.engines.ssh_placement import SshPlacement
from davincirunsdk.engines.whole import called_like, to_its_end, to_its_end_blocking
from davincirunsdk.options import JobKeywords, JobOptions, spelled_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.types import Event, RunResult

logger: logging.Logger = logging.getLogger("davincirunsdk")

CARRIED = re.compile(r"PATH|LD_LIBRARY_PATH|(?:ASCEND_|HCCL_|MS_|GLOO_|TP_|PYTHON|OMP_|TORCH_|PYTORCH_).*")
"""Variables of the driver that the agents and their workers get; more are named by `env`."""


@spelled_out(JobKeywords)
def manager(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] | None = "./log",
    *,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    nnodes: int | None = None,
    ssh: str = "ssh",
    remote_python: str = "",
    collect: str = "all",
    collect_logs: bool = False,
    notify: Callable[[str], None] | None = None,
    on_event: Callable[[Event], object] | None = None,
    **keywords: Unpack[JobKeywords],
) -> NodesManager:
    """Describe a job over hosts that ssh reaches, to be used as `async with manager(...) as job`.

    Args:
        command: See `NodesManager`, as for all arguments that are not named here.
        work_dir: See there. Where it is there on this host, it has to be on all.
        log_dir: See there.
        hosts: Such as `a,b:8` or `atlas[01-16]`, or a list of such texts; a number is that of the
            workers on each.
        hostfile: File with a host on each line, as mpirun and DeepSpeed have it: `atlas01 slots=8`.
        nnodes: Number of hosts to take, from the first on; by default all.
        ssh: The program to use, with options, such as `ssh -p 2222`.
        remote_python: Python on the hosts; by default the path of this one.
        collect: See there.
        collect_logs: See there.
        notify: See there.
        on_event: See there.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        The manager, not started yet.

    Raises:
        TypeError: As for `NodesManager`.
        ValueError: As for `NodesManager`; or the hosts cannot be read, or their slots do not fit.
    """
    refuse_unknown(keywords, JobKeywords.__annotations__)
    options = JobOptions.of(command, work_dir, log_dir, nnodes=nnodes, **keywords)
    return manager_of(
        options,
        hosts=hosts,
        hostfile=hostfile,
        ssh=ssh,
        remote_python=remote_python,
        collect=collect,
        collect_logs=collect_logs,
        notify=notify,
        on_event=on_event,
    )


def manager_of(
    options: JobOptions,
    *,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    ssh: str = "ssh",
    remote_python: str = "",
    collect: str = "all",
    collect_logs: bool = False,
    notify: Callable[[str], None] | None = None,
    on_event: Callable[[Event], object] | None = None,
) -> NodesManager:
    """Do what `manager` does with options that have been checked before.

    Args:
        options: What to run.
        hosts: See `manager`, as for all others.
        hostfile: See there.
        ssh: See there.
        remote_python: See there.
        collect: See there.
        collect_logs: See there.
        notify: See there.
        on_event: See there.

    Raises:
        TypeError: An argument is of a wrong kind.
        ValueError: No hosts or two lists of them are given, they cannot be read, or do not fit.
    """
    if options.rank_table is not None:
        raise ValueError(
            "rank_table has no use with ssh: hosts and slots say where workers are; leave it out"
        )
    if (hosts is None) == (hostfile is None):
        found = "neither" if hosts is None else "both"
        raise ValueError(f"{found} of hosts and hostfile is given: expected one, such as hosts='a,b:8'")
    if hosts is not None:
        listed = parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts))
    else:
        assert hostfile is not None
        listed = read_hostfile(hostfile)
    names, per_node = choose(listed, nnodes=options.nnodes, nproc_per_node=options.nproc_per_node)
    options = replace(options, nnodes=len(names), nproc_per_node=per_node)
    try:
        program = shlex.split(ssh)
    except ValueError as error:
        raise ValueError(f"ssh is {ssh!r}: {error}; expected a command such as 'ssh -p 2222'") from None
    if not program:
        raise ValueError("ssh is empty: expected a command such as 'ssh -p 2222'")
    placement = SshPlacement(
        names,
        program=program,
        python=remote_python or sys.executable,
        greeting=Greeting(
            env={name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)},
            folders=(str(options.work_dir),) if os.path.isdir(options.work_dir) else (),
            nproc_per_node=per_node,
            lost_after=options.lost_after,
        ),
        notify=notify or (lambda text: logger.warning("%s", text)),
    )
    return NodesManager.from_options(
        placement, options, collect=collect, collect_logs=collect_logs, notify=notify, on_event=on_event
    )


@called_like(manager)
async def run(*arguments: Any, **options: Any) -> RunResult:
    """Run a command on several hosts and wait for its end on all of them.

    Cancelling stops the workers of all hosts with their grace period, then lets the cancellation
    through; `asyncio.timeout` around it works.

    Args:
        *arguments: See `manager`.
        **options: See `manager`.

    Returns:
        The result: workers of all hosts in rank order, paths as they are on the hosts.

    Raises:
        DistributedRuntimeError: A worker failed by itself, or a host was lost.
        PlatformError: Hosts cannot be used; the text has a line for each.
        RankTableError: The hosts' NPUs make no rank table.
        WorkerSpawnError: The command cannot be started on one of the hosts.
    """
    return await to_its_end(manager(*arguments, **options))


@called_like(manager)
def run_blocking(*arguments: Any, **options: Any) -> RunResult:
    """Do what `run` does in code that is not asynchronous, in a notebook's cell too.

    Ctrl-C stops the workers of all hosts with their grace period, a second one at once, and
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
