"""The line that says that a job has started, and where its logs are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.phrases import count, ranks, some_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from davincirunsdk.protocol import Job
    from davincirunsdk.types import WorkerStatus

_MOST_PATTERNS = 4
"""Places of log files that the line names."""


def start_line(job: Job) -> str:
    """Say how many workers of which ranks run, and where their logs are."""
    workers = job.workers
    where = "".join(f"; logs: {place}" for place in _log_places(job))
    return f"{count(len(workers), 'worker')}, {ranks([one.rank for one in workers])}{where}"


def _log_places(job: Job) -> list[str]:
    """Where the log files are: each folder once a host, with the ranks of its files if there are several."""
    found: dict[Path, list[WorkerStatus]] = {}
    for worker in job.workers:
        # Not the job's own name: of two jobs of one name at once the second one's files are numbered.
        head, mark, _ = worker.log_path.name.partition("-proc-rank-")
        found.setdefault(worker.log_path.with_name(f"{head}{mark}*.txt"), []).append(worker)
    if len(job.workers) == 1:
        return [str(job.workers[0].log_path)]
    hosts = job.nodes
    if len(found) == 1:
        return [f"{pattern} on {_some_hosts(hosts)}" if hosts else str(pattern) for pattern in found]
    per_node = max(1, len(job.workers) // max(1, len(hosts)))
    places: dict[tuple[Path, str], list[str]] = {}
    for pattern, of in list(found.items())[:_MOST_PATTERNS]:
        there = hosts and _some_hosts(hosts[min(one.rank // per_node, len(hosts) - 1)] for one in of)
        files = places.setdefault((pattern.parent, f" on {there}" if there else ""), [])
        files.append(f"{pattern.name} ({ranks([one.rank for one in of])})")
    return [f"{folder / ', '.join(files)}{on}" for (folder, on), files in places.items()]


def _some_hosts(hosts: Iterable[str]) -> str:
    return some_of(list(dict.fromkeys(hosts)))
