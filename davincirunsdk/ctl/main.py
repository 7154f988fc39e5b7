"""The sub-commands of `davincirunctl`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from davincirunsdk import __version__
from davincirunsdk.ctl import tailing
from davincirunsdk.ctl.jobs import (
    HostJob,
    NoSuchJobError,
    SeveralJobsError,
    dead_processes,
    find_job,
    newest_events,
    running_jobs,
)
from davincirunsdk.findings import Level
from davincirunsdk.output import text
from davincirunsdk.output.charts import figure, span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from davincirunsdk.leftovers.proc import Proc

_NO_JOB, _SEVERAL, _FAULT = 1, 2, 3
_REFUSED = frozenset({"TERM", "KILL", "INT", "STOP", "QUIT", "HUP"})
_SECOND_SIGNAL = 1.2
"""Seconds after which a launcher counts a further signal as another wish."""

_END_SECONDS = 15.0
"""Seconds from SIGTERM to SIGKILL for processes of dead jobs."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="davincirunctl")
def cli() -> None:
    """Look at the jobs on this host, steer them, and check a node before a long job.

    JOB is a job's id or the short mark that `list` shows; it may be left out where only one runs.
    Exit code: 0 done; 1 no such job (doctor: warnings); 2 wrong usage, or several jobs fit; 3 fault.
    """


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per job, each on a line.")
def list_jobs(as_json: bool) -> None:
    """List the jobs that run on this host."""
    jobs = running_jobs()
    rows = [_facts(job) for job in jobs]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    if not rows:
        click.echo("no job runs on this host")
        return
    titles = ("MARK", "JOB", "AGE", "STATE", "RANKS", "CPU", "MEMORY", "STEP", "LOGS")
    table = [titles] + [
        (
            str(row["mark"]),
            _plain(str(row["job"])),
            span(float(str(row["age"]))),
            str(row["state"]),
            str(row["ranks"]),
            f"{row['cpu']:.0f}%",
            figure(float(str(row["memory"])), "bytes"),
            "-" if row["step"] is None else str(row["step"]),
            _plain(str(row["logs"])),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(titles))]
    for line in table:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


@cli.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(job: str | None, as_json: bool) -> None:
    """Show each rank of JOB: state, pid, age, step, last line."""
    found = _find(job)
    rows: list[dict[str, str | float | int | None]] = []
    for rank in found.record.ranks:
        life = rank.lives[-1] if rank.lives else None
        lines = [line for line in found.record.tail(rank.rank) if line.strip()]
        rows.append(
            {
                "rank": rank.rank,
                "node": rank.node,
                "pid": None if life is None else life.pid,
                "running": life is not None and life.ended is None,
                "exit_code": None if life is None else life.exit_code,
                "age": None if life is None else time.time() - life.started,
                "step": int(rank.steps[-1].value) if rank.steps else None,
                "total": rank.total,
                "log": str(found.record.logs.get(rank.rank, "")),
                "last_line": _plain(lines[-1])[:200] if lines else "",
            }
        )
    if as_json:
        click.echo(json.dumps(_facts(found) | {"workers": rows}))
        return
    click.echo(f"job {_plain(found.job_id)} ({found.mark}), launcher {found.launcher}, {_state(found)}")
    for row in rows:
        end = "runs" if row["running"] else f"ended, exit code {row['exit_code']}"
        step = "" if row["step"] is None else f", step {row['step']}"
        name = "scheduler" if row["rank"] == -1 else f"rank {row['rank']}"
        click.echo(f"  {name}: {end}, pid {row['pid']}{step}: {str(row['last_line'])[:100]}")


@cli.command()
@click.argument("job")
@click.argument("ranks", nargs=-1, type=int)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option(
    "-n",
    "--lines",
    default=10,
    type=click.IntRange(0),
    metavar="N",
    show_default=True,
    help="Lines from the end.",
)
def tail(job: str, ranks: tuple[int, ...], follow: bool, lines: int) -> None:
    """Show the last lines of JOB's RANKS.

    RANKS are all ranks by default. Where only one job runs, JOB may be `-`.
    """
    found = _find(None if job == "-" else job)
    chosen = _chosen(found, ranks)
    with _left_alone(found):
        tailing.show_tail(found, chosen, lines)
        if follow:
            tailing.follow(found, chosen)


