"""What is known of a run when it is over, or so far: read from its events file, drawn as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")

_ABOUT = {
    "command": "Command",
    "versions": "Versions",
    "launcher": "Launcher",
    "rank_table": "Rank table",
}
"""What the first event says of the job, and how a person reads it."""

_TAIL_BYTES = 16 << 10
_TAIL_LINES = 40
_FAILED = re.compile(r"rank ([0-9]+) failed\b")
_ATTEMPT = re.compile(r"\brestart ([0-9]+) of\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A figure at a moment.

    Attributes:
        time: Wall-clock seconds.
        value: The figure.
    """

    time: float
    value: float


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a rank, from its start to its end.

    Attributes:
        started: Wall-clock seconds.
        ended: Wall-clock seconds, None while it runs or when nobody saw its end.
        pid: Process id.
        exit_code: Negative for a signal, None when unknown.
        stopped: It was told to end by us before it ended.
        attempt: Number of the attempt, from 0.
    """

    started: float
    pid: int | None
    attempt: int
    ended: float | None = None
    exit_code: int | None = None
    stopped: bool = False


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """One rank over the whole run.

    Attributes:
        rank: Place in the job, -1 for an auxiliary process.
        node: Name of its node.
        lives: Its processes, one for each attempt.
        steps: Steps so far.
        losses: Losses.
        step_seconds: Seconds per step.
        cpu: Processor time in use, in cores.
        memory: Resident bytes, helpers included.
        output: Bytes of output so far.
        npu: Number of its NPU on the node, None when unknown.
        npu_use: Percent of the NPU's AI cores in use.
        npu_memory: Percent of the NPU's memory in use.
        npu_temperature: Degrees Celsius of the NPU.
        total: Steps in all, None when unknown.
    """

    rank: int
    node: str
    lives: list[Life] = field(default_factory=list)
    steps: list[Point] = field(default_factory=list)
    losses: list[Point] = field(default_factory=list)
    step_seconds: list[Point] = field(default_factory=list)
    cpu: list[Point] = field(default_factory=list)
    memory: list[Point] = field(default_factory=list)
    output: list[Point] = field(default_factory=list)
    npu: int | None = None
    npu_use: list[Point] = field(default_factory=list)
    npu_memory: list[Point] = field(default_factory=list)
    npu_temperature: list[Point] = field(default_factory=list)
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that concerned the job, or that a person has to know.

    Attributes:
        time: Wall-clock seconds.
        kind: As in `Event`.
        rank: Whom it was about, None for the job.
        node: Where.
        detail: In words.
    """

    time: float
    kind: str
    rank: int | None
    node: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A whole run.

    Attributes:
        job: Its name.
        started: Wall-clock seconds of the first event.
        ended: Of the last one.
        finished: False while it runs, or when its launcher was lost.
        exit_code: What the command ended with, None before the end.
        outcome: In words, as the last event says it.
        about: Facts for the page's head, such as the command: name and text.
        ranks: In rank order, auxiliary processes last.
        happenings: In order of time.
        report: The failure report as data, None without a failure.
        log_dir: Folder of the logs, None when it is not known.
        logs: Log file of each rank.
    """

    job: str
    started: float
    ended: float
    finished: bool
    exit_code: int | None
    outcome: str
    about: tuple[tuple[str, str], ...]
    ranks: tuple[RankRecord, ...]
    happenings: tuple[Happening, ...]
    report: Mapping[str, object] | None
    log_dir: Path | None = None
    logs: Mapping[int, Path] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in order of their ranks."""
        return tuple(dict.fromkeys(rank.node for rank in self.ranks))

    @property
    def attempts(self) -> int:
        """Number of attempts."""
        return 1 + max((life.attempt for rank in self.ranks for life in rank.lives), default=0)

    def tail(self, rank: int) -> tuple[str, ...]:
        """Read the last lines of a rank's log; () when it cannot be read."""
        path = self.logs.get(rank)
        if path is None:
            return ()
        try:
            with path.open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                data = file.read(_TAIL_BYTES)
        except OSError:
            return ()
        return tuple(data.decode(errors="replace").replace("\r", "\n").splitlines()[-_TAIL_LINES:])


