"""Why did a job fail that is over: the report from what its folder of logs still holds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.evidence import End, Evidence, RaisedError, RankEvidence
from davincirunsdk.diagnosis.exits import signal_behind
from davincirunsdk.diagnosis.judge import judge
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.diagnosis.lines import rank_in_prefix
from davincirunsdk.diagnosis.recorded import read_error_file
from davincirunsdk.types import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk.types import FailureReport

_END_BYTES = 1 << 20
"""How much of a log's end is read."""
_COMBINED_BYTES = 8 << 20
"""How much is read at each end of a file that holds the output of several ranks."""

_OURS = re.compile(
    r"(?P<job>.+)-proc-rank-(?P<rank>\d+)-device-(?P<device>-?\d+)(?:-attempt-(?P<attempt>\d+))?\.(?:txt|log)"
)
_MSRUN = re.compile(r"(?:\w*worker|.+?)_(?P<rank>\d+)\.log")
_RANKED = re.compile(
    r"(?:.*?[_.-])??(?:rank|worker|proc|node|process|task|log|output|stderr|stdout)?[_.-]?(?P<rank>\d+)\.(?:log|txt|out|err)"
)
_TELLING = frozenset({"started", "stopping", "killing", "exited"})
"""Kinds of events that say how ranks ended."""
_STILL_RUNNING = re.compile(r"; still running: .*", re.DOTALL)
_TORCHRUN_SUMMARY = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+)")


@dataclass(slots=True)
class _Found:
    """The files of one rank, and what other files say about it."""

    files: list[Path] = field(default_factory=list)
    output: bytes = b""
    device: int = -1
    error_file: Path | None = None
    exit_code: int | None = None
    ended: float | None = None
    started: float | None = None
    told: float | None = None
    killed: bool = False
    pid: int | None = None
    node: str = ""


def explain_folder(path: Path, *, job: str | None = None, lang: str | None = None) -> FailureReport:
    """Judge a job that is over from its folder of logs, or from a single log file; blocks while it reads.

    Args:
        path: Folder of a job of ours (`<job>-proc-rank-<r>-device-<d>.txt`, and maybe
            `<job>-events.jsonl`, which tells exit codes and times), of torchrun
            (`attempt_<n>/<rank>/stderr.log`), of msrun (`worker_<r>.log`), any folder with a file per
            rank, or one file; lines of several ranks in it are told apart by their prefixes.
        job: Which one of a folder that holds several of ours; None for the newest.
        lang: `en` or `zh`; None for the language of the locale.

    Returns:
        The report that the job would have given.

    Raises:
        FileNotFoundError: There is nothing there that looks like a log.
    """
    path = Path(path)
    job, found = _collect(path, job)
    if not found:
        raise FileNotFoundError(
            f"no log of a rank in {path}; expected files such as job-proc-rank-0-device-0.txt, "
            "attempt_0/0/stderr.log, worker_0.log, or one log file"
        )
    files = _events_of(path, job)
    started = [_started(file) for file in files]
    # A folder keeps the logs of ranks that only an earlier, larger job of the name had.
    found = {rank: one for rank, one in found.items() if any(rank in one for one in started)} or found
    # The files of several nodes tell of each node's own ranks.
    ends = [
        _read_events(file, {rank: one for rank, one in found.items() if rank in own})
        for file, own in zip(files, started, strict=True)
    ]
    failed = any(one.exit_code and one.told is None for one in found.values())
    end, reason, number = next(
        (told for told in ends if told[0] is not End.WORKERS and not (failed and len(files) > 1)),
        (End.WORKERS, "", ""),
    )
    knows_ends = any(one.ended is not None for one in found.values())
    ranks = tuple(_evidence_of(rank, one, knows_ends) for rank, one in sorted(found.items()))
    return judge(
        Evidence(
            job_id=job,
            log_dir=path if path.is_dir() else path.parent,
            ranks=ranks,
            end=end,
            reason=reason,
            signal=number,
            nnodes=len({one.node for one in ranks if one.node}) or 1,
            lang=choose_language(lang),
        )
    )


