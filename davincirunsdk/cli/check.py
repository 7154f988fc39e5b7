"""`--check`: what the doctor finds on this node, before a job starts."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from davincirunsdk.cli.words import Words
    from davincirunsdk.options import JobOptions


def node_is_well(options: JobOptions, words: Words, *, quiet: bool) -> bool:
    """Examine this node, and say what is odd or wrong.

    Args:
        options: Of the job to come.
        words: Takes the findings.
        quiet: Say faults only.

    Returns:
        False where there is a fault: the job is not to be started.
    """
    from davincirunsdk.ctl.doctor import Site, examine
    from davincirunsdk.findings import Level

    findings = examine(
        Site(
            env={**os.environ, **options.env},
            work_dir=options.work_dir,
            log_dir=options.log_dir or options.default_log_dir,
            rank_table=options.rank_table,
            nodes=(options.master_addr,) if options.master_addr else (),
            python=sys.executable,
        )
    )
    for one in findings:
        if one.level is Level.FAULT or (one.level is Level.WARNING and not quiet):
            words.say(f"{one.level.name.lower()}: {one.where}: found {one.found}; {one.expected}")
    faults = sum(one.level is Level.FAULT for one in findings)
    if faults:
        words.say(f"nothing is started: {faults} fault{'s' * (faults > 1)} on this node (--check)")
    return not faults
