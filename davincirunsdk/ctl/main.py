"""The sub-commands of `davincirunctl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from davincirunsdk import __version__
from davincirunsdk.ctl import after, look, steer
from davincirunsdk.ctl.asked import FAULT, plain
from davincirunsdk.findings import Level


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="davincirunctl")
def cli() -> None:
    """Look at the jobs on this host, steer them, and check a node before a long job.

    JOB is a job's id or the short mark that `list` shows; it may be left out where only one runs.
    Exit code: 0 done; 1 no such job (doctor: warnings); 2 wrong usage, or several jobs fit; 3 fault.
    """


@click.command()
@click.option("--rank-table", type=click.Path(path_type=Path), help="Compare this table with the host.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("log"),
    help="Folder of the log files.  [default: ./log]",
)
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder that the workers run in.  [default: .]",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST",
    help="A node whose name must resolve here; may be repeated.",
)
@click.option(
    "--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True, help="Folder that is `/`."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per finding, each on a line.")
@click.option(
    "--where",
    "show_where",
    is_flag=True,
    help="Only show which source gives the size of a job here and this node's place in it.",
)
def doctor(
    rank_table: Path | None,
    log_dir: Path,
    work_dir: Path,
    nodes: tuple[str, ...],
    root: Path,
    as_json: bool,
    show_where: bool,
) -> None:
    """Check this node before a long job.

    Exit code: 0 if all is well, 1 for warnings, 3 for a fault.
    """
    if show_where:
        from davincirunsdk.ctl import whereabouts

        found = whereabouts.look(rank_table, root)
        if as_json:
            click.echo(json.dumps(whereabouts.as_data(found), ensure_ascii=False))
        else:
            click.echo("\n".join(whereabouts.lines(found)))
        sys.exit(FAULT if found.problem else 0)
    from davincirunsdk.ctl.doctor import Site, examine, worst

    findings = examine(
        Site(root=root, rank_table=rank_table, log_dir=log_dir, work_dir=work_dir, nodes=nodes)
    )
    for one in findings:
        if as_json:
            line = {"level": one.level.name.lower(), "check": one.where, "found": one.found}
            click.echo(json.dumps(line | {"remedy": one.expected or None}, ensure_ascii=False))
        else:
            colour = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}[one.level]
            mark = click.style(f"{one.level.name.lower():8}", fg=colour)
            click.echo(f"{mark} {one.where}: {plain(one.found)}")
            if one.expected:
                click.echo(f"         {plain(one.expected)}")
    sys.exit({Level.OK: 0, Level.WARNING: 1, Level.FAULT: FAULT}[worst(findings)])


for _command in (
    look.list_jobs,
    look.status,
    look.tail,
    look.events,
    look.wait,
    look.attach,
    look.stacks,
    steer.stop,
    steer.send_signal,
    steer.clean_up,
    after.report,
    after.bundle,
    doctor,
):
    cli.add_command(_command)


def main() -> None:
    """Run the command."""
    cli(prog_name="davincirunctl")
