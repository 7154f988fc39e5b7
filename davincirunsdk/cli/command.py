"""From the words of the command line to a job that runs, and from any error to an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from davincirunsdk.arguments import absolute, node_range
from davincirunsdk.cli.check import node_is_well
from davincirunsdk.cli.detached import detach
from davincirunsdk.cli.groups import GroupedCommand
from davincirunsdk.cli.options import job_options
from davincirunsdk.cli.peers import PeerOptionError, translate
from davincirunsdk.cli.run import Run
from davincirunsdk.cli.script import check_syntax
from davincirunsdk.cli.spelling import option, with_options
from davincirunsdk.cli.words import LogHandler, Words
from davincirunsdk.errors import PlatformError, RankTableError, WorkerSpawnError
from davincirunsdk.leftovers.sub_reaper import become_sub_reaper
from davincirunsdk.manager import FMKManager
from davincirunsdk.manifests.command import manifest_kind, print_manifest
from davincirunsdk.options import JobOptions, NodeKeywords
from davincirunsdk.supervision import terminal
from davincirunsdk.supervision.placeholders import differs
from davincirunsdk.supervision.script_file import check_script
from davincirunsdk.supervision.verdict import INTERNAL_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.protocol import Job

_USAGE, _PLATFORM = 2, 3
_LAST_WORDS = 2.0
"""Seconds without progress after which a stuck terminal is given up."""

_DESCRIPTORS = 1 << 16
"""Files that we want to be able to open; programs that go through all they might have open bear so many."""

_OF_RAY = ("resource", "placement_timeout")
_OF_SSH = ("hosts", "hostfile", "ssh", "remote_python")
_OF_ENGINES = ("collect_logs",)
_OF_TABLE = ("rank_table", "rank_table_timeout")
_ONE_NODE = (
    "node_rank",
    "master_addr",
    "devices",
    "wait_devices",
    "debug",
)

_EXAMPLES = """\b
Examples:
  davincirun --nproc-per-node 8 train.py --epochs 3
  davincirun --nnodes 2 --node-rank 0 --master-addr node0 train.py
  srun --kill-on-bad-exit=1 davincirun train.py
