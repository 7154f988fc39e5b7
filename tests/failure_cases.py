"""Reads and replays the failures of `diagnosis/corpus`, and says what a report about one has wrong."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).parent / "diagnosis" / "corpus"
REPLAY = Path(__file__).parent / "workers" / "replay.py"
NOON = time.mktime((2026, 3, 4, 10, 0, 0, 0, 0, -1))
MODES = ("folder", "live", "end")
_FIELDS = ("about", "verdict", "rank", "ranks", "may", "quote", "say", "unsaid", "modes")
_LONGEST_PAUSE = 0.25
"""Seconds: in a replay with real workers nothing is gained by waiting as long as the real ones did."""


@dataclass
class Script:
    """What one rank does: timed pieces of output, then its end."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    end: str = "exit 0"
    ended: float = 0.0
    last_words: str = ""
    code_after_term: int | None = None

    @property
    def text(self) -> str:
        """All it prints, in order."""
        return "".join(text for _, text in self.pieces) + self.last_words


@dataclass
class Case:
    """One failure of several ranks, and what a right report about it says."""

    name: str
    theme: str
    fields: dict[str, list[str]]
    scripts: dict[int, Script]

    @property
    def modes(self) -> tuple[str, ...]:
        """How it is replayed; the log folder always is."""
        return ("folder", *" ".join(self.fields.get("modes", [])).split())

    @property
    def log(self) -> str:
        """Everything that any rank prints."""
        said = (
            text
            for script in self.scripts.values()
            for text in (*dict(script.pieces).values(), script.last_words)
        )
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(said))

    def wanted(self, name: str, mode: str) -> list[str]:
        """Lines of a field, as it is in this mode."""
        return (mode == "live" and self.fields.get("live-" + name)) or self.fields.get(name, [])


def read_corpus() -> list[Case]:
    """Read every case, in the order of the files."""
    found: list[Case] = []
    for path in sorted(CORPUS.glob("*.txt")):
        if path.name == "open.txt":
            continue
        parts = re.split(r"(?m)^=== ", path.read_text(encoding="utf-8"))[1:]
        found += [_read_case(path.stem, part) for part in parts]
    return found


def _read_case(theme: str, part: str) -> Case:
    head, *sections = re.split(r"(?m)^--- ", part)
    name, *lines = head.strip().split("\n")
    fields: dict[str, list[str]] = {}
    for line in lines:
        key, _, value = line.partition(":")
        assert key.removeprefix("live-") in _FIELDS, f"{name}: unknown field {key}"
        fields.setdefault(key, []).append(value.strip())
    headers = [section.partition("\n") for section in sections]
    everyone = sorted({rank for header, _, _ in headers for rank in _ranks(header)})
    scripts = {rank: Script() for rank in everyone}
    for header, _, body in headers:
        for rank in _ranks(header):
            _add(scripts[rank], body.rstrip("\n"), rank, len(everyone), name)
    return Case(name, theme, fields, scripts)


def _ranks(header: str) -> list[int]:
    """`0-7 not 3 4` as a list."""
    chosen, _, without = header.partition(" not ")

    def numbers(text: str) -> list[int]:
        found: list[int] = []
        for word in text.split():
            first, _, last = word.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
        return found

    return [rank for rank in numbers(chosen) if rank not in numbers(without)]


def _add(script: Script, body: str, rank: int, count: int, name: str) -> None:
    now = script.pieces[-1][0] if script.pieces else 0.0
    in_last_words = False
    for line in body.split("\n"):
        if re.fullmatch(r"@[\d.]+", line):
            now = float(line[1:])
        elif line.startswith("!term"):
            in_last_words, script.code_after_term = True, int(line.split()[1])
        elif line.startswith("!"):
            script.end, script.ended = line[1:], now
            assert script.end.split()[0] in ("exit", "signal", "stop"), f"{name}: {line}"
        else:
            text = _filled(line, rank, count, now)
            # A line without its end is one that was cut off.
            text = text.removesuffix("<CUT>") if text.endswith("<CUT>") else text + "\n"
            if in_last_words:
                script.last_words += text
            elif script.pieces and script.pieces[-1][0] == now:
                script.pieces[-1] = (now, script.pieces[-1][1] + text)
            else:
                script.pieces.append((now, text))
    script.ended = max(script.ended, now)


