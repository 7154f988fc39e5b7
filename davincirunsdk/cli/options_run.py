"""Options of `davincirun` that say what is shown and kept of a run, and what follows from a failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from davincirunsdk.cli.groups import FAILURE, OUTPUT, option
from davincirunsdk.cli.parameters import SECONDS, SIZE, WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_LOGS = 3


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


RUN: list[Callable[[Any], Any]] = [
    option(
        OUTPUT,
        "--log-dir",
        type=click.Path(),
        metavar="DIR",
        help="Folder of the log files.  [default: the platform's, or ./log]",
    ),
    option(
        OUTPUT,
        "--echo",
        default="all",
        metavar="RANKS",
        help="Ranks whose output is shown here: all, none, or a list such as 0,2-3.  [default: all]",
    ),
    option(
        OUTPUT,
        "--prefix",
        default="rank",
        metavar="PARTS",
        help="What each line begins with: rank, time and host in any order, such as time,rank; or none.  "
        "[default: rank]",
    ),
    option(
        OUTPUT,
        "--color",
        default="auto",
        type=click.Choice(["auto", "always", "never"]),
        help="Colour per rank; auto: on a terminal, unless NO_COLOR is set.  [default: auto]",
    ),
    option(
        OUTPUT,
        "--live",
        is_flag=True,
        help="On a terminal, show a live table of the workers, with their lines below it.",
    ),
    option(
        OUTPUT,
        "--keep-logs",
        type=WHOLE,
        metavar="N",
        help="Keep the log files of N runs of a job, with this one.  [default: all]",
    ),
    option(
        OUTPUT,
        "--detach",
        is_flag=True,
        help="Return when all workers run, print job and log folder, and leave the job to davincirunctl.",
    ),
    option(
        OUTPUT,
        "--log-limit",
        type=SIZE,
        metavar="SIZE",
        help="Keep only head and tail of a log file longer than this, such as 500M.  [default: no limit]",
    ),
    option(
        OUTPUT,
        "--progress-pattern",
        metavar="REGEX",
        help="Lines that report a worker's progress, besides the known formats; named groups: step, total, "
        "loss, epoch, seconds.",
    ),
    option(
        OUTPUT,
        "--html",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write a run report, a page for a browser, when the job is over.",
    ),
    option(
        OUTPUT,
        "--metrics",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Keep the job's figures in this file as OpenMetrics text, for a node exporter.",
    ),
    option(OUTPUT, "--quiet", is_flag=True, help="Print only errors and the failure report."),
    option(OUTPUT, "--verbose", is_flag=True, help="Also print pids, log files and the end of each worker."),
    option(
        FAILURE,
        "--explain",
        type=click.Path(exists=True),
        metavar="LOGDIR",
        expose_value=False,
        callback=_explain,
        help="Explain why a job that is over failed, from its log folder (ours, torchrun's or msrun's) or a "
        "single log file; COMMAND is not needed.",
    ),
    option(
        FAILURE,
        "--lang",
        type=click.Choice(["auto", "en", "zh"]),
        default="auto",
        is_eager=True,
        help="Language of the report.  [default: auto, that of the locale]",
    ),
    option(
        FAILURE,
        "--on-end",
        metavar="COMMAND",
        help="Run COMMAND, without a shell, when the job is over, with DAVINCIRUN_VERDICT, "
        "DAVINCIRUN_EXIT_CODE and DAVINCIRUN_REPORT set.",
    ),
    option(
        FAILURE,
        "--check",
        is_flag=True,
        help="Check this node first, as `davincirunctl doctor` does, and start nothing on a fault.",
    ),
    option(
        FAILURE,
        "--report",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write the report as one JSON object when the job is over.",
    ),
    option(
        FAILURE,
        "--grace-period",
        default=15.0,
        type=SECONDS,
        metavar="SECONDS",
        help="Time between the stop signal and SIGKILL, in which a worker can save its state.  [default: 15]",
    ),
    option(
        FAILURE,
        "--debug",
        type=WHOLE,
        metavar="RANK",
        help="Give RANK the terminal: breakpoint(), pdb and Ctrl-C work in it; no time limits.",
    ),
    option(
        FAILURE,
        "--stop-signal",
        metavar="NAME",
        help="Signal that asks workers to end; INT suits scripts that save on KeyboardInterrupt.  "
        "[default: TERM]",
    ),
    option(
        FAILURE,
        "--keep-going",
        is_flag=True,
        help="Let the other workers go on when one fails; the exit code is that of the first failure.",
    ),
    option(
        FAILURE,
        "--straggler-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="Name and stop the workers that still run this long after the first one succeeded, with exit "
        "code 124.",
    ),
    option(
        FAILURE,
        "--max-restarts",
        type=WHOLE,
        metavar="N",
        help="Restart the whole group up to N times, after failures that a restart may cure.  [default: 0]",
    ),
    option(
        FAILURE,
        "--restart-delay",
        type=SECONDS,
        metavar="SECONDS",
        help="Wait before the first restart; doubled each time, up to 300.  [default: 10]",
    ),
    option(
        FAILURE,
        "--stall-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="After this long without output, a step or file access of any rank, take stacks and do what "
        "--on-stall says; three times as long while ranks are busy and before the first step.  "
        "[default: off]",
    ),
    option(
        FAILURE,
        "--on-stall",
        type=click.Choice(["stop", "restart", "warn"]),
        help="What to do with a job that has stalled.  [default: stop, exit code 124]",
    ),
    option(
        FAILURE,
        "--timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="Stop the job after this time, with exit code 124.  [default: no limit]",
    ),
    option(
        FAILURE,
        "--warn-signal",
        metavar="SIGNAL",
        help="Signal, such as USR1, that workers which handle it get before the time limit.",
    ),
    option(
        FAILURE,
        "--warn-before",
        type=SECONDS,
        metavar="SECONDS",
        help="How long before the time limit --warn-signal is sent.  [default: 60]",
    ),
]
