"""The command `davincirun`: arguments, signals, exit code."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from davincirunsdk import __version__
from davincirunsdk.errors import (
    DistributedRuntimeError,
    PlatformError,
    RankTableError,
    WorkerSpawnError,
)
from davincirunsdk.manager import FMKManager
from davincirunsdk.manifests.command import manifest_kind, manifest_options, print_manifest
from davincirunsdk.options import JobOptions, NodeKeywords, absolute, parse_prefix, parse_ranks
from davincirunsdk.types import JobState, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized

    from davincirunsdk.engines.driver import NodesManager
    from davincirunsdk.types import RunResult

_USAGE, _PLATFORM = 2, 3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_CHILD_SUBREAPER = 36
_POST_STOP = Path("/usr/local/Ascend/driver/tools/docker_stop_post_sys.sh")
"""ModelArts' own script, to be run after a job."""


class _Words:
    """The launcher's own words, on standard error, from a thread: a stuck terminal must not stop us."""

    def __init__(self, stream: int = 2) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="davincirun-words", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self._queue.put(f"davincirun: {line}\n")

    def show(self, text: str) -> None:
        """Say something that stands for itself, such as the failure report."""
        self._queue.put(text.rstrip("\n") + "\n")

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _write(self) -> None:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        while (text := self._queue.get()) is not None:
            data = text.encode(encoding, "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._stream, data) :]
            except OSError:
                # Nobody reads any more.
                continue


class _LogHandler(logging.Handler):
    def __init__(self, words: _Words) -> None:
        super().__init__()
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        self._words.say(f"{record.levelname.lower()}: {record.getMessage()}")


def _ranks(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        parse_ranks(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _prefix(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        parse_prefix(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if found is None or int(found[1]) == 0:
        raise click.BadParameter(f"{value!r} is no size: expected bytes, such as 1000000 or 500M")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
        "max_content_width": 100,
    },
    epilog="Exit code: 0 all succeeded; otherwise that of the worker that failed first, 128+n for signal n; "
    "130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; 126, 127 command not executable, not found; "
    "2 usage; 3 rank table, platform or folder.",
)
@click.version_option(__version__, prog_name="davincirun")
@click.option("--rank-table", type=click.Path(), metavar="FILE", help="HCCL rank table, any version.")
@click.option(
    "--rank-table-timeout",
    type=click.FloatRange(0),
    metavar="S",
    help="Seconds to wait for a complete rank table.  [default: 1800]",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    metavar="N",
    help="Workers on this node.  [default: one per device]",
)
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    metavar="N",
    help="Nodes of the job.  [default: from the platform, or 1]",
)
@click.option(
    "--node-rank",
    type=click.IntRange(0),
    metavar="R",
    help="Place of this node.  [default: from the platform, or 0]",
)
@click.option(
    "--master-addr",
    metavar="A",
    help="Host or address of node 0.  [default: from the platform, or 127.0.0.1]",
)
@click.option(
    "--ignore-platform",
    is_flag=True,
    help="Let what is given here count where the platform or the rank table says otherwise.",
)
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    metavar="P",
    help="Port for the rendezvous.  [default: from the platform, or a free one]",
)
@click.option("-m", "--module", is_flag=True, help="COMMAND is a Python module.")
@click.option(
    "--work-dir",
    default=".",
    type=click.Path(),
    metavar="DIR",
    help="Folder the workers run in.  [default: .]",
)
@click.option(
    "--log-dir",
    type=click.Path(),
    metavar="DIR",
    help="Folder of the log files.  [default: the platform's, or ./log]",
)
@click.option(
    "--echo",
    default="all",
    callback=_ranks,
    metavar="RANKS",
    help="Ranks shown here: all, none, 0, or 0,2-3.  [default: all]",
)
@click.option(
    "--prefix",
    default="rank",
    callback=_prefix,
    metavar="PARTS",
    help="What stands before each line: rank, time, host, in your order.  [default: rank]",
)
@click.option(
    "--color",
    default="auto",
    type=click.Choice(["auto", "always", "never"]),
    help="Colour per rank; auto: on a terminal, unless NO_COLOR is set.  [default: auto]",
)
@click.option("--live", is_flag=True, help="Show a table of the workers on a terminal, below it the lines.")
@click.option(
    "--log-limit",
    callback=_bytes,
    metavar="BYTES",
    help="Keep head and tail of a longer log file; such as 500M.  [default: no limit]",
)
@click.option(
    "--progress-pattern",
    metavar="REGEX",
    help="Lines that tell a worker's step, beside the known ones; groups step, total, loss, epoch, seconds.",
)
@click.option(
    "--grace-period",
    default=15.0,
    type=click.FloatRange(0),
    metavar="S",
    help="Seconds from SIGTERM to SIGKILL.  [default: 15]",
)
@click.option(
    "--framework",
    default="auto",
    type=click.Choice(["auto", "mindspore", "torch", "none"]),
    help="Which variables a worker gets; only mindspore starts MindSpore's scheduler.  [default: auto]",
)
@click.option(
    "--engine",
    type=click.Choice(["ray", "ssh"]),
    help="Start the workers of all nodes from here: ray, on --nnodes of the Ray cluster of RAY_ADDRESS or of "
    "this machine; ssh, on --hosts or --hostfile.",
)
@click.option("--hosts", metavar="HOSTS", help="With --engine ssh: hosts, such as a,b:8 or atlas[01-16].")
@click.option(
    "--hostfile",
    type=click.Path(),
    metavar="FILE",
    help="With --engine ssh: file with a host on each line, such as `atlas01 slots=8`.",
)
@click.option(
    "--ssh",
    metavar="COMMAND",
    help="With --engine ssh: the client and its options, such as 'ssh -p 2222'.  [default: ssh]",
)
@click.option(
    "--remote-python",
    metavar="PATH",
    help="With --engine ssh: Python on the hosts.  [default: the path of the current one]",
)
@click.option(
    "--lost-after",
    type=click.FloatRange(1),
    metavar="S",
    help="Seconds of silence after which another node counts as lost.  [default: 30]",
)
@click.option(
    "--resource",
    default="NPU",
    type=click.Choice(["NPU", "CPU"]),
    help="With --engine or --manifest: what a worker occupies on its node.  [default: NPU]",
)
@manifest_options
@click.option("--quiet", is_flag=True, help="Say nothing but errors and the failure report.")
@click.option("--verbose", is_flag=True, help="Say more: pids, log files, every end.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
@click.pass_context
def _command(
    context: click.Context,
    rank_table: str | None,
    rank_table_timeout: float | None,
    nproc_per_node: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    ignore_platform: bool,
    master_port: int | None,
    module: bool,
    work_dir: str,
    log_dir: str | None,
    echo: str,
    prefix: str,
    color: str,
    live: bool,
    log_limit: int | None,
    progress_pattern: str | None,
    grace_period: float,
    framework: str,
    engine: str | None,
    hosts: str | None,
    hostfile: str | None,
    ssh: str | None,
    remote_python: str | None,
    lost_after: float | None,
    resource: str,
    quiet: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> int:
    """Start COMMAND once per NPU of this machine, supervise the workers and end them together.

    `train.py` is run with the current Python, any other command as it is. Options end at the first
    word of the command. Each worker's output goes to a log file of its own and, line by line, to
    standard output.
    """
    for name in _OF_SSH:
        if engine != "ssh" and _given(context, name):
            raise click.UsageError(f"--{name.replace('_', '-')} has no use without --engine ssh")
    kind = manifest_kind(context)
    if kind is not None:
        print_manifest(
            context,
            kind,
            command,
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            resource=resource,
            grace_period=grace_period,
        )
        return 0
    words = _Words()
    logger = logging.getLogger("davincirunsdk")
    logger.addHandler(_LogHandler(words))
    logger.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    try:
        if engine is not None:
            _refuse_with_engine(context, engine)
        notify = None if quiet else words.say
        asked = {
            name: value for name, value in context.params.items() if name in NodeKeywords.__annotations__
        }
        complete = _complete(command, module, absolute("work_dir", work_dir))
        job: FMKManager | NodesManager
        if engine is not None:
            options = replace(
                JobOptions.of(complete, work_dir, log_dir or "./log", **asked), command_line=True
            )
            job = _over_nodes(engine, options, context, notify)
        else:
            options = replace(JobOptions.of(complete, work_dir, log_dir, **asked), command_line=True)
            job = FMKManager.from_options(options, notify=notify)
        return asyncio.run(_Run(job, words, quiet=quiet, verbose=verbose, grace_period=grace_period).run())
    except (RankTableError, PlatformError) as error:
        words.say(f"error: {error}")
        return _PLATFORM
    except WorkerSpawnError as error:
        words.say(f"error: {error}")
        return error.exit_code
    except (ValueError, TypeError) as error:
        words.say(f"error: {error}")
        return _USAGE
    finally:
        words.close(2.0)


_ONE_NODE = ("rank_table", "rank_table_timeout", "node_rank", "master_addr")
_OF_SSH = ("hosts", "hostfile", "ssh", "remote_python")


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _refuse_with_engine(context: click.Context, engine: str) -> None:
    """Refuse what an engine settles itself.

    Raises:
        ValueError: Such an option was given, or what says where to run was not.
    """
    for name in _ONE_NODE:
        if _given(context, name):
            raise ValueError(
                f"--{name.replace('_', '-')} has no use with --engine, which asks the nodes: leave it out "
                "or start davincirun on each node without --engine"
            )
    if engine == "ray" and not _given(context, "nnodes"):
        raise ValueError("--engine ray needs --nnodes: how many nodes the job is to have")
    if engine == "ssh" and _given(context, "hosts") == _given(context, "hostfile"):
        found = "both --hosts and --hostfile" if _given(context, "hosts") else "neither of them"
        raise ValueError(f"--engine ssh needs --hosts or --hostfile: found {found}")


def _over_nodes(
    engine: str, options: JobOptions, context: click.Context, notify: Callable[[str], None] | None
) -> NodesManager:
    """Describe a job whose nodes are all started from here."""
    if engine == "ray":
        from davincirunsdk.engines import ray

        # At SIGTERM, which we expect, Ray would print a stack as at a crash.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        resource = context.params["resource"]
        return ray.manager_of(options, resource=resource, collect="none", notify=notify)
    from davincirunsdk.engines import ssh

    given = {name: context.params[name] for name in _OF_SSH if _given(context, name)}
    return ssh.manager_of(options, collect="none", notify=notify, **given)


def _complete(command: tuple[str, ...], module: bool, work_dir: Path) -> tuple[str, ...]:
    """Put the current Python in front of a module or a Python script."""
    if module:
        return (sys.executable, "-m", *command)
    if not command[0].endswith(".py"):
        return command
    script = work_dir / command[0]
    if not script.exists():
        raise WorkerSpawnError(
            f"can't open file {command[0]!r}: No such file or directory (looked for {script}); "
            "scripts are seen from --work-dir",
            errno=errno.ENOENT,
        )
    return (sys.executable, *command)


class _Run:
    """One run of the command: the job, the signals that come meanwhile, the exit code."""

    def __init__(
        self,
        manager: FMKManager | NodesManager,
        words: _Words,
        *,
        quiet: bool,
        verbose: bool,
        grace_period: float,
    ) -> None:
        self._manager = manager
        self._words = words
        self._quiet = quiet
        self._verbose = verbose
        self._grace_period = grace_period
        self._signals: list[signal.Signals] = []
        self._task: asyncio.Task[int] | None = None

    async def run(self) -> int:
        self._task = asyncio.current_task()
        with self._signal_handlers():
            try:
                async with self._manager as manager:
                    self._say_started()
                    result = await manager.wait()
            except DistributedRuntimeError as error:
                return self._failed(error)
            except asyncio.CancelledError:
                if not self._signals:
                    raise
                return self._stopped()
            finally:
                _run_post_stop_script()
        self._say_ended(result)
        return result.exit_code

    def _failed(self, error: DistributedRuntimeError) -> int:
        if all(failure.exit_code in self._ends_by_signal() for failure in error.failures):
            # Slurm and systemd signal every process of a job: workers may have ended by it before us.
            return self._say_stopped()
        self._words.show(str(error))
        return error.exit_code

    def _ends_by_signal(self) -> tuple[int, ...]:
        """Exit codes of a worker that ended by the signal that came to us."""
        return (-self._signals[0], 128 + self._signals[0]) if self._signals else ()

    def _stopped(self) -> int:
        error = self._manager.error
        if isinstance(error, DistributedRuntimeError):
            # The signal came while a failure was being dealt with: that stays the cause.
            return self._failed(error)
        return self._say_stopped()

    def _say_stopped(self) -> int:
        states = [worker.state for worker in self._manager.workers]
        if all(state is WorkerState.PENDING for state in states):
            self._say(f"stopped by {self._signals[0].name} before a worker was started")
            return 128 + self._signals[0]
        killed = states.count(WorkerState.KILLED)
        ended = f"{len(states) - killed} workers ended in time, {killed} killed"
        self._say(f"stopped by {self._signals[0].name}: {ended}")
        return 128 + self._signals[0]

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._words.say(text)

    def _say_started(self) -> None:
        workers = self._manager.workers
        ranks = (
            f"rank {workers[0].rank}" if len(workers) == 1 else f"ranks {workers[0].rank}-{workers[-1].rank}"
        )
        pattern = workers[0].log_path
        if len(workers) > 1:
            pattern = pattern.with_name(f"{self._manager.job_id}-proc-rank-*.txt")
        self._say(f"{_count(workers)}, {ranks}; logs: {pattern}")
        if self._verbose:
            for worker in (*workers, *self._manager.auxiliaries):
                self._say(
                    f"{worker.name}: pid {worker.pid}, device {worker.device_id}, log {worker.log_path}"
                )

    def _say_ended(self, result: RunResult) -> None:
        if result.state is JobState.SUCCEEDED:
            self._say(f"{_count(result.workers)} succeeded in {result.ended - result.started:.1f} s")
        if result.lost_log_bytes:
            self._words.say(
                f"warning: {result.lost_log_bytes} bytes of output could not be written to log files"
            )

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            # An ignored hang-up stays ignored: somebody used nohup.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._on_stop_signal, number)
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._manager.signal_workers, number)
        if isinstance(self._manager, FMKManager):
            self._manager.inherits_orphans = _become_sub_reaper()
            if self._manager.inherits_orphans or os.getpid() == 1:
                loop.add_signal_handler(signal.SIGCHLD, self._manager.reap_orphans)
        yield

    def _on_stop_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            grace = f", workers have {self._grace_period:g} s; once more kills at once"
            self._say(f"{number.name}: stopping{grace if self._manager.workers else ''}")
            assert self._task is not None
            self._task.cancel()
        else:
            self._say(f"{number.name}: killing at once")
            self._manager.stop(now=True)


def _count(workers: Sized) -> str:
    return "1 worker" if len(workers) == 1 else f"{len(workers)} workers"


def _run_post_stop_script() -> None:
    if _POST_STOP.exists() and ("MA_JOB_DIR" in os.environ or "BATCH_JOB_ID" in os.environ):
        subprocess.run(["/bin/sh", str(_POST_STOP)], stdin=subprocess.DEVNULL, timeout=60, check=False)


def _become_sub_reaper() -> bool:
    """Inherit what workers orphan, so that it is found whatever it did to its environment and session.

    Not as pid 1, which inherits more than the job's, nor beside children of a program that became us.

    Returns:
        True if every later child of this process belongs to its job.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        import ctypes

        return os.getpid() != 1 and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return False


def _occupy_standard_streams() -> None:
    """Open what the caller has closed: a socket of ours would get the number, and our words be sent to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def main() -> None:
    """Be the command; never returns."""
    _occupy_standard_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        code = _command.main(prog_name="davincirun", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    # Threads that hang in a write to a stuck terminal or disk must not hold the exit.
    os._exit(code or 0)
