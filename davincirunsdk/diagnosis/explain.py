"""Why did a job fail that is over: the report from what its folder of logs still holds."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.exits import explain_exit
from davincirunsdk.diagnosis.matching import hint
from davincirunsdk.diagnosis.order import is_victim, order
from davincirunsdk.diagnosis.report import failure_report
from davincirunsdk.types import FailureReport, Verdict, WorkerFailure

if TYPE_CHECKING:
    from pathlib import Path

_OWN_NAME = re.compile(r"(?P<job>.+)-proc-rank-(?P<rank>\d+)-device-(?P<device>\d+)\.txt")
_TAIL_BYTES = 1 << 16


def explain_folder(path: Path, *, lang: str | None = None) -> FailureReport:
    """Judge a job that is over from its folder of logs; blocks while it reads.

    Args:
        path: Folder with a log file per rank, named `<job>-proc-rank-<r>-device-<d>.txt`, and maybe
            the job's `<job>-events.jsonl`, which tells exit codes and times.
        lang: `en` or `zh`; None for the language of the locale.

    Returns:
        The report that the job would have given.

    Raises:
        FileNotFoundError: There is no log of a rank in it.
    """
    found = {int(m["rank"]): (m, file) for file in path.iterdir() if (m := _OWN_NAME.fullmatch(file.name))}
    if not found:
        raise FileNotFoundError(
            f"no log of a rank in {path}; expected files such as x-proc-rank-0-device-0.txt"
        )
    job = next(iter(found.values()))[0]["job"]
    exits: dict[int, tuple[int | None, float]] = {}
    told = float("inf")
    events = path / f"{job}-events.jsonl"
    if events.exists():
        for line in events.read_text(errors="replace").splitlines():
            event = json.loads(line)
            if event["kind"] == "exited" and event["time"] <= told:
                exits[event["rank"]] = event.get("exit_code"), event["time"]
            elif event["kind"] == "stopping":
                told = event["time"]
    failures = []
    for rank, (match, file) in sorted(found.items()):
        code, ended = exits.get(rank, (None, file.stat().st_mtime))
        if (exits and not code) or file.stat().st_size == 0:
            continue
        tail = tuple(file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").splitlines())
        failures.append(
            WorkerFailure(
                rank=rank,
                local_rank=rank,
                node_rank=0,
                node="",
                device_id=int(match["device"]),
                pid=None,
                exit_code=code,
                ended=ended,
                log_path=file,
                tail=tail,
                reason=explain_exit(code),
                hint=hint(tail),
                name=f"rank {rank}",
            )
        )
    ordered = order(tuple(sorted(failures, key=lambda one: one.ended)))
    text = failure_report(failures=ordered, workers=(), job_id=job, nnodes=1, log_dir=path)
    code = (ordered[0].exit_code or 1) if ordered else 0
    return FailureReport(
        verdict=Verdict.SUSPECTS if ordered and is_victim(ordered[0]) else Verdict.ROOT_CAUSE,
        ranks=tuple(one.rank for one in ordered[:1]),
        why="",
        text=text,
        exit_code=code if code >= 0 else 128 - code,
        failures=ordered,
        root_cause=ordered[0],
        stopped_ranks=(),
    )
