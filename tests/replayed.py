"""Replays a failure of `diagnosis/corpus` through the product and judges the report."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from failure_cases import REPLAY, faults_of_report, write_folder, write_plan

from davincirunsdk import DistributedRuntimeError, FMKManager
from davincirunsdk.diagnosis.explain import explain_folder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from failure_cases import Case

    from davincirunsdk.types import FailureReport


def replay(case: Case, mode: str, folder: Path) -> tuple[list[str], str]:
    """Replay a case.

    Args:
        case: The failure.
        mode: One of `failure_cases.MODES`.
        folder: An empty folder.

    Returns:
        What the report has wrong, none when it is right; and the report's text.
    """
    report: FailureReport | None
    if mode == "folder":
        write_folder(case, folder)
        report = explain_folder(folder, lang="en")
    else:
        report = asyncio.run(_run(case, folder, fail_fast=mode == "live"))
    if report is None:
        return ["report: none"], ""
    # Names of this test's folders are no words of the report.
    text = report.text.replace(str(folder), "")
    faults = faults_of_report(
        case, mode, verdict=report.verdict, ranks=report.ranks, why=report.why, text=text
    )
    if mode != "folder" and any('File "' in line and "/davincirunsdk/" in line for line in _lines(report)):
        faults.append("frames: shows one of our own code")
    return faults, report.text


def _lines(report: FailureReport) -> list[str]:
    return report.text.splitlines()


async def _run(case: Case, folder: Path, *, fail_fast: bool) -> FailureReport | None:
    plan = folder / "plan.json"
    write_plan(case, plan)
    meeting = folder / "meeting"
    meeting.mkdir()
    command = [sys.executable, "-S", "-E", str(REPLAY), str(plan), str(meeting)]
    return await report_of(command, len(case.scripts), folder / "log", fail_fast=fail_fast)


async def report_of(
    command: list[str],
    count: int,
    log_dir: Path,
    *,
    fail_fast: bool = True,
    framework: str = "auto",
    meanwhile: Callable[[FMKManager], Awaitable[None]] | None = None,
) -> FailureReport | None:
    """Run a job that fails.

    Args:
        command: The workers' command.
        count: How many of them.
        log_dir: Folder of the log files.
        fail_fast: Whether siblings are stopped at the first bad end.
        framework: As in `FMKManager`.
        meanwhile: What is done while it runs.

    Returns:
        Its report; None when it did not fail.
    """
    manager = FMKManager(
        command,
        log_dir=log_dir,
        nproc_per_node=count,
        fail_fast=fail_fast,
        framework=framework,
        grace_period=5.0,
    )
    with suppress(DistributedRuntimeError):
        async with manager:
            if meanwhile is not None:
                await meanwhile(manager)
            with suppress(DistributedRuntimeError):
                await manager.wait()
            # Without fail fast the first bad end is told at once, and judged again when all is over.
            # To leave before that would be a stop of ours.
            with anyio.fail_after(60):
                async for _ in manager.events():
                    pass
    report: FailureReport | None = getattr(manager.error, "report", None)
    return report