def _filled(line: str, rank: int, count: int, now: float) -> str:
    at = time.localtime(NOON + now)
    stamp = time.strftime("%Y-%m-%d-%H:%M:%S", at)
    fraction = f"{int(now % 1 * 1000):03d}.{100 + rank:03d}"
    words = {
        "{r}": str(rank),
        "{n}": str(count),
        "{d}": str(rank % 8),
        "{next}": str((rank + 1) % count),
        "{prev}": str((rank - 1) % count),
        "{pid}": str(4100 + rank),
        "{cann}": f"{stamp}.{fraction}",
        "{npu}": stamp,
        "{iso}": time.strftime("%Y-%m-%d %H:%M:%S", at) + "," + fraction[:3],
        "<CR>": "\r",
        "<ESC>": "\x1b",
    }
    for word, value in words.items():
        line = line.replace(word, value)
    return re.sub(r"<LONG (\d+)>", lambda found: "0.125, " * (int(found[1]) // 7), line)


def write_folder(case: Case, folder: Path) -> None:
    """Write the log folder that a job with this failure leaves behind.

    Args:
        case: The failure.
        folder: Where; it must be there.
    """
    scripts = case.scripts
    # Who ends at the same moment is seen one after the other.
    ends = {rank: script.ended + rank / 1000 for rank, script in scripts.items()}
    bad = [ends[rank] for rank, script in scripts.items() if script.end not in ("exit 0", "stop")]
    # A job writes that it stops just before the end that made it do so.
    stops = min(bad) - 0.00005 if any(script.end == "stop" for script in scripts.values()) else None
    events: list[tuple[float, dict[str, object]]] = []
    for rank, script in scripts.items():
        path = folder / f"job-proc-rank-{rank}-device-{rank % 8}.txt"
        path.write_bytes(script.text.encode("utf-8", "surrogateescape"))
        about = {"rank": rank, "pid": 4100 + rank}
        events.append((-1.0 + rank / 1000, {"kind": "started", **about}))
        code, ended = _code(script), ends[rank]
        if script.end == "stop":
            assert stops is not None
            ended = max(stops, script.ended) + 0.01 + rank / 1000
        end: dict[str, object] = {"kind": "exited", **about, "exit_code": code}
        if code < 0:
            end["signal"] = signal.Signals(-code).name
        if script.end == "stop":
            end["detail"] = signal.Signals(-code).name if code < 0 else "SIGTERM"
        events.append((ended, end))
    if stops is not None:
        events.append((stops, {"kind": "stopping", "detail": "a worker failed"}))
    events.append((max(at for at, _ in events) + 0.05, {"kind": "finished", "exit_code": 1, "detail": ""}))
    lines = [
        json.dumps({"v": 1, "time": NOON + at, "job": "job", "node": "host-a", **event}) + "\n"
        for at, event in sorted(events, key=lambda item: item[0])
    ]
    (folder / "job-events.jsonl").write_text("".join(lines))


def write_as_others_do(case: Case, launcher: str, folder: Path) -> None:
    """Write the logs that msrun or torchrun leaves behind; neither tells exit codes or times.

    Args:
        case: The failure.
        launcher: `msrun` or `torchrun`.
        folder: Where; it must be there.
    """
    for rank, script in case.scripts.items():
        data = script.text.encode("utf-8", "surrogateescape")
        if launcher == "msrun":
            (folder / f"worker_{rank}.log").write_bytes(data)
            continue
        own = folder / "none_3k2vx9" / "attempt_0" / str(rank)
        own.mkdir(parents=True)
        (own / "stdout.log").write_bytes(b"")
        (own / "stderr.log").write_bytes(data)
    if launcher == "msrun":
        (folder / "scheduler.log").write_text("[WARNING] DISTRIBUTED: the cluster is built\n")


def _code(script: Script) -> int:
    if script.end == "stop":
        return -signal.SIGTERM if script.code_after_term is None else script.code_after_term
    kind, what = script.end.split()
    return int(what) if kind == "exit" else -signal.Signals[f"SIG{what}"].value


def write_plan(case: Case, path: Path) -> None:
    """Write what `workers/replay.py` reads, with pauses shortened.

    Args:
        case: The failure.
        path: The file.
    """
    moments = sorted(
        {at for script in case.scripts.values() for at in (*(at for at, _ in script.pieces), script.ended)}
    )
    shortened: dict[float, float] = {}
    now = previous = 0.0
    for moment in moments:
        now += min(moment - previous, _LONGEST_PAUSE)
        shortened[moment] = now
        previous = moment
    plan = {
        rank: {
            "pieces": [(shortened[at], text) for at, text in script.pieces],
            "end": script.end,
            "ended": shortened[script.ended],
            "last_words": script.last_words,
            "code_after_term": script.code_after_term,
        }
        for rank, script in case.scripts.items()
    }
    path.write_text(json.dumps(plan))


def _plain(text: str) -> str:
    """Letters and digits only: however the report has wrapped and marked its lines."""
    return re.sub(r"[\W_]+", "", text).lower()


def faults_of_case(case: Case) -> list[str]:
    """List what is wrong with a case itself."""
    log = _plain(case.log)
    spaced = " ".join(case.log.split()).lower()
    faults = []
    for line in case.fields.get("quote", []):
        faults += [f"not in the log: {part}" for part in _parts(line) if _plain(part) not in log]
    for line in case.fields.get("say", []) + case.fields.get("live-say", []):
        if all(part.lower() in spaced for part in _parts(line)):
            faults.append(f"whoever quotes the log says it: {line}")
    for line in case.fields.get("unsaid", []):
        faults += [f"stands in the log: {part}" for part in _parts(line) if part.lower() in spaced]
    if "verdict" not in case.fields or not ({"rank", "ranks"} & case.fields.keys()):
        faults.append("says neither verdict nor ranks")
    if unknown := set(case.modes) - set(MODES):
        faults.append(f"unknown modes: {unknown}")
    if "end" in case.modes and any(script.end == "stop" for script in case.scripts.values()):
        faults.append("in mode end nobody stops it")
    return faults


def _parts(line: str) -> list[str]:
    return [part.strip() for part in line.split("|") if part.strip()]


def faults_of_report(
    case: Case, mode: str, *, verdict: str, ranks: tuple[int, ...], why: str, text: str
) -> list[str]:
    """List what a report about a case has wrong; none when it is right.

    Args:
        case: The failure.
        mode: How it was replayed.
        verdict: As in the report.
        ranks: Whom it names, surest first.
        why: Its one sentence.
        text: The report as printed.
    """
    faults = []
    wanted = _parts("|".join(case.wanted("verdict", mode)))
    if verdict not in wanted:
        faults.append(f"verdict: {verdict}, not {' or '.join(wanted)}")
    first = case.wanted("rank", mode)
    exact = case.wanted("ranks", mode)
    allowed = set(_numbers(first) + _numbers(exact) + _numbers(case.wanted("may", mode)))
    if wrong := sorted(set(ranks) - allowed):
        faults.append(f"ranks: {wrong} named, which must not be")
    if exact and set(ranks) != set(_numbers(exact)):
        faults.append(f"ranks: {sorted(ranks)}, not {sorted(_numbers(exact))}")
    elif first and ranks and ranks[0] not in _numbers(first):
        faults.append(f"ranks: {ranks[0]} first, not one of {_numbers(first)}")
    elif first and not ranks and "none" not in first[0]:
        faults.append(f"ranks: nobody named, not one of {_numbers(first)}")
    if verdict != "root_cause" and "is the root cause" in text:
        faults.append("title: says root cause, which the verdict does not")
    all_words = " ".join(f"{why} {text}".split()).lower()
    plain = _plain(text)
    faults += [
        f"quote: lacks {line}"
        for line in case.wanted("quote", mode)
        if not any(_plain(part) in plain for part in _parts(line))
    ]
    said = case.wanted("say", mode)
    faults += [f"words: none of {line}" for line in said if not _says_one(line, all_words, case)]
    for line in case.wanted("unsaid", mode):
        faults += [f"hint: says {part}" for part in _parts(line) if part.lower() in all_words]
    if (length := text.count("\n") + 1) >= 80:
        faults.append(f"length: {length} lines")
    return faults


def _says_one(line: str, words: str, case: Case) -> bool:
    log = " ".join(case.log.split()).lower()
    # A word that the log has too proves nothing about the report.
    return any(part.lower() in words for part in _parts(line) if part.lower() not in log)


def _numbers(lines: list[str]) -> list[int]:
    return [int(word) for line in lines for word in re.findall(r"\d+", line)]
