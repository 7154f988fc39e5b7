"""Replays a failure of `diagnosis/corpus` through the product and judges the report."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from failure_cases import REPLAY, faults_of_report, write_folder, write_plan

from davincirunsdk import DistributedRuntimeError, FMKManager
from davincirunsdk.diagnosis.explain import explain_folder

if TYPE_CHECKING:
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
    try:
        async with FMKManager(
            command,
            log_dir=folder / "log",
            nproc_per_node=len(case.scripts),
            fail_fast=fail_fast,
            grace_period=5.0,
        ) as manager:
            try:
                await manager.wait()
            finally:
                # Without fail fast `wait` hears of the first failure; the job goes on to its end.
                for _ in range(0 if fail_fast else 400):
                    if all(worker.ended is not None for worker in manager.workers):
                        break
                    await asyncio.sleep(0.02)
    except DistributedRuntimeError:
        # Judged again when all is over.
        return manager.error.report if isinstance(manager.error, DistributedRuntimeError) else None
    return None