def read_record(path: Path) -> RunRecord:
    """Read a run from its events file, which may still grow or be cut anywhere.

    Args:
        path: `<job>-events.jsonl`.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no event.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        record = record_of(_parsed(file))
    if record is None:
        raise ValueError(f"{path} holds no event: expected one JSON object in each line")
    logs = {}
    for log in sorted(path.parent.glob(f"{_literal(record.job)}-proc-rank-*-device-*.txt")):
        found = re.search(r"-proc-rank-([0-9]+)-device--?[0-9]+\.txt$", log.name)
        if found is not None:
            logs[int(found[1])] = log
    if (scheduler := path.parent / f"{record.job}-scheduler.txt").exists():
        logs[-1] = scheduler
    return replace(record, log_dir=path.parent, logs=logs)


def record_of(events: Iterable[Mapping[str, object]]) -> RunRecord | None:
    """Put events together; None when there are none.

    Args:
        events: As in the events file.
    """
    collector = _Collector()
    for event in events:
        collector.add(event)
    return collector.record()


class _Collector:
    def __init__(self) -> None:
        self._ranks: dict[int, RankRecord] = {}
        self._happenings: list[Happening] = []
        self._about: dict[str, str] = {}
        self._job = ""
        self._first: float | None = None
        self._last = 0.0
        self._attempt = 0
        self._stopping = False
        self._culprit: int | None = None
        self._end: Mapping[str, object] | None = None

    def add(self, event: Mapping[str, object]) -> None:
        time = _number(event.get("time"))
        kind = event.get("kind")
        if time is None or not isinstance(kind, str):
            return
        self._job = self._job or str(event.get("job", ""))
        self._first = time if self._first is None else self._first
        self._last = max(self._last, time)
        node, detail = str(event.get("node", "")), str(event.get("detail", ""))
        rank = event.get("rank")
        record = self._rank(rank, node) if isinstance(rank, int) else None
        if kind == "started" and record is not None:
            pid = event.get("pid")
            record.lives.append(
                Life(started=time, pid=pid if isinstance(pid, int) else None, attempt=self._attempt)
            )
        elif kind == "exited" and record is not None:
            self._exited(record, time, event)
        elif kind == "progress" and record is not None:
            _add_progress(record, time, event.get("progress"))
        elif kind == "usage" and record is not None:
            _add_usage(record, time, event.get("usage"))
        elif kind == "about":
            about = event.get("about")
            if isinstance(about, Mapping):
                self._about |= {_ABOUT[name]: str(about[name]) for name in _ABOUT if name in about}
        else:
            self._happened(kind, time, event, node, detail)

    def record(self) -> RunRecord | None:
        if self._first is None:
            return None
        end = self._end or {}
        code, report = end.get("exit_code"), end.get("report")
        order = sorted(self._ranks, key=lambda rank: (rank < 0, rank))
        return RunRecord(
            job=self._job,
            started=self._first,
            ended=self._last,
            finished=self._end is not None,
            exit_code=code if isinstance(code, int) else None,
            outcome=str(end.get("detail", "")),
            about=tuple(self._about.items()),
            ranks=tuple(self._ranks[rank] for rank in order),
            happenings=tuple(self._happenings),
            report=report if isinstance(report, Mapping) else None,
        )

    def _rank(self, rank: int, node: str) -> RankRecord:
        record = self._ranks.get(rank)
        if record is None:
            record = self._ranks[rank] = RankRecord(rank=rank, node=node)
        return record

    def _exited(self, record: RankRecord, time: float, event: Mapping[str, object]) -> None:
        if not record.lives or record.lives[-1].ended is not None:
            record.lives.append(Life(started=time, pid=None, attempt=self._attempt))
        code = event.get("exit_code")
        life = record.lives[-1]
        life.ended, life.exit_code = time, code if isinstance(code, int) else None
        life.stopped = self._stopping and code != 0 and record.rank != self._culprit

    def _happened(self, kind: str, time: float, event: Mapping[str, object], node: str, detail: str) -> None:
        if kind == "stopping":
            # The stop is written down just before the end that made us stop.
            found = _FAILED.match(detail) if not self._stopping else None
            self._culprit = int(found[1]) if found is not None else self._culprit
            self._stopping = True
        elif kind == "finished":
            self._end = event
            self._mark_failures(event.get("report"))
        elif kind in ("restart", "restarting", "attempt"):
            found = _ATTEMPT.search(detail)
            self._attempt = int(found[1]) if found is not None else self._attempt + 1
            self._stopping, self._culprit = False, None
        rank = event.get("rank")
        self._happenings.append(
            Happening(
                time=time, kind=kind, rank=rank if isinstance(rank, int) else None, node=node, detail=detail
            )
        )

    def _mark_failures(self, report: object) -> None:
        """Whom the report calls a failure was not ended by us, though its end came after the first."""
        failures = report.get("failures") if isinstance(report, Mapping) else None
        for failure in failures if isinstance(failures, list) else ():
            rank = failure.get("rank") if isinstance(failure, Mapping) else None
            if isinstance(rank, int) and rank in self._ranks and self._ranks[rank].lives:
                self._ranks[rank].lives[-1].stopped = False


def _parsed(lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            # The last line of a launcher that was killed may be cut.
            continue
        if isinstance(event, dict):
            yield event


def _add_progress(record: RankRecord, time: float, progress: object) -> None:
    if not isinstance(progress, Mapping):
        return
    _append(record.steps, time, progress.get("step"))
    _append(record.losses, time, progress.get("loss"))
    _append(record.step_seconds, time, progress.get("step_seconds"))
    total = progress.get("total")
    record.total = total if isinstance(total, int) else record.total


def _add_usage(record: RankRecord, time: float, usage: object) -> None:
    if not isinstance(usage, Mapping):
        return
    _append(record.cpu, time, usage.get("cpu"))
    _append(record.memory, time, usage.get("memory"))
    _append(record.output, time, usage.get("output"))
    npu = usage.get("npu")
    if isinstance(npu, Mapping):
        number = npu.get("npu")
        record.npu = number if isinstance(number, int) else record.npu
        _append(record.npu_use, time, npu.get("use"))
        _append(record.npu_memory, time, npu.get("memory"))
        _append(record.npu_temperature, time, npu.get("temperature"))


def _append(points: list[Point], time: float, value: object) -> None:
    number = _number(value)
    if number is not None:
        points.append(Point(time=time, value=number))


def _number(value: object) -> float | None:
    """A finite number, None for everything else: nan and inf cannot be drawn."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    return number if abs(number) < float("inf") else None


def _literal(text: str) -> str:
    """Write a name so that `glob` takes it as it is."""
    return re.sub(r"([*?\[])", r"[\1]", text)
