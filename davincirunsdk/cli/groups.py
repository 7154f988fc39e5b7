"""Options in groups, and the help that shows them so: the common ones, or all."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

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


def option(group: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """Declare an option of a group."""
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def help_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the help with all options, and leave."""
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()
