"""The options of `davincirun`: a line or two each, in the groups that its help shows.

What an option means for the job is checked in `davincirunsdk.options`, under the same name with
underscores; here stands how it is written, and its help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from davincirunsdk import __version__
from davincirunsdk.cli.config import read_config
from davincirunsdk.cli.groups import CLUSTERS, OTHER, help_all, option
from davincirunsdk.cli.options_run import RUN
from davincirunsdk.cli.options_start import START
from davincirunsdk.cli.parameters import SECONDS
from davincirunsdk.manifests.command import manifest_options

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_OPTIONS: list[Callable[[Any], Any]] = [
    *START,
    *RUN,
    option(
        CLUSTERS,
        "--engine",
        type=click.Choice(["ray", "ssh"]),
        # Before the number of nodes, which only one of them takes as a range.
        is_eager=True,
        help="Start the workers of all nodes from here: ray, on --nnodes nodes of the Ray cluster at "
        "RAY_ADDRESS or of the one on this machine; ssh, on --hosts or --hostfile.",
    ),
    option(
        CLUSTERS,
        "--collect-logs",
        is_flag=True,
        help="With --engine: after a failure, bring the log files of nodes that do not share this one's log "
        "folder here: up to 8 MiB of each, 256 MiB in all.",
    ),
    option(
        CLUSTERS,
        "--hosts",
        metavar="HOSTS",
        help="With --engine ssh: hosts, such as a,b:8 or atlas[01-16].",
    ),
    option(
        CLUSTERS,
        "--hostfile",
        type=click.Path(),
        metavar="FILE",
        help="With --engine ssh: file with one host per line, such as `atlas01 slots=8`.",
    ),
    option(
        CLUSTERS,
        "--ssh",
        metavar="COMMAND",
        help="With --engine ssh: the client and its options, such as 'ssh -p 2222'.  [default: ssh]",
    ),
    option(
        CLUSTERS,
        "--remote-python",
        metavar="PATH",
        help="With --engine ssh: path of Python on the hosts.  [default: the same as here]",
    ),
    option(
        CLUSTERS,
        "--placement-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="With --engine ray: how long to wait for nodes that are free, or those of --rank-table.  "
        "[default: 300]",
    ),
    option(
        CLUSTERS,
        "--resource",
        default="NPU",
        type=click.Choice(["NPU", "CPU"]),
        help="With --engine or --manifest: what each worker occupies on its node.  [default: NPU]",
    ),
    manifest_options,
    option(
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
    option(
        OTHER,
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=help_all,
        help="Explain all options, also those that --help only names.",
    ),
]


def job_options(command: F) -> F:
    """Give a command all options."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command
