"""hccl-ranktable: check, show, convert, make and merge rank tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from davincirunsdk import __version__
from davincirunsdk.errors import DavinciRunError, RankTableError
from davincirunsdk.phrases import count
from davincirunsdk.rank_table import dump, examine, parse
from davincirunsdk.rank_table.file import MOST_BYTES, read_file, write_text
from davincirunsdk.rank_table.findings import UNKNOWN
from davincirunsdk.rank_table.make import make, merge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk.rank_table import RankTable
    from davincirunsdk.rank_table.findings import Findings

FAULTS = 1
UNREADABLE = 3

_OUT = click.option(
    "-o", "--output", metavar="OUT", default="-", help="File to write; standard output if '-'."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="hccl-ranktable")
def main() -> None:
    """Check, show, convert, make and merge HCCL rank tables of every form.

    A FILE of '-' is standard input. Exit code: 0 all is well, 1 faults found, 2 wrong usage, 3 cannot read
    or write.
    """


@main.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def check_files(files: tuple[str, ...]) -> None:
    """List every fault and oddity of each FILE."""
    faulty = False
    for name in files:
        table, findings = examine(_read(name))
        faulty = faulty or bool(findings.faults)
        for line in _report(name, findings):
            click.echo(line)
        if not findings.faults and table is not None:
            click.echo(f"{name}: {_summary(table)}; no fault")
    sys.exit(FAULTS if faulty else 0)


@main.command("show")
@click.argument("file", metavar="FILE")
def show_file(file: str) -> None:
    """Show the nodes, devices and ranks of FILE.

    Below them stands what is wrong or odd.
    """
    table, findings = examine(_read(file))
    if table is not None and table.servers:
        click.echo(f"{file}: {_summary(table)}")
        for line in _listing(table):
            click.echo(line)
    for line in _report(file, findings):
        click.echo(line)
    sys.exit(FAULTS if findings.faults else 0)


@main.command("convert")
@click.argument("file", metavar="FILE")
@_OUT
def convert_file(file: str, output: str) -> None:
    """Write FILE in the form that HCCL reads.

    v0.1 and lab mode become v1.0, others keep their version.
    """
    _write(_parse(file), output)


@main.command("make")
@click.option(
    "--devices", metavar="LIST", default="", help="Physical numbers such as 0-3 or 0,1,4,5; default: all."
)
@click.option("--server-id", metavar="ID", help="What to call this host; default: its address.")
@click.option(
    "--root",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    help="Look for device files, hccn_tool and hccn.conf below DIR.",
)
@_OUT
def make_table(devices: str, server_id: str | None, root: Path, output: str) -> None:
    """Make the table of this host.

    It comes from device files, hccn_tool and /etc/hccn.conf.
    """
    try:
        numbers = tuple(_numbers(devices))
    except ValueError:
        raise click.BadParameter(
            f"found {devices!r}; expected numbers and ranges such as 0-3 or 0,1,4,5", param_hint="--devices"
        ) from None
    try:
        table = make(root=root, device_ids=numbers, server_id=server_id, search_path=os.environ.get("PATH"))
    except DavinciRunError as error:
        _fail(str(error), FAULTS)
    _write(table, output)


@main.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--keep-order", is_flag=True, help="Rank servers in the order of FILE..., not of their ids.")
@_OUT
def merge_files(files: tuple[str, ...], keep_order: bool, output: str) -> None:
    """Join the tables of several hosts into one.

    Ranks are numbered anew.

    The servers are ranked in text order of their ids, so that every host gets the same result
    whatever the order of FILE....
    """
    tables = [(name, _parse(name)) for name in files]
    try:
        table = merge(tables, keep_order=keep_order)
    except DavinciRunError as error:
        _fail(str(error), FAULTS)
    _write(table, output)


def _read(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read(MOST_BYTES + 1) if name == "-" else read_file(Path(name))[1]
    except RankTableError as error:
        _fail(str(error), UNREADABLE)
    except OSError as error:
        _fail(f"{name} cannot be read: {error.strerror}", UNREADABLE)


def _parse(name: str) -> RankTable:
    try:
        table = parse(_read(name), path=name)
    except DavinciRunError as error:
        _fail(str(error), FAULTS)
    for warning in table.warnings:
        click.echo(f"{name}: warning: {warning}", err=True)
    return table


def _write(table: RankTable, output: str) -> None:
    text = dump(table) + "\n"
    if output == "-":
        click.echo(text, nl=False)
        return
    try:
        write_text(text, Path(output))
    except OSError as error:
        _fail(f"{output} cannot be written: {error.strerror}", UNREADABLE)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < 1000:
            raise ValueError(part)
        yield from range(low, high + 1)


def _summary(table: RankTable) -> str:
    nodes = len(table.nodes()) if all(server.rows for server in table.servers) else len(table.servers)
    return f"{table.form}, {count(nodes, 'node')}, {count(table.world_size, 'device')}"


def _report(name: str, findings: Findings) -> Iterator[str]:
    for fault in findings.faults:
        yield f"{name}: fault: {fault}"
    for warning in findings.warnings:
        yield f"{name}: warning: {warning}"


def _listing(table: RankTable) -> Iterator[str]:
    """Lay the table out for people: a block per server, a line per device."""
    for server in table.servers:
        ranks = [row.rank for row in server.rows]
        span = f"ranks {min(ranks)}-{max(ranks)}" if ranks and min(ranks) != UNKNOWN else "no ranks"
        yield f"\n{_plain(server.server_id)}  {span}"
        more = [
            f"{key} {_plain(value)}"
            for key, value in server.extra.items()
            if isinstance(value, str) and value
        ]
        if more:
            yield f"  {', '.join(more)}"
        yield f"  {'rank':>6}  {'device':>6}  address"
        for row in server.rows:
            pod = f"  {_plain(row.pod)}" if row.pod else ""
            address = _plain(row.device_ip or "-")
            yield f"  {_figure(row.rank)}  {_figure(row.device_id)}  {address:<15}{pod}".rstrip()
    yield ""


def _figure(number: int) -> str:
    return f"{'?' if number == UNKNOWN else number:>6}"


def _plain(text: str) -> str:
    """A file must not be able to steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