@cli.command()
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
def events(job: str | None, follow: bool) -> None:
    """Print JOB's events, one JSON object per line."""
    found = _find(job)
    with _left_alone(found):
        tailing.copy_events(found, follow=follow)


@cli.command()
@click.argument("job", required=False)
@click.option("--now", is_flag=True, help="End the workers at once, without the grace period.")
def stop(job: str | None, now: bool) -> None:
    """Stop JOB, with the grace period.

    Like SIGTERM to its launcher: the stop signal for the workers, the grace period, then SIGKILL.
    """
    found = _find(job)
    if found.is_command:
        _signal(found.launcher, signal.SIGTERM)
        if now:
            time.sleep(_SECOND_SIGNAL)
            _signal(found.launcher, signal.SIGTERM)
    else:
        # The launcher is somebody's program, which has more to do than this job.
        for pid in found.workers.values():
            _signal(pid, signal.SIGKILL if now else signal.SIGTERM)
    click.echo(f"job {_plain(found.job_id)} ({found.mark}) is told to stop")


@cli.command("signal")
@click.argument("job")
@click.argument("name")
def send_signal(job: str, name: str) -> None:
    """Pass a signal on to JOB's workers.

    NAME is a signal such as USR1; only workers that handle it get it. Where only one job runs, JOB may
    be `-`.
    """
    short = name.upper().removeprefix("SIG")
    if short in _REFUSED:
        raise click.UsageError(f"{name} would end workers behind the launcher's back: use `stop`")
    try:
        number = signal.Signals[f"SIG{short}"]
    except KeyError:
        raise click.UsageError(f"{name!r} is not a signal: give a name such as USR1") from None
    found = _find(None if job == "-" else job)
    if (
        found.is_command
        and number in (signal.SIGUSR1, signal.SIGUSR2)
        and not _is_told_by_slurm(found.launcher)
    ):
        _signal(found.launcher, number)
    else:
        from davincirunsdk.leftovers.proc import Proc

        proc = Proc()
        for pid in found.workers.values():
            disposition = proc.disposition(pid)
            if disposition is not None and disposition.catches(number):
                _signal(pid, number)
    click.echo(f"SIG{short} is passed on to job {_plain(found.job_id)} ({found.mark})")


@cli.command()
@click.argument("job", required=False)
def wait(job: str | None) -> None:
    """Wait for JOB's end and report it.

    Prints the job's report, and ends with the job's exit code. Of a job that is over, JOB is its log folder,
    or its id where that is ./log.
    """
    found = _find_or_end(job)
    with _left_alone(found):
        click.echo(f"davincirunctl: waiting for job {_plain(found.job_id)} ({found.mark})", err=True)
        last = tailing.wait(found)
    _end(last)


@cli.command()
@click.argument("job", required=False)
@click.option(
    "-n",
    "--lines",
    default=10,
    type=click.IntRange(0),
    metavar="N",
    show_default=True,
    help="Lines from the end.",
)
def attach(job: str | None, lines: int) -> None:
    """Show JOB's output until it ends.

    Then ends as `wait` does. Ctrl-C leaves the job running.
    """
    found = _find_or_end(job)
    ranks = list(found.record.logs)
    with _left_alone(found):
        tailing.show_tail(found, ranks, lines)
        last = tailing.follow(found, ranks)
    _end(last)


@cli.command()
@click.argument("job", required=False)
def stacks(job: str | None) -> None:
    """Show where each rank of JOB is now.

    Ranks with equal stacks are shown together; the workers go on.
    """
    from davincirunsdk.diagnosis.stacks import Target, take_and_save

    found = _find(job)
    targets = [
        Target(rank=rank, name="scheduler" if rank < 0 else f"rank {rank}", pid=pid)
        for rank, pid in found.workers.items()
    ]
    taken = take_and_save(targets, found.events.parent, found.job_id)
    click.echo(_plain_lines(str(taken)))
    if taken.path is not None:
        click.echo(f"all of it: {_plain(str(taken.path))}")


