"""The job that a command was asked about, what is printed of it, and how the command ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from davincirunsdk.ctl import tailing
from davincirunsdk.ctl.jobs import (
    HostJob,
    NoSuchJobError,
    SeveralJobsError,
    find_job,
    newest_events,
    running_jobs,
)
from davincirunsdk.output import text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


NO_JOB, SEVERAL, FAULT = 1, 2, 3


def find(name: str | None) -> HostJob:
    try:
        return find_job(name)
    except NoSuchJobError as error:
        fail(str(error), NO_JOB)
    except SeveralJobsError as error:
        fail(str(error), SEVERAL)


def events_of(name: str) -> Path:
    """Find the events file of a job that runs, or else of one that is over."""
    path = newest_events(name)
    if path is None and os.path.isdir(name):
        fail(f"{name} holds no events file of davincirun: expected <job>-events.jsonl", FAULT)
    if path is None or any(name in (job.job_id, job.mark) for job in running_jobs()):
        return find(None if name == "-" else name).events
    return path


def find_or_end(name: str | None) -> HostJob:
    """Find a running job, or end as one did that is over: it may have been shorter than the way to here."""
    path = newest_events(name) if name is not None else None
    running = running_jobs()
    if path is None or any(name in (job.job_id, job.mark) for job in running):
        return find(name)
    for job in running:
        if job.events.samefile(path):
            return job
    click.echo(f"davincirunctl: job {plain(name or '')} is over: {plain(str(path))}", err=True)
    end(tailing.last_event(path))


@contextmanager
def left_alone(job: HostJob) -> Iterator[None]:
    """Say at Ctrl-C that only the looking ends."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"davincirunctl: job {plain(str(job))} goes on", err=True)
        sys.exit(128 + signal.SIGINT)


def end(last: Mapping[str, object] | None) -> NoReturn:
    """End as a job did."""
    if last is None:
        fail("the launcher was lost: nobody knows how the job ended; see `davincirunctl clean`", FAULT)
    report = last.get("report")
    if isinstance(report, Mapping):
        click.echo(str(report.get("text", "")), err=True)
    code = last.get("exit_code")
    sys.exit(code if isinstance(code, int) else FAULT)


def fail(words: str, code: int) -> NoReturn:
    click.echo(f"davincirunctl: {words}", err=True)
    sys.exit(code)


def plain(words: str) -> str:
    """Take out what could steer the terminal: names and lines are the job's own."""
    return text.clean(words, colour=False)


def plain_lines(words: str) -> str:
    return "\n".join(plain(line) for line in words.split("\n"))


def chosen(job: HostJob, ranks: Sequence[int]) -> list[int]:
    known = list(job.record.logs)
    wrong = [rank for rank in ranks if rank not in known]
    if wrong:
        raise click.UsageError(f"job {job.job_id} has no rank {wrong[0]} here: {_listed(known)}")
    return list(ranks) or known


def _listed(ranks: Sequence[int]) -> str:
    from davincirunsdk.output.report_page import ranges

    return f"ranks {ranges(rank for rank in ranks if rank >= 0)}"
