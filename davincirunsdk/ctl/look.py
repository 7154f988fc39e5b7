"""Commands that look at jobs that run: `list`, `status`, `tail`, `events`, `wait`, `attach`, `stacks`."""

from __future__ import annotations

import json
import time

import click

from davincirunsdk.cluster import file_name
from davincirunsdk.ctl import tailing
from davincirunsdk.ctl.asked import chosen, end, find, find_or_end, left_alone, plain, plain_lines
from davincirunsdk.ctl.jobs import (
    HostJob,
    running_jobs,
)
from davincirunsdk.output.charts import figure, span

_lines = click.option(
    "-n",
    "--lines",
    default=10,
    type=click.IntRange(0),
    metavar="N",
    show_default=True,
    help="Lines from the end.",
)


@click.command("list")
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
            plain(str(row["job"])),
            span(float(str(row["age"]))),
            str(row["state"]),
            str(row["ranks"]),
            f"{row['cpu']:.0f}%",
            figure(float(str(row["memory"])), "bytes"),
            "-" if row["step"] is None else str(row["step"]),
            plain(str(row["logs"])),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(titles))]
    for line in table:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(job: str | None, as_json: bool) -> None:
    """Show each rank of JOB: state, pid, age, step, last line."""
    found = find(job)
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
                "last_line": plain(lines[-1])[:200] if lines else "",
            }
        )
    if as_json:
        click.echo(json.dumps(_facts(found) | {"workers": rows}))
        return
    click.echo(f"job {plain(str(found))}, launcher {found.launcher}, {found.state}")
    for row in rows:
        end = "runs" if row["running"] else f"ended, exit code {row['exit_code']}"
        step = "" if row["step"] is None else f", step {row['step']}"
        name = "scheduler" if row["rank"] == -1 else f"rank {row['rank']}"
        click.echo(f"  {name}: {end}, pid {row['pid']}{step}: {str(row['last_line'])[:100]}")


@click.command()
@click.argument("job")
@click.argument("ranks", nargs=-1, type=int)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@_lines
def tail(job: str, ranks: tuple[int, ...], follow: bool, lines: int) -> None:
    """Show the last lines of JOB's RANKS.

    RANKS are all ranks by default. Where only one job runs, JOB may be `-`.
    """
    found = find(None if job == "-" else job)
    shown = chosen(found, ranks)
    with left_alone(found):
        if follow:
            tailing.follow(found, shown, lines)
        else:
            tailing.show_tail(found, shown, lines)


@click.command()
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
def events(job: str | None, follow: bool) -> None:
    """Print JOB's events, one JSON object per line."""
    found = find(job)
    with left_alone(found):
        tailing.copy_events(found, follow=follow)


@click.command()
@click.argument("job", required=False)
def wait(job: str | None) -> None:
    """Wait for JOB's end and report it.

    Prints the job's report, and ends with the job's exit code. Of a job that is over, JOB is its log folder,
    or its id where that is ./log.
    """
    found = find_or_end(job)
    with left_alone(found):
        click.echo(f"davincirunctl: waiting for job {plain(str(found))}", err=True)
        last = tailing.wait(found)
    end(last)


@click.command()
@click.argument("job", required=False)
@_lines
def attach(job: str | None, lines: int) -> None:
    """Show JOB's output until it ends.

    Then ends as `wait` does. Ctrl-C leaves the job running.
    """
    found = find_or_end(job)
    ranks = list(found.record.logs)
    with left_alone(found):
        last = tailing.follow(found, ranks, lines)
    end(last)


@click.command()
@click.argument("job", required=False)
def stacks(job: str | None) -> None:
    """Show where each rank of JOB is now.

    Ranks with equal stacks are shown together; the workers go on.
    """
    from davincirunsdk.diagnosis.stacks import Target, take_and_save

    found = find(job)
    targets = [
        Target(rank=rank, name="scheduler" if rank < 0 else f"rank {rank}", pid=pid)
        for rank, pid in found.workers.items()
    ]
    taken = take_and_save(targets, found.events.parent, file_name(found.job_id))
    click.echo(plain_lines(str(taken)))
    if taken.path is not None:
        click.echo(f"all of it: {plain(str(taken.path))}")


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
        "state": job.state,
        "ranks": len(job.workers),
        "cpu": cpu,
        "memory": memory,
        "step": int(min(steps)) if steps else None,
        "launcher": job.launcher,
        "user": job.user,
        "logs": str(job.events.parent),
    }
