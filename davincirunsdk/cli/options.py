"""The options of `davincirun`: a line or two each, in the groups that its help shows.

What an option means for the job is checked in `davincirunsdk.options`, under the same name with
underscores; here stands how it is written, and its help.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from davincirunsdk import __version__
from davincirunsdk.cli.config import read_config
from davincirunsdk.manifests.command import manifest_options

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_LOGS = 3

F = TypeVar("F", bound="Callable[..., Any]")

WORKERS = "Workers"
NODES = "Several nodes"
OUTPUT = "Output"
FAILURE = "When something fails"
CLUSTERS = "Clusters"
OTHER = "Other"
GROUPS = (WORKERS, NODES, OUTPUT, FAILURE, CLUSTERS, OTHER)

COMMON = frozenset(
    (
        "--nproc-per-node --module --work-dir --env --framework --devices --name "
        "--rank-table --nnodes --node-rank --master-addr --master-port "
        "--log-dir --echo --live --detach --html --quiet --verbose "
        "--explain --check --report --grace-period --debug "
        "--max-restarts --stall-timeout --on-stall --timeout "
        "--engine --hosts --manifest --config --version --help --help-all"
    ).split()
)
"""Options that `--help` explains; the rest it names, and `--help-all` explains them too."""

_ALL = "davincirunsdk.help_all"
"""Where click's context keeps that all options are to be explained."""


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # Not generic before click 8.4.
    _ParamType = click.ParamType