@cli.command()
@click.argument("job")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    help="Write the run report, a page for a browser, to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--lang", type=click.Choice(["en", "zh"]), help="Language of the report.  [default: the locale's]"
)
def report(job: str, html: str | None, as_json: bool, lang: str | None) -> None:
    """Explain why a job failed.

    JOB is a running job or the log folder of one that is over, which may be torchrun's or msrun's, too.
    """
    folder = Path(job)
    if not folder.exists():
        folder = _find(None if job == "-" else job).events.parent
    if html is not None:
        from davincirunsdk.documents import write_page

        found = sorted(folder.glob("*-events.jsonl"), key=os.path.getmtime)
        if not found:
            _fail(f"{folder} holds no events file of davincirun: expected <job>-events.jsonl", _FAULT)
        write_page(Path(html).absolute(), found[-1])
        click.echo(f"the run report is in {html}")
        return
    from davincirunsdk.diagnosis.explain import explain_folder

    try:
        explained = explain_folder(folder, lang=lang)
    except (OSError, ValueError) as error:
        _fail(str(error), _FAULT)
    click.echo(explained.to_json() if as_json else explained.text)


@cli.command()
@click.argument("job")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="Archive to write.  [default: JOB-bundle.tar.gz]"
)
@click.option("--dry-run", is_flag=True, help="Only list what the archive would hold.")
def bundle(job: str, output: str | None, dry_run: bool) -> None:
    """Pack what helps to explain a job.

    One archive holds the logs, events, report, versions and the doctor's findings of JOB, which is a
    running job, a log folder, or the id of a job that is over where its folder is ./log. Of environment
    variables it holds the names, never the values.
    """
    from davincirunsdk.ctl.bundle import items_of, write_bundle
    from davincirunsdk.output.run_record import read_record

    events = newest_events(job)
    if events is None and os.path.isdir(job):
        _fail(f"{job} holds no events file of davincirun: expected <job>-events.jsonl", _FAULT)
    if events is None or any(job in (one.job_id, one.mark) for one in running_jobs()):
        events = _find(None if job == "-" else job).events
    name = read_record(events).job
    items = items_of(events, os.environ)
    for item in items:
        click.echo(f"{item.size:>12}  {_plain(item.name)}")
    if dry_run:
        return
    target = Path(output or f"{name}-bundle.tar.gz").absolute()
    try:
        write_bundle(target, items)
    except OSError as error:
        _fail(f"{target} cannot be written: {error.strerror}", _FAULT)
    click.echo(f"{len(items)} files are in {_plain(str(target))}")