"""

_EXIT_CODES = """Exit code: 0 if all workers succeeded, otherwise that of the worker that failed first, or
128+n if signal n ended it. 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 131 after SIGQUIT; 124
after a stall or at the time limit; 126 if the command is not executable, 127 if it is not found; 2 for wrong
usage; 3 for a fault of rank table, platform or folder; 70 for an error of davincirun itself."""


@click.command(
    cls=GroupedCommand,
    context_settings={
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "DAVINCIRUN",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog=f"{_EXAMPLES}\n\n{_EXIT_CODES}",
)
@job_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
@click.pass_context
def _command(
    context: click.Context,
    /,
    *,
    command: tuple[str, ...],
    module: bool,
    work_dir: str,
    log_dir: str | None,
    engine: str | None,
    quiet: bool,
    verbose: bool,
    **others: Any,
) -> int:
    """Start COMMAND once per NPU of this machine, supervise these workers, and end them together.

    A script such as `train.py` is run with the current Python, any other command as it is. Options
    end at the first word of COMMAND. Each worker's output goes to a log file of its own and, line by line, to
    standard output.
    """
    asked = {name: value for name, value in others.items() if name in NodeKeywords.__annotations__}
    kind = manifest_kind(context)
    if kind is not None:
        names = ("nnodes", "nproc_per_node", "grace_period", "name", "env")
        of_manifest = {name: asked[name] for name in names}
        print_manifest(context, kind, command, resource=others["resource"], **of_manifest)
        return 0
    started = None
    if others["detach"]:
        asked |= {"echo": "none", "live": False}
        started = detach()
    words = Words()
    _log_to(words, logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    if not quiet:
        for note in context.obj or ():
            words.say(note)
    job: Job | None = None
    try:
        try:
            made = _made(context, asked, words, started)
        except (RankTableError, PlatformError):
            raise
        except (ValueError, TypeError) as error:
            words.say(f"error: {with_options(str(error))}")
            return _USAGE
        if made is None:
            return _PLATFORM
        run, job, reap = made
        if verbose:
            _say_sources(context, words)
        _raise_descriptor_limit()
        return asyncio.run(run.run(job, reap))
    except (RankTableError, PlatformError) as error:
        words.say(f"error: {with_options(str(error))}")
        return _PLATFORM
    except WorkerSpawnError as error:
        words.say(f"error: {with_options(str(error))}")
        return error.exit_code
    except Exception as error:
        if job is None or job.error is not error:
            words.show(traceback.format_exc())
        words.say("an error of davincirun itself: please report it with the lines above")
        return INTERNAL_ERROR
    finally:
        if others["debug"] is not None:
            terminal.restore()
        words.close(_LAST_WORDS)


def _log_to(words: Words, level: int) -> None:
    logger = logging.getLogger("davincirunsdk")
    logger.addHandler(LogHandler(words))
    logger.setLevel(level)


def _made(
    context: click.Context, asked: dict[str, Any], words: Words, started: Callable[[Job], None] | None
) -> tuple[Run, Job, Callable[[], object] | None] | None:
    """Make of the command line what runs, the job, and what reaps its orphans.

    Args:
        context: Click's, with all options.
        asked: Those of the job itself, as they were given.
        words: Takes what is said.
        started: Told when all workers run, for a command that leaves the terminal then.

    Returns:
        None where `--check` found a fault of this node.

    Raises:
        ValueError: Options are wrong, or do not fit together.
        TypeError: So is the kind of one.
        RankTableError: As the job's start.
        PlatformError: As the job's start.
    """
    given = context.params
    engine, command, work_dir = given["engine"], given["command"], given["work_dir"]
    _refuse_without_effect(context, engine)
    same = not differs(work_dir) and not (given["expand"] and any(map(differs, command)))
    complete = _complete(command, given["module"], work_dir, look=same)
    if engine is None and same:
        check_syntax(complete, absolute("work_dir", work_dir))
    least = None
    if isinstance(asked["nnodes"], str):
        least, asked["nnodes"] = node_range("nnodes", asked["nnodes"])
    options = replace(JobOptions.of(complete, work_dir, given["log_dir"], **asked), command_line=True)
    quiet = given["quiet"]
    if given["check"] and not node_is_well(options, words, quiet=quiet):
        return None
    run = Run(
        words, quiet=quiet, verbose=given["verbose"], grace_period=options.grace_period, started=started
    )
    if options.debug is not None:
        words.say(f"rank {options.debug} has the terminal, Ctrl-C too; `davincirunctl stop` stops the job")
    notify = None if quiet else lambda text: words.say(with_options(text))
    return run, *_job(options, engine, least, context, notify, run)


def _raise_descriptor_limit() -> None:
    """Take as many descriptors as we may: each worker needs some, and many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _job(
    options: JobOptions,
    engine: str | None,
    least_nodes: int | None,
    context: click.Context,
    notify: Callable[[str], None] | None,
    run: Run,
) -> tuple[Job, Callable[[], object] | None]:
    """Make the job, and what reaps its orphans where this process inherits them."""
    if engine is None:
        here = FMKManager.from_options(options, notify=notify, on_event=run.on_event)
        here._inherits_orphans = become_sub_reaper()
        return here, here._reap_orphans if here._inherits_orphans or os.getpid() == 1 else None
    of_all: dict[str, Any] = {name: context.params[name] for name in _OF_ENGINES}
    of_all |= {"collect": "none", "notify": notify, "on_event": run.on_event}
    if engine == "ray":
        from davincirunsdk.engines import ray

        # At SIGTERM, which we expect, Ray would print a stack as at a crash.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        of_ray = {name: context.params[name] for name in _OF_RAY if context.params[name] is not None}
        return ray.manager_of(options, least_nodes=least_nodes, **of_ray, **of_all), None
    from davincirunsdk.engines import ssh

    of_ssh = {name: context.params[name] for name in _OF_SSH if context.params[name] is not None}
    return ssh.manager_of(options, **of_ssh, **of_all), None


def _complete(command: tuple[str, ...], module: bool, work_dir: str, *, look: bool) -> tuple[str, ...]:
    """Put the current Python in front of a module or a Python script; `look` whether that is there."""
    folder = absolute("work_dir", work_dir)
    if look and os.path.exists(folder) and not os.path.isdir(folder):
        raise PlatformError(f"work_dir {folder} is not a folder; expected one for the workers: --work-dir")
    if module:
        return (_python(), "-m", *command)
    if not command[0].endswith(".py"):
        return command
    complete = (_python(), *command)
    if look:
        check_script(complete, folder)
    return complete


