"""What is written when a job is over: the report as data, and the run report as a page."""

from __future__ import annotations

import json
import logging
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread_or_here
from davincirunsdk.phrases import count
from davincirunsdk.types import JobState, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.concurrency import Patience
    from davincirunsdk.options import JobOptions
    from davincirunsdk.types import RunResult


logger: logging.Logger = logging.getLogger("davincirunsdk")


async def write_all(
    waits: Patience,
    options: JobOptions,
    result: RunResult,
    *,
    events: Path | None,
    place: Callable[[Path], Path | None],
) -> None:
    """Write what was asked for when all is known, and run the user's command; neither changes the end.

    Args:
        waits: Of the job.
        options: What was asked for.
        result: How the job ended.
        events: The events file, None without one.
        place: Where this process writes a document of the whole job, None where another one writes it.
    """
    for wanted, write, source in (
        (options.report, write_report, result),
        (options.html, write_page, events),
    ):
        path = None if wanted is None or source is None else place(wanted)
        if path is None:
            continue
        try:
            await waits.wait(in_thread_or_here(write, path, source))
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be written: %s", path, error)
    if options.on_end is not None and place(options.default_log_dir) is not None:
        if why := await waits.wait(in_thread_or_here(run_at_end, options.on_end, result)):
            logger.warning("on_end failed: %s", why)


def report_data(result: RunResult) -> dict[str, object]:
    """Return a job's report as data, also that of one that needs none.

    Args:
        result: How the job ended.
    """
    if result.report is not None:
        return result.report.to_dict()
    good = result.state is JobState.SUCCEEDED
    why = f"{count(len(result.workers), 'worker')} ended well" if good else "the job was stopped"
    return {
        "schema": 1,
        "verdict": (Verdict.SUCCEEDED if good else Verdict.STOPPED).value,
        "ranks": [],
        "why": why,
        "text": f"job {result.job_id}: {why}",
        "exit_code": result.exit_code,
        "failures": [],
        "stopped_ranks": [] if good else [worker.rank for worker in result.workers if worker.exit_code != 0],
        "attempt": 0,
    }


def write_report(path: Path, result: RunResult) -> None:
    """Write the report as one JSON object.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(path, json.dumps(report_data(result), ensure_ascii=False) + "\n")


def run_at_end(hook: str | Callable[[RunResult], object], result: RunResult) -> str:
    """Run what the user wants to follow a job; blocking.

    Args:
        hook: A command as on a command line, which no shell sees, or a function.
        result: How the job ended.

    Returns:
        What went wrong, "" when nothing did.
    """
    from davincirunsdk.supervision.hook import call_hook, run_hook

    if not isinstance(hook, str):
        return call_hook(hook, result)
    data = report_data(result)
    with tempfile.TemporaryDirectory(prefix="davincirun-end-") as folder:
        report = Path(folder) / "report.json"
        try:
            report.write_text(json.dumps(data, ensure_ascii=False) + "\n", errors="backslashreplace")
        except OSError as error:
            return f"the report for it cannot be written: {error}"
        variables = {
            "DAVINCIRUN_VERDICT": str(data["verdict"]),
            "DAVINCIRUN_EXIT_CODE": str(result.exit_code),
            "DAVINCIRUN_REPORT": str(report),
        }
        return run_hook(shlex.split(hook), variables)


def write_page(path: Path, events: Path) -> None:
    """Draw the run report of a job.

    Args:
        path: Where the page goes.
        events: The job's events file.

    Raises:
        OSError: It cannot be written, or the events cannot be read.
        ValueError: There are no events.
    """
    write_whole(path, page(events, beside=path.parent))


def page(events: Path, *, beside: Path | None = None) -> str:
    """Draw the run report of a job as it stands.

    Args:
        events: The job's events file.
        beside: Folder that the page will stand in.

    Raises:
        OSError: The events cannot be read.
        ValueError: There are none.
    """
    from davincirunsdk.output.report_page import report_page
    from davincirunsdk.output.run_record import read_record

    return report_page(read_record(events), beside=beside)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees a part of it; one that was there stays until then.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.exists(path) and not os.path.isfile(path):
        # A device or a pipe cannot be replaced, and is meant to be written to.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
