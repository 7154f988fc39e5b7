"""Commands that steer jobs and clear up after them: `stop`, `signal`, `clean`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from davincirunsdk.ctl import tailing
from davincirunsdk.ctl.asked import FAULT, fail, find, plain
from davincirunsdk.ctl.jobs import dead_processes, is_stopped

if TYPE_CHECKING:
    from davincirunsdk.ctl.jobs import HostJob
    from davincirunsdk.leftovers.proc import Proc

_REFUSED = frozenset({"TERM", "KILL", "INT", "STOP", "QUIT", "HUP"})
_SECOND_SIGNAL = 1.2
"""Seconds after which a launcher counts a further signal as another wish."""

_REACTION = 5.0
"""Seconds in which a launcher that is well has begun to stop, or with `--now` has ended: it leaves by
itself when nothing moves for two."""

_END_SECONDS = 15.0
"""Seconds from SIGTERM to SIGKILL for processes of dead jobs."""


@click.command()
@click.argument("job", required=False)
@click.option("--now", is_flag=True, help="End the workers at once, without the grace period.")
def stop(job: str | None, now: bool) -> None:
    """Stop JOB, with the grace period.

    Like SIGTERM to its launcher: the stop signal for the workers, the grace period, then SIGKILL. A
    launcher that does not react is named, and with --now killed; the job's guardian ends what is left.
    """
    found = find(job)
    if found.is_command:
        _stop_launcher(found, now=now)
    else:
        # The launcher is somebody's program, which has more to do than this job.
        for pid in found.workers.values():
            _signal(pid, signal.SIGKILL if now else signal.SIGTERM)
    click.echo(f"job {plain(str(found))} is told to stop")


def _stop_launcher(found: HostJob, *, now: bool) -> None:
    began = found.state == "STOPPING"
    news = tailing.news(found)
    _wake(found.launcher, signal.SIGTERM)
    if now:
        time.sleep(_SECOND_SIGNAL)
        _wake(found.launcher, signal.SIGTERM)
    deadline = time.monotonic() + _REACTION
    while time.monotonic() < deadline:
        if tailing.is_gone(found) or (not now and (began or any(b'"stopping"' in line for line in news()))):
            return
        time.sleep(0.05)
    if not now:
        fail(
            f"job {plain(str(found))} is told to stop, but its launcher {found.launcher} has not reacted for "
            f"{_REACTION:g} s: `davincirunctl stop --now` ends the job without it",
            FAULT,
        )
    for pid in (found.launcher, *found.workers.values()):
        _signal(pid, signal.SIGKILL)
    click.echo(f"launcher {found.launcher} did not react and was killed", err=True)


@click.command("signal")
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
    found = find(None if job == "-" else job)
    if (
        found.is_command
        and number in (signal.SIGUSR1, signal.SIGUSR2)
        and not _is_told_by_slurm(found.launcher)
        and not is_stopped(found.launcher)
    ):
        _signal(found.launcher, number)
    else:
        from davincirunsdk.leftovers.proc import Proc

        proc = Proc()
        handling = [
            pid
            for pid in found.workers.values()
            if (disposition := proc.disposition(pid)) is not None and disposition.catches(number)
        ]
        for pid in handling:
            _signal(pid, number)
        if not handling:
            click.echo(f"no worker of job {plain(str(found))} handles SIG{short}: nobody is told")
            return
    click.echo(f"SIG{short} is passed on to job {plain(str(found))}")


@click.command("clean")
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
        click.echo(f"{one.pid}  {plain(one.command)}")
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


def _wake(pid: int, number: int) -> None:
    """Signal a process that may have been stopped, which would not hear it."""
    _signal(pid, number)
    if is_stopped(pid):
        _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        fail(f"process {pid} belongs to another user", FAULT)