def _python() -> str:
    if not sys.executable:
        raise PlatformError(
            "the path of the current Python is not known (sys.executable is empty): write the command with "
            "its interpreter, such as `davincirun python train.py`"
        )
    return sys.executable


def _refuse_without_effect(context: click.Context, engine: str | None) -> None:
    """Refuse what would change nothing, or what an engine settles itself.

    Raises:
        ValueError: Such an option was given, or what says where to run was not.
    """
    for names, needed in ((_OF_SSH, "ssh"), (_OF_RAY, "ray")):
        for name in names:
            if engine != needed and _given(context, name):
                also = " or --manifest" if name == "resource" else ""
                raise ValueError(f"{option(name)} has no use without --engine {needed}{also}")
    if engine is None:
        for name in _OF_ENGINES:
            if _given(context, name):
                raise ValueError(f"{option(name)} has no use without --engine: all logs are here")
        return
    for name in _ONE_NODE if engine == "ray" else (*_OF_TABLE, *_ONE_NODE):
        if _given(context, name):
            raise ValueError(
                f"{option(name)} has no use with --engine, which asks the nodes: leave it out "
                "or start davincirun on each node without --engine"
            )
    if engine == "ray" and context.params["nnodes"] is None and context.params["rank_table"] is None:
        raise ValueError("--engine ray needs --nnodes: how many nodes the job is to have; or --rank-table")
    if engine == "ssh" and (context.params["hosts"] is None) == (context.params["hostfile"] is None):
        found = "neither of them" if context.params["hosts"] is None else "both"
        raise ValueError(f"--engine ssh needs --hosts or --hostfile: found {found}")


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _say_sources(context: click.Context, words: Words) -> None:
    """Say which options come from where, but for the command line; no values, which may be secret."""
    names = {ParameterSource.ENVIRONMENT: "the environment", ParameterSource.DEFAULT_MAP: "--config"}
    for source, name in names.items():
        if found := [one for one in context.params if context.get_parameter_source(one) is source]:
            listed = ", ".join(map(option, found))
            words.say(f"from {name}: {listed}")


def _own_options() -> dict[str, bool]:
    """All options of this command, and whether each takes a value."""
    return {
        name: not parameter.is_flag
        for parameter in _command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }


def read_options(words: list[str]) -> tuple[tuple[str, ...], str, str | None, NodeKeywords]:
    """Read options as the command does, where the script is known: in a notebook's cell.

    Args:
        words: Options, and the script's own arguments behind them.

    Returns:
        The arguments, `work_dir`, `log_dir`, and the keywords of the calls that start a job; of `echo`
        only what was given.

    Raises:
        ValueError: An option is wrong, or has no use there.
        PeerOptionError: One of another launcher has no counterpart.
    """
    script = "cell.py"
    translation = translate([*words, script], _own_options(), os.environ)
    try:
        context = _command.make_context("davincirun", list(translation.words), obj=translation.notes)
    except click.ClickException as error:
        raise ValueError(error.format_message()) from None
    except click.exceptions.Exit:
        raise ValueError("this option has no use in a cell; run davincirun in a terminal") from None
    for name in ("module", "engine", "detach", "live", "debug"):
        if _given(context, name):
            raise ValueError(f"{option(name)} has no use in a cell")
    asked = {name: value for name, value in context.params.items() if name in NodeKeywords.__annotations__}
    if not _given(context, "echo"):
        del asked["echo"]
    params = context.params
    return params["command"][:-1], params["work_dir"], params["log_dir"], cast("NodeKeywords", asked)


def run_command() -> int:
    """Read the command line and do what it says.

    Returns:
        The exit code.
    """
    try:
        translation = translate(sys.argv[1:], _own_options(), os.environ)
        code: int | None = _command.main(
            list(translation.words), prog_name="davincirun", standalone_mode=False, obj=translation.notes
        )
    except PeerOptionError as error:
        click.echo(f"davincirun: error: {error}", err=True)
        return _USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Abort:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 1
    return code or 0