@cli.command("clean")
@click.option("--yes", is_flag=True, help="End these processes.")
def clean_up(yes: bool) -> None:
    """Show processes of jobs whose launcher is gone.

    With --yes they get SIGTERM, and SIGKILL 15 seconds later.
    """
    from davincirunsdk.leftovers.proc import Proc, send

    left = dead_processes()
    if not left:
        click.echo("nothing is left of earlier jobs")
        return
    for one in left:
        click.echo(f"{one.pid}  {_plain(one.command)}")
    if not yes:
        click.echo(f"{len(left)} processes of jobs that are over; `davincirunctl clean --yes` ends them")
        return
    proc = Proc()
    for one in left:
        send(proc, one, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while (alive := [one for one in left if _lives(proc, one.pid, one.started)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    for one in alive:
        send(proc, one, signal.SIGKILL)
    click.echo(f"{len(left)} processes ended" + (f", {len(alive)} of them by SIGKILL" if alive else ""))


@cli.command()
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
        sys.exit(_FAULT if found.problem else 0)
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
            click.echo(f"{mark} {one.where}: {_plain(one.found)}")
            if one.expected:
                click.echo(f"         {_plain(one.expected)}")
    sys.exit({Level.OK: 0, Level.WARNING: 1, Level.FAULT: _FAULT}[worst(findings)])


def main() -> None:
    """Run the command."""
    cli(prog_name="davincirunctl")


def _find(name: str | None) -> HostJob:
    try:
        return find_job(name)
    except NoSuchJobError as error:
        _fail(str(error), _NO_JOB)
    except SeveralJobsError as error:
        _fail(str(error), _SEVERAL)


def _find_or_end(name: str | None) -> HostJob:
    """Find a running job, or end as one did that is over: it may have been shorter than the way to here."""
    path = newest_events(name) if name is not None else None
    running = running_jobs()
    if path is None or any(name in (job.job_id, job.mark) for job in running):
        return _find(name)
    for job in running:
        if job.events.samefile(path):
            return job
    click.echo(f"davincirunctl: job {_plain(name or '')} is over: {_plain(str(path))}", err=True)
    _end(tailing.last_event(path))


@contextmanager
def _left_alone(job: HostJob) -> Iterator[None]:
    """Say at Ctrl-C that only the looking ends."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"davincirunctl: job {_plain(job.job_id)} ({job.mark}) goes on", err=True)
        sys.exit(128 + signal.SIGINT)


def _end(last: Mapping[str, object] | None) -> NoReturn:
    """End as a job did."""
    if last is None:
        _fail("the launcher was lost: nobody knows how the job ended; see `davincirunctl clean`", _FAULT)
    report = last.get("report")
    if isinstance(report, Mapping):
        click.echo(str(report.get("text", "")), err=True)
    code = last.get("exit_code")
    sys.exit(code if isinstance(code, int) else _FAULT)


def _fail(words: str, code: int) -> NoReturn:
    click.echo(f"davincirunctl: {words}", err=True)
    sys.exit(code)


def _plain(words: str) -> str:
    """Take out what could steer the terminal: names and lines are the job's own."""
    return text.clean(words, colour=False)


def _plain_lines(words: str) -> str:
    return "\n".join(_plain(line) for line in words.split("\n"))


def _chosen(job: HostJob, ranks: Sequence[int]) -> list[int]:
    known = list(job.record.logs)
    wrong = [rank for rank in ranks if rank not in known]
    if wrong:
        raise click.UsageError(f"job {job.job_id} has no rank {wrong[0]} here: {_listed(known)}")
    return list(ranks) or known


def _listed(ranks: Sequence[int]) -> str:
    from davincirunsdk.output.report_page import ranges

    return f"ranks {ranges(rank for rank in ranks if rank >= 0)}"


def _facts(job: HostJob) -> dict[str, float | str | int | None]:
    import psutil

    cpu, memory = 0.0, 0
    for pid in job.workers.values():
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                cpu += 100 * (times.user + times.system) / max(time.time() - process.create_time(), 0.1)
                memory += process.memory_info().rss
        except psutil.Error:
            continue
    steps = [rank.steps[-1].value for rank in job.record.ranks if rank.steps]
    return {
        "mark": job.mark,
        "job": job.job_id,
        "age": time.time() - job.record.started,
        "state": _state(job),
        "ranks": len(job.workers),
        "cpu": cpu,
        "memory": memory,
        "step": int(min(steps)) if steps else None,
        "launcher": job.launcher,
        "user": job.user,
        "logs": str(job.events.parent),
    }


def _state(job: HostJob) -> str:
    if _is_stopped(job.launcher):
        return "LAUNCHER STOPPED"
    kinds = [one.kind for one in job.record.happenings]
    return "STOPPING" if "stopping" in kinds else "RUNNING"


def _is_stopped(pid: int) -> bool:
    from davincirunsdk.leftovers.proc import Proc

    look = Proc().look(pid)
    return look is not None and look.state == "T"


def _lives(proc: Proc, pid: int, started: int) -> bool:
    look = proc.look(pid)
    return look is not None and look.started == started and not look.is_dead


def _is_told_by_slurm(pid: int) -> bool:
    """Tell whether a launcher takes such signals for Slurm's, which has told its workers already."""
    from davincirunsdk.leftovers.pass_on import reached_by_sender

    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return reached_by_sender(dict(os.fsdecode(variable).partition("=")[::2] for variable in variables))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        _fail(f"process {pid} belongs to another user", _FAULT)