def _collect(path: Path, wanted: str | None) -> tuple[str, dict[int, _Found]]:
    if path.is_file():
        return path.stem, _split_by_prefix(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder nor a file; expected the log folder of a job")
    job, found = _of_ours(path, wanted)
    if found:
        return job, found
    for collect in (_of_torchrun, _of_msrun, _of_ranked):
        job, found = collect(path)
        if found:
            return job, found
    files = sorted(
        (
            file
            for file in path.iterdir()
            if file.is_file() and file.suffix in (".log", ".txt", ".out", ".err", "")
        ),
        key=lambda file: file.stat().st_size,
    )
    return (files[-1].stem, _split_by_prefix(files[-1])) if files else (path.name, {})


def _of_ours(path: Path, wanted: str | None) -> tuple[str, dict[int, _Found]]:
    jobs: dict[str, dict[int, _Found]] = {}
    newest: dict[str, float] = {}
    for file in path.iterdir():
        match = _OURS.fullmatch(file.name)
        if match is None or match["attempt"] is not None or not file.is_file():
            continue
        found = jobs.setdefault(match["job"], {}).setdefault(int(match["rank"]), _Found())
        newest[match["job"]] = max(newest.get(match["job"], 0.0), file.stat().st_mtime)
        if found.files and file.stat().st_mtime < found.files[0].stat().st_mtime:
            # An earlier job of the name had the rank on another device.
            continue
        found.files = [file]
        found.device = int(match["device"])
        error = file.with_name(f"{file.stem}-error.json")
        found.error_file = error if error.is_file() else None
    if not jobs:
        return path.name, {}
    job = wanted if wanted in jobs else max(newest, key=lambda name: newest[name])
    for scheduler in (path / f"{job}-scheduler.txt",):
        if scheduler.is_file():
            jobs[job][-1] = _Found(files=[scheduler])
    return job, jobs[job]


def _of_torchrun(path: Path) -> tuple[str, dict[int, _Found]]:
    """`[<run id>/]attempt_<n>/<local rank>/{stdout,stderr}.log` and `error.json`; the last attempt counts."""
    attempts = [
        folder
        for pattern in ("attempt_*", "*/attempt_*", "*/*/attempt_*")
        for folder in path.glob(pattern)
        if folder.is_dir()
    ]
    if path.name.startswith("attempt_"):
        attempts.append(path)
    if not attempts and any(path.glob("[0-9]*/std*.log")):
        attempts.append(path)
    if not attempts:
        return path.name, {}
    last = max(attempts, key=lambda folder: (_number(folder.name), folder.stat().st_mtime))
    # Several nodes write to one folder: one run folder each, with local ranks.
    same = sorted(
        (folder for folder in attempts if _number(folder.name) == _number(last.name)),
        key=lambda folder: str(folder),
    )
    found: dict[int, _Found] = {}
    shift = 0
    for folder in same if len({one.parent.parent for one in same}) == 1 else [last]:
        here = [one for one in folder.iterdir() if one.is_dir() and one.name.isdigit()]
        for place in here:
            one = _Found(
                files=[file for name in ("stdout.log", "stderr.log") if (file := place / name).is_file()]
            )
            error = place / "error.json"
            one.error_file = error if error.is_file() else None
            if one.files or one.error_file:
                found[shift + int(place.name)] = one
        shift += len(here)
    return (last.parent.name if last is not path else path.parent.name), found


def _number(name: str) -> int:
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _of_msrun(path: Path) -> tuple[str, dict[int, _Found]]:
    found: dict[int, _Found] = {}
    for file in path.iterdir():
        if (match := _MSRUN.fullmatch(file.name)) is not None and file.is_file():
            found.setdefault(int(match["rank"]), _Found()).files.append(file)
    if found and (path / "scheduler.log").is_file():
        found[-1] = _Found(files=[path / "scheduler.log"])
    return path.name, found


def _of_ranked(path: Path) -> tuple[str, dict[int, _Found]]:
    """Any folder with one file per rank."""
    found: dict[int, _Found] = {}
    for file in sorted([*path.iterdir(), *path.glob("*/*")]):
        if not file.is_file():
            continue
        match = _RANKED.fullmatch(file.name) or re.fullmatch(
            r"(?:rank|worker)?[_-]?(?P<rank>\d+)", file.parent.name
        )
        if match is not None and file.suffix in (".log", ".txt", ".out", ".err"):
            found.setdefault(int(match["rank"]), _Found()).files.append(file)
    return path.name, found


def _split_by_prefix(path: Path) -> dict[int, _Found]:
    """Share out one file's lines to the ranks that their prefixes name; without any it is one rank's."""
    data = _read_end(path, _COMBINED_BYTES)
    pieces: dict[int, list[bytes]] = {}
    loose: list[bytes] = []
    for line in data.split(b"\n"):
        rank = rank_in_prefix(line[:300].decode(errors="replace"))
        if rank is None:
            loose.append(line)
        else:
            pieces.setdefault(rank, []).append(line)
    if len(pieces) < 2 and sum(map(len, pieces.values())) < len(loose):
        return {0: _Found(files=[path], output=data)}
    found = {rank: _Found(files=[path], output=b"\n".join(lines)) for rank, lines in pieces.items()}
    for rank, code in _TORCHRUN_SUMMARY.findall(data.decode(errors="replace")):
        if int(rank) in found:
            found[int(rank)].exit_code = int(code)
    return found


def _events_of(path: Path, job: str) -> list[Path]:
    """The events file of a job, or those of its nodes where each wrote its own: whichever is newest."""
    if not path.is_dir():
        return []
    nodes = sorted(path.glob(f"{escape(job)}-node-*-events.jsonl"))
    # What a driver of all nodes has written tells all that the nodes' own do.
    for whole in (path / f"{job}-nodes-events.jsonl", path / f"{job}-events.jsonl"):
        newest = max((file.stat().st_mtime for file in nodes), default=-math.inf)
        if whole.is_file() and whole.stat().st_mtime >= newest:
            return [whole]
    return nodes


def _events(path: Path) -> Iterator[dict[str, object]]:
    """The events of the last job in a file: each job begins with `about`."""
    last: list[dict[str, object]] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                # A last line that was being written when the launcher was killed.
                continue
            if not isinstance(event, dict):
                continue
            if event.get("kind") == "about":
                last.clear()
            elif event.get("kind") in _TELLING:
                last.append(event)
    yield from last


def _started(path: Path) -> set[int]:
    """The ranks, auxiliary processes included, that a job has started according to its events."""
    return {
        rank
        for event in _events(path)
        if event.get("kind") == "started" and isinstance(rank := event.get("rank"), int)
    }


def _read_events(path: Path, found: dict[int, _Found]) -> tuple[End, str, str]:
    """Take exits and times from the events file; only its last attempt counts."""
    told = math.inf
    end, reason, number = End.WORKERS, "", ""
    failed = first_of_stop = False
    for event in _events(path):
        kind, moment = event.get("kind"), event.get("time")
        rank, code, detail = event.get("rank"), event.get("exit_code"), event.get("detail")
        if not isinstance(moment, int | float):
            continue
        one = found.get(rank) if isinstance(rank, int) else None
        if kind == "started" and one is not None:
            told, failed = math.inf, False
            end, reason = End.WORKERS, ""
            one.started, one.ended, one.exit_code = float(moment), None, None
            one.told, one.killed = None, False
            one.pid = pid if isinstance(pid := event.get("pid"), int) else None
            one.node = node if isinstance(node := event.get("node"), str) else ""
        elif kind == "stopping" and math.isinf(told):
            told = float(moment)
            # Who ran then is told by the ends of the ranks, which come after it.
            text = _STILL_RUNNING.sub("", detail) if isinstance(detail, str) else ""
            end, reason, number = (End.WORKERS, "", "") if failed else _why_stopped(text)
            for other in found.values():
                if other.ended is None:
                    other.told = told
            first_of_stop = not failed
        elif kind == "killing" and one is not None:
            one.killed = True
        elif kind == "exited" and one is not None:
            if first_of_stop and end is End.WORKERS:
                # The stop is written down just before the end that made us stop.
                one.told, first_of_stop = None, False
            one.ended = float(moment)
            one.exit_code = code if isinstance(code, int) else None
            failed = failed or bool(one.exit_code)
    return end, reason, number


def _why_stopped(detail: str) -> tuple[End, str, str]:
    lowered = detail.lower()
    if "internal error" in lowered or "error in the supervisor" in lowered:
        return End.INTERNAL_ERROR, detail, ""
    if "time limit" in lowered or "timeout was" in lowered:
        return End.TIME_LIMIT, detail, ""
    if "showed progress" in lowered or "still ran" in lowered or "stall" in lowered:
        return End.STALLED, detail, ""
    if "failed" in lowered or "ended while workers" in lowered or "have ended" in lowered:
        return End.WORKERS, "", ""
    named = re.search(r"SIG[A-Z]+[12]?", detail)
    return End.STOPPED, detail, named[0] if named else ""


def _evidence_of(rank: int, found: _Found, knows_ends: bool) -> RankEvidence:
    output = found.output or b"\n".join(_read_end(file, _END_BYTES) for file in found.files)
    raised = read_error_file(found.error_file) if found.error_file is not None else None
    written = max((file.stat().st_mtime for file in found.files), default=None)
    code = found.exit_code
    return RankEvidence(
        rank=rank,
        local_rank=rank,
        device_id=found.device,
        node=found.node,
        pid=found.pid,
        name=f"rank {rank}" if rank >= 0 else "scheduler",
        state=_state_of(found, knows_ends, raised),
        exit_code=code,
        started=found.started,
        # A log's last change is as near to the end as can be known.
        ended=found.ended if knows_ends else written,
        told=found.told,
        last_output=written if knows_ends else None,
        log_path=found.files[-1] if found.files else found.error_file or Path(),
        output=output,
        raised=raised,
    )


def _state_of(found: _Found, knows_ends: bool, raised: RaisedError | None) -> WorkerState:
    """Where a worker stood; without events nobody knows, and its words decide."""
    if found.exit_code is not None and not knows_ends:
        return WorkerState.FAILED if found.exit_code else WorkerState.SUCCEEDED
    if found.ended is None:
        return WorkerState.RUNNING
    if found.told is None:
        return WorkerState.SUCCEEDED if found.exit_code == 0 else WorkerState.FAILED
    if found.killed and signal_behind(found.exit_code) is not None:
        return WorkerState.KILLED
    return WorkerState.STOPPED


def _read_end(path: Path, size: int) -> bytes:
    """Read a file's end; of a larger one its beginning too, where a first error may stand."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            if length <= 2 * size:
                file.seek(0)
                return file.read()
            file.seek(0)
            head = file.read(size) if size >= _COMBINED_BYTES else b""
            file.seek(length - size)
            return head + file.read(size)
    except OSError:
        return b""
