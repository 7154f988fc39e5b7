"""What to look at before a long job: each check looks, and says what it found and what to do about it.

A check never raises: one that cannot look says so. What takes long (Ascend's tools) is bounded, and
different tools are asked at the same time.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.ctl import checks_host, checks_npu, checks_versions
from davincirunsdk.findings import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is examined.

    Attributes:
        root: Folder that stands for `/`.
        env: The environment of the job to come.
        work_dir: Folder the workers will run in.
        log_dir: Folder of their log files.
        rank_table: Table to hold against this host, None for the platform's.
        nodes: Further host names that have to be known here.
        python: Interpreter whose packages the workers will have.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    work_dir: Path = Path()
    log_dir: Path = Path("log")
    rank_table: Path | None = None
    nodes: tuple[str, ...] = ()
    python: str = ""


_CHECKS: tuple[Callable[[Site], list[Finding]], ...] = (
    checks_npu.devices,
    checks_npu.holders,
    checks_npu.health,
    checks_npu.links,
    checks_npu.table,
    checks_host.names,
    checks_host.ports,
    checks_host.shared_memory,
    checks_host.disks,
    checks_host.limits,
    checks_host.clock,
    checks_versions.versions,
    checks_host.leftovers,
)
"""In the order in which a person reads them."""


def examine(site: Site) -> list[Finding]:
    """Look at a node; blocks for some seconds where Ascend's tools are asked.

    Args:
        site: What to examine.

    Returns:
        Findings in the order of the checks, good ones too.
    """
    with ThreadPoolExecutor(len(_CHECKS), thread_name_prefix="davincirun-check") as pool:
        return [
            finding
            for findings in pool.map(lambda check: _looked(check, site), _CHECKS)
            for finding in findings
        ]


def worst(findings: list[Finding]) -> Level:
    """Say how bad the worst of them is."""
    return max((finding.level for finding in findings), default=Level.OK)


def _looked(check: Callable[[Site], list[Finding]], site: Site) -> list[Finding]:
    try:
        return check(site)
    except Exception as error:
        # A machine in trouble is what is examined: no check may keep the others from being seen.
        return [
            Finding(
                where=check.__name__.replace("_", " "),
                found=f"no answer: {type(error).__name__}: {error}",
                expected="this check cannot look here; look by hand",
                level=Level.WARNING,
            )
        ]