class _Number(_ParamType):
    """A number, in plain words; its range is checked with the job's other options."""

    def __init__(self, kind: type[int] | type[float], expected: str) -> None:
        self.name = expected
        self._kind = kind
        self._expected = expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if isinstance(value, bool):
                raise ValueError
            return self._kind(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not {self._expected}", param, ctx)


class _Nodes(_Number):
    """A number of nodes; torchrun's range of them is for an engine that can have fewer, as `2:4`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least, colon, most = str(value).partition(":")
        if colon and least.isdigit() and most.isdigit():
            if ctx is not None and ctx.params.get("engine") == "ray":
                return str(value)
            self.fail(
                f"{value!r} is a range, but a job's nodes change in number with --engine ray only: write "
                f"--nnodes {most}",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class _Size(_ParamType):
    """Bytes, such as 500M."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if found is None or int(found[1]) == 0:
            self.fail(f"{value!r} is not a size: expected bytes, such as 1000000 or 500M", param, ctx)
        return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


WHOLE = _Number(int, "a whole number")
SECONDS = _Number(float, "a number of seconds")
SIZE = _Size()


def _variables(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str] | None:
    """Read `NAME=VALUE`, or `NAME` for the value that it has here."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise click.BadParameter(f"{name} is not set here: set it, or write {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found or None


class GroupedOption(click.Option):
    """An option that knows its place in the help."""

    def __init__(self, *names: Any, group: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group: the common ones, the names of the others, or all."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        named: dict[str, list[str]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is None:
                continue
            default = OTHER if {"--help", "--version"} & {*parameter.opts} else CLUSTERS
            group = getattr(parameter, "group", default)
            if ctx.meta.get(_ALL) or not COMMON.isdisjoint(parameter.opts):
                rows[group].append(record)
            else:
                named[group].append(parameter.opts[-1])
        for group, records in rows.items():
            with formatter.section(group):
                formatter.write_dl(records)
                if named[group]:
                    formatter.write(_names_of_others(named[group], formatter))


def _names_of_others(names: list[str], formatter: click.HelpFormatter) -> str:
    indent = " " * formatter.current_indent
    # Click's own breaks names at their hyphens.
    lines = textwrap.wrap(
        f"See --help-all: {', '.join(names)}",
        formatter.width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )
    return "\n".join([*lines, ""])


def _option(group: str, *names: str, **settings: Any) -> Callable[[F], F]:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def _explain(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Print the report about a job that is over, and leave."""
    if value is None or context.resilient_parsing:
        return
    from davincirunsdk.diagnosis.colour import coloured
    from davincirunsdk.diagnosis.explain import explain_folder

    try:
        report = explain_folder(Path(value), lang=context.params.get("lang"))
    except OSError as error:
        click.echo(f"davincirun: error: {error}", err=True)
        context.exit(_NO_LOGS)
    click.echo(coloured(report.text) if sys.stdout.isatty() and "NO_COLOR" not in os.environ else report.text)
    context.exit(0)


def _help_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the help with all options, and leave."""
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


_OPTIONS: list[Callable[[Any], Any]] = [
    _option(
        WORKERS,
        "--nproc-per-node",
        type=WHOLE,
        metavar="N",
        help="Workers on each node.  [default: one per device]",
    ),
    _option(WORKERS, "-m", "--module", is_flag=True, help="COMMAND is a Python module."),
    _option(
        WORKERS,
        "--work-dir",
        default=".",
        type=click.Path(),
        metavar="DIR",
        help="Folder that the workers run in; relative paths in COMMAND start there. {rank}, {local_rank}, "
        "{node_rank}, {device} and {attempt} are filled in, here and in values of --env.  [default: .]",
    ),
    _option(
        WORKERS,
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        callback=_variables,
        help="Variable for the workers; without =VALUE, its value here. May be given more than once.",
    ),
    _option(WORKERS, "--expand", is_flag=True, help="Fill in {rank} and its like in COMMAND, too."),
    _option(
        WORKERS,
        "--framework",
        default="auto",
        type=click.Choice(["auto", "mindspore", "torch", "none"]),
        help="Which variables a worker gets; only mindspore starts MindSpore's scheduler.  [default: auto]",
    ),
    _option(
        WORKERS,
        "--devices",
        metavar="LIST",
        help="NPUs to use on this node: physical numbers, such as 4-7 or 0,2.  [default: all visible]",
    ),
    _option(
        WORKERS,
        "--wait-devices",
        type=SECONDS,
        metavar="SECONDS",
        help="How long to wait for NPUs that a job or a program on this host holds.  [default: do not wait]",
    ),
    _option(
        WORKERS,
        "--visible",
        default="all",
        type=click.Choice(["all", "one"]),
        help="NPUs that a worker sees: those of all workers of its node, or only its own one, as number 0.  "
        "[default: all]",
    ),
    _option(
        WORKERS,
        "--bind",
        metavar="HOW",
        help="CPUs of a worker: none, any; auto or node, those near its NPU; exclusive, a share of those for "
        "itself; or a list such as 0-31, shared out among the workers.  [default: none]",
    ),
    _option(
        WORKERS,
        "--name",
        metavar="NAME",
        help="Name of the job and of its log files.  [default: the platform's job id, or the host name]",
    ),
    _option(
        NODES,
        "--rank-table",
        type=click.Path(),
        metavar="FILE",
        help="HCCL rank table of any version; with --engine ray it says which nodes to take.  [default: the "
        "platform's]",
    ),
    _option(
        NODES,
        "--rank-table-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="How long to wait for a complete rank table.  [default: 1800]",
    ),
    _option(
        NODES,
        "--nnodes",
        type=_Nodes(int, "a whole number"),
        metavar="N",
        help="Number of nodes; with --engine ray also MIN:MAX, as many of them as are free.  [default: from "
        "the platform, or 1]",
    ),
    _option(
        NODES,
        "--node-rank",
        type=WHOLE,
        metavar="N",
        help="Rank of this node, counted from 0.  [default: from the platform, or 0]",
    ),
    _option(
        NODES,
        "--master-addr",
        metavar="HOST",
        help="Name or address of node 0.  [default: from the platform, or 127.0.0.1]",
    ),
    _option(
        NODES,
        "--master-port",
        type=WHOLE,
        metavar="PORT",
        help="Port for the rendezvous.  [default: from the platform, or a free one]",
    ),
    _option(
        NODES,
        "--iface",
        default="auto",
        metavar="NAME",
        help="Network interface to the other nodes; auto finds it, none sets nothing.  [default: auto]",
    ),
    _option(
        NODES,
        "--ignore-platform",
        is_flag=True,
        help="Go by these options where the platform or the rank table says otherwise.",
    ),
    _option(
        NODES,
        "--lost-after",
        type=SECONDS,
        metavar="SECONDS",
        help="Silence after which another node counts as lost.  [default: 30]",
    ),
    _option(
        NODES,
        "--meet",
        type=click.Choice(["auto", "off", "require"]),
        help="Whether launchers started on several nodes meet at node 0, so that all end together.  "
        "[default: auto]",
    ),
    _option(
        NODES,
        "--meet-port",
        type=WHOLE,
        metavar="PORT",
        help="Port on node 0 for the meeting.  [default: the one after the rendezvous port]",
    ),
    _option(
        NODES,
        "--meet-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="How long to wait for all nodes to come to the meeting.  [default: 600]",
    ),
    _option(
        NODES,
        "--meet-key-file",
        type=click.Path(),
        metavar="FILE",
        help="File with a secret that all nodes share, to keep others out.  "
        "[default: the value of DAVINCIRUN_MEET_KEY]",
    ),
    _option(
        NODES,
        "--leave-after",
        type=SECONDS,
        metavar="SECONDS",
        help="How long a healthy node stays after a failure on another one.  "
        "[default: 30 where MindCluster recovers jobs, else 0]",
    ),
    _option(
        OUTPUT,
        "--log-dir",
        type=click.Path(),
        metavar="DIR",
        help="Folder of the log files.  [default: the platform's, or ./log]",
    ),
    _option(
        OUTPUT,
        "--echo",
        default="all",
        metavar="RANKS",
        help="Ranks whose output is shown here: all, none, or a list such as 0,2-3.  [default: all]",
    ),
    _option(
        OUTPUT,
        "--prefix",
        default="rank",
        metavar="PARTS",
        help="What each line begins with: rank, time and host in any order, such as time,rank; or none.  "
        "[default: rank]",
    ),
    _option(
        OUTPUT,
        "--color",
        default="auto",
        type=click.Choice(["auto", "always", "never"]),
        help="Colour per rank; auto: on a terminal, unless NO_COLOR is set.  [default: auto]",
    ),
    _option(
        OUTPUT,
        "--live",
        is_flag=True,
        help="On a terminal, show a live table of the workers, with their lines below it.",
    ),
    _option(
        OUTPUT,
        "--keep-logs",
        type=WHOLE,
        metavar="N",
        help="Keep the log files of N runs of a job, with this one.  [default: all]",
    ),
    _option(
        OUTPUT,
        "--detach",
        is_flag=True,
        help="Return when all workers run, print job and log folder, and leave the job to davincirunctl.",
    ),
    _option(
        OUTPUT,
        "--log-limit",
        type=SIZE,
        metavar="SIZE",
        help="Keep only head and tail of a log file longer than this, such as 500M.  [default: no limit]",
    ),
    _option(
        OUTPUT,
        "--progress-pattern",
        metavar="REGEX",
        help="Lines that report a worker's progress, besides the known formats; named groups: step, total, "
        "loss, epoch, seconds.",
    ),
    _option(
        OUTPUT,
        "--html",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write a run report, a page for a browser, when the job is over.",
    ),
    _option(
        OUTPUT,
        "--metrics",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Keep the job's figures in this file as OpenMetrics text, for a node exporter.",
    ),
    _option(OUTPUT, "--quiet", is_flag=True, help="Print only errors and the failure report."),
    _option(OUTPUT, "--verbose", is_flag=True, help="Also print pids, log files and the end of each worker."),
    _option(
        FAILURE,
        "--explain",
        type=click.Path(exists=True),
        metavar="LOGDIR",
        expose_value=False,
        callback=_explain,
        help="Explain why a job that is over failed, from its log folder (ours, torchrun's or msrun's) or a "
        "single log file; COMMAND is not needed.",
    ),
    _option(
        FAILURE,
        "--lang",
        type=click.Choice(["auto", "en", "zh"]),
        default="auto",
        is_eager=True,
        help="Language of the report.  [default: auto, that of the locale]",
    ),
    _option(
        FAILURE,
        "--on-end",
        metavar="COMMAND",
        help="Run COMMAND, without a shell, when the job is over, with DAVINCIRUN_VERDICT, "
        "DAVINCIRUN_EXIT_CODE and DAVINCIRUN_REPORT set.",
    ),
    _option(
        FAILURE,
        "--check",
        is_flag=True,
        help="Check this node first, as `davincirunctl doctor` does, and start nothing on a fault.",
    ),
    _option(
        FAILURE,
        "--report",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write the report as one JSON object when the job is over.",
    ),
    _option(
        FAILURE,
        "--grace-period",
        default=15.0,
        type=SECONDS,
        metavar="SECONDS",
        help="Time between the stop signal and SIGKILL, in which a worker can save its state.  [default: 15]",
    ),
    _option(
        FAILURE,
        "--debug",
        type=WHOLE,
        metavar="RANK",
        help="Give RANK the terminal: breakpoint(), pdb and Ctrl-C work in it; no time limits.",
    ),
    _option(
        FAILURE,
        "--stop-signal",
        metavar="NAME",
        help="Signal that asks workers to end; INT suits scripts that save on KeyboardInterrupt.  "
        "[default: TERM]",
    ),
    _option(
        FAILURE,
        "--keep-going",
        is_flag=True,
        help="Let the other workers go on when one fails; the exit code is that of the first failure.",
    ),
    _option(
        FAILURE,
        "--straggler-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="Name and stop the workers that still run this long after the first one succeeded, with exit "
        "code 124.",
    ),
    _option(
        FAILURE,
        "--max-restarts",
        type=WHOLE,
        metavar="N",
        help="Restart the whole group up to N times, after failures that a restart may cure.  [default: 0]",
    ),
    _option(
        FAILURE,
        "--restart-delay",
        type=SECONDS,
        metavar="SECONDS",
        help="Wait before the first restart; doubled each time, up to 300.  [default: 10]",
    ),
    _option(
        FAILURE,
        "--stall-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="After this long without output, a step or file access of any rank, take stacks and do what "
        "--on-stall says; three times as long while ranks are busy and before the first step.  "
        "[default: off]",
    ),
    _option(
        FAILURE,
        "--on-stall",
        type=click.Choice(["stop", "restart", "warn"]),
        help="What to do with a job that has stalled.  [default: stop, exit code 124]",
    ),
    _option(
        FAILURE,
        "--timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="Stop the job after this time, with exit code 124.  [default: no limit]",
    ),
    _option(
        FAILURE,
        "--warn-signal",
        metavar="SIGNAL",
        help="Signal, such as USR1, that workers which handle it get before the time limit.",
    ),
    _option(
        FAILURE,
        "--warn-before",
        type=SECONDS,
        metavar="SECONDS",
        help="How long before the time limit --warn-signal is sent.  [default: 60]",
    ),
    _option(
        CLUSTERS,
        "--engine",
        type=click.Choice(["ray", "ssh"]),
        # Before the number of nodes, which only one of them takes as a range.
        is_eager=True,
        help="Start the workers of all nodes from here: ray, on --nnodes nodes of the Ray cluster at "
        "RAY_ADDRESS or of the one on this machine; ssh, on --hosts or --hostfile.",
    ),
    _option(
        CLUSTERS,
        "--collect-logs",
        is_flag=True,
        help="With --engine: after a failure, bring the log files of nodes that do not share this one's log "
        "folder here: up to 8 MiB of each, 256 MiB in all.",
    ),
    _option(
        CLUSTERS,
        "--hosts",
        metavar="HOSTS",
        help="With --engine ssh: hosts, such as a,b:8 or atlas[01-16].",
    ),
    _option(
        CLUSTERS,
        "--hostfile",
        type=click.Path(),
        metavar="FILE",
        help="With --engine ssh: file with one host per line, such as `atlas01 slots=8`.",
    ),
    _option(
        CLUSTERS,
        "--ssh",
        metavar="COMMAND",
        help="With --engine ssh: the client and its options, such as 'ssh -p 2222'.  [default: ssh]",
    ),
    _option(
        CLUSTERS,
        "--remote-python",
        metavar="PATH",
        help="With --engine ssh: path of Python on the hosts.  [default: the same as here]",
    ),
    _option(
        CLUSTERS,
        "--placement-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="With --engine ray: how long to wait for nodes that are free, or those of --rank-table.  "
        "[default: 300]",
    ),
    _option(
        CLUSTERS,
        "--resource",
        default="NPU",
        type=click.Choice(["NPU", "CPU"]),
        help="With --engine or --manifest: what each worker occupies on its node.  [default: NPU]",
    ),
    manifest_options,
    _option(
        OTHER,
        "--config",
        type=click.Path(),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read_config,
        help="Defaults for these options, as TOML or JSON; DAVINCIRUN_<OPTION> in the environment overrides "
        "them.",
    ),
    click.version_option(__version__, prog_name="davincirun"),
    _option(
        OTHER,
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=_help_all,
        help="Explain all options, also those that --help only names.",
    ),
]


def job_options(command: F) -> F:
    """Give a command all options."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command
