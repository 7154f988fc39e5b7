"""The run report: one self-contained page that opens from disk, prints well and runs no script.

Whatever a worker printed is escaped where it enters the page, and the page's own policy forbids
scripts, network and frames on top of that.
"""

from __future__ import annotations

import bisect
import itertools
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import quote

from davincirunsdk.output.charts import Bar, Line, Mark, Row, figure, line_chart, span, timeline
from davincirunsdk.output.run_record import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from davincirunsdk.output.run_record import Happening, Life, RankRecord, RunRecord

_SINGLE_LINES = 8
"""Ranks that have a curve of their own; of more, lowest, median and highest are drawn."""

_SINGLE_ROWS = 64
"""Ranks that have a row of their own; of more, those of one fate share one."""

_ALIKE = 40
"""Pieces of the whole time: what falls into the same is one fate."""

_RESAMPLED = 160
"""Moments at which many ranks are compared."""

_HAPPENINGS = 200
_OPEN_TABLE = 64
"""Ranks whose table is open at first."""

_EXCERPTS = 6
"""Failed ranks whose last lines are shown."""

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#667085;--line:#e4e7ec;--card:#f8fafc;
--good:#1a7f4b;--bad:#c4320a;--stop:#b7791f;--run:#3066be;--a:#3066be;--b:#c4320a;--c:#1a7f4b;--d:#8250df;
--e:#b7791f;--f:#0e7490;--g:#be3d8f;--h:#667085}
@media(prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e9ee;--dim:#98a2b3;--line:#2b313b;--card:#1b2028;
--good:#4cc38a;--bad:#ff7a59;--stop:#e5b454;--run:#79a8f2;--a:#79a8f2;--b:#ff7a59;--c:#4cc38a;--d:#b79af5;
--e:#e5b454;--f:#5cc8de;--g:#f08cc4;--h:#98a2b3}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1060px;padding:24px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI","Noto Sans CJK SC",sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:32px 0 8px}
.badge{display:inline-block;padding:2px 10px;border-radius:10px;color:var(--bg);font-weight:600;
font-size:14px;vertical-align:3px;margin-left:10px}
.badge.good{background:var(--good)}.badge.bad{background:var(--bad)}.badge.stop{background:var(--stop)}
.badge.run{background:var(--run)}
.dim{color:var(--dim)}dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:10px 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 18px;margin:10px 0}
.card.bad{border-left:4px solid var(--bad)}
pre{overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.45 ui-monospace,Menlo,monospace;
margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:13.5px}td,th{padding:3px 10px 3px 0;text-align:left;
border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--dim);font-weight:500}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
svg{width:100%;height:auto;display:block}svg text.label{font-size:11px;fill:var(--dim)}
.grid{stroke:var(--line)}rect.good{fill:var(--good)}rect.bad{fill:var(--bad)}rect.stop{fill:var(--stop);opacity:.5}
rect.run{fill:var(--run)}rect.lost{fill:var(--h)}
line.stopping{stroke:var(--bad);stroke-dasharray:4 3}line.restart{stroke:var(--run)}
line.stalled{stroke:var(--stop)}
polyline{fill:none;stroke-width:1.6}
polyline.a{stroke:var(--a)}polyline.b{stroke:var(--b)}polyline.c{stroke:var(--c)}polyline.d{stroke:var(--d)}
polyline.e{stroke:var(--e)}polyline.f{stroke:var(--f)}polyline.g{stroke:var(--g)}polyline.h{stroke:var(--h)}
.legend{margin:2px 0 0 84px;font-size:12.5px;color:var(--dim)}.key{margin-right:16px}
.key i{display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:4px}
i.a{background:var(--a)}i.b{background:var(--b)}i.c{background:var(--c)}i.d{background:var(--d)}
i.good{background:var(--good)}i.bad{background:var(--bad)}i.stop{background:var(--stop)}
i.run{background:var(--run)}i.lost{background:var(--h)}
i.e{background:var(--e)}i.f{background:var(--f)}i.g{background:var(--g)}i.h{background:var(--h)}
a{color:var(--run)}summary{cursor:pointer;color:var(--dim)}
@media print{body{max-width:none;padding:0}.card,svg,tr{break-inside:avoid}details{display:block}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LOOKS = "abcdefgh"
_FATES = {
    "good": "ended well",
    "bad": "failed",
    "stop": "stopped by the launcher",
    "run": "runs",
    "lost": "end unknown",
}
_CAPTIONS, _CAPTION = 12, 240
"""Moments that are told below the timeline, and letters of each; all of them are in the table of events."""

_MARKED = {"stopping": "stopping", "restarting": "restart", "restart": "restart", "stalled": "stalled"}


def report_page(record: RunRecord, *, beside: Path | None = None) -> str:
    """Draw a run as an HTML page.

    Args:
        record: The run.
        beside: Folder that the page will stand in, for links to the log files; None for links that
            hold on this machine only.

    Returns:
        The whole page: no other file, no network and no script is needed.
    """
    begin, end = record.started, max(record.ended, record.started)
    sections = [
        _head(record),
        _cause(record),
        "<h2>Ranks over time</h2>" + _timeline(record, begin, end),
        _curves(record, begin, end),
        _happened(record.happenings, begin),
        _table(record, beside),
        _excerpts(record, beside),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(record.job)}: {escape(_verdict(record)[0])}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _verdict(record: RunRecord) -> tuple[str, str]:
    """Say in a word or two how it ended, and in which colour."""
    if not record.finished:
        return "running, or its launcher was lost", "run"
    if record.exit_code == 0:
        return "succeeded", "good"
    if record.report is None or record.report.get("verdict") == "stopped":
        return f"stopped, exit code {record.exit_code}", "stop"
    verdict = str(record.report.get("verdict", "failed")).replace("_", " ")
    words = {"root cause": "failed", "succeeded": "succeeded"}.get(verdict, f"failed: {verdict}")
    return f"{words}, exit code {record.exit_code}", "bad"


def _head(record: RunRecord) -> str:
    word, look = _verdict(record)
    ranks = [rank for rank in record.ranks if rank.rank >= 0]
    facts = [
        ("Began", f"{_clock(record.started)}, took {span(record.ended - record.started)}"),
        ("Workers", f"{len(ranks)} on {len(record.nodes)} node{'s' * (len(record.nodes) != 1)}"),
    ]
    if record.attempts > 1:
        facts.append(("Attempts", str(record.attempts)))
    facts += record.about
    if record.log_dir is not None:
        facts.append(("Logs", str(record.log_dir)))
    return (
        f'<h1>{escape(record.job)}<span class="badge {look}">{escape(word)}</span></h1>'
        f"<dl>{_facts(facts)}</dl>"
    )


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)


def _cause(record: RunRecord) -> str:
    report = record.report
    if report is None:
        return ""
    failures = report.get("failures")
    first = failures[0] if isinstance(failures, list) and failures else None
    parts = [f'<h2>Why</h2><div class="card bad"><b>{escape(str(report.get("why", "")))}</b>']
    if isinstance(first, Mapping):
        facts = [
            (label, str(first[name]))
            for label, name in (
                ("Rank", "rank"), ("Node", "node"), ("Device", "device"), ("Pid", "pid"),
                ("Exit code", "exit_code"), ("Signal", "signal"), ("First error", "first_error_time"),
                ("Ended", "end_time"), ("Error code", "code"), ("Meaning", "meaning"), ("To do", "remedy"),
            )
            if first.get(name) is not None
        ]  # fmt: skip
        parts.append(f"<dl>{_facts(facts)}</dl>")
        excerpt = first.get("excerpt")
        if isinstance(excerpt, list) and excerpt:
            parts.append(f"<pre>{escape(chr(10).join(str(line) for line in excerpt))}</pre>")
    text = report.get("text")
    if text:
        parts.append(
            f"<details><summary>The report as printed</summary><pre>{escape(str(text))}</pre></details>"
        )
    return "".join(parts) + "</div>"


def _timeline(record: RunRecord, begin: float, end: float) -> str:
    rows = (
        [Row(label=_name(rank), bars=[_bar(rank, life, end) for life in rank.lives]) for rank in record.ranks]
        if len(record.ranks) <= _SINGLE_ROWS
        else _grouped_rows(record.ranks, begin, end)
    )
    marks = [
        Mark(
            time=one.time,
            look=_MARKED[one.kind],
            title=f"{one.kind} after {span(one.time - begin)}: {one.detail}",
        )
        for one in record.happenings
        if one.kind in _MARKED
    ]
    return timeline(rows, marks, begin, end) + _legend(record, marks)


def _legend(record: RunRecord, marks: Sequence[Mark]) -> str:
    """What the colours mean, and who stopped the ranks: paper shows no titles."""
    seen = {_end_of(life)[0] for rank in record.ranks for life in rank.lives}
    keys = "".join(
        f'<span class="key"><i class="{look}"></i>{word}</span>'
        for look, word in _FATES.items()
        if look in seen
    )
    words = "".join(f"<p class=legend>{escape(mark.title[:_CAPTION])}</p>" for mark in marks[:_CAPTIONS])
    return f"<p class=legend>{keys}</p>{words}"


def _grouped_rows(ranks: Sequence[RankRecord], begin: float, end: float) -> list[Row]:
    """Put ranks of one fate into one row: the odd ones are what a person looks for among a thousand."""
    step = max(end - begin, 1e-3) / _ALIKE
    groups: dict[tuple[tuple[str, int, int], ...], list[RankRecord]] = {}
    for rank in ranks:
        fate = tuple(
            (
                _end_of(life)[1],
                round((life.started - begin) / step),
                round(((life.ended if life.ended is not None else end) - begin) / step),
            )
            for life in rank.lives
        )
        groups.setdefault(fate, []).append(rank)
    rows = []
    for group in groups.values():
        first = group[0]
        bars = [_bar(first, life, end) for life in first.lives]
        label = _name(first)
        if len(group) > 1:
            label = f"{len(group)} ranks"
            alike = f"ranks {ranges([one.rank for one in group])}, like "
            bars = [replace(bar, title=alike + bar.title) for bar in bars]
        rows.append(Row(label=label, bars=bars))
    return rows


def ranges(ranks: Iterable[int]) -> str:
    """Write ranks as a person reads them: `0-6, 8`."""
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)


def _bar(rank: RankRecord, life: Life, end: float) -> Bar:
    look, word = _end_of(life)
    until = life.ended if life.ended is not None else end
    title = f"{_name(rank)}, pid {life.pid}, {word}, ran {span(until - life.started)}"
    if rank.steps:
        title += f", step {rank.steps[-1].value:.0f}"
    return Bar(begin=life.started, end=until, look=look, title=title)


def _end_of(life: Life) -> tuple[str, str]:
    if life.ended is None:
        return "run", "runs"
    code = life.exit_code
    if code == 0:
        return "good", "ended well"
    if code is None:
        return "lost", "end unknown"
    word = f"exit code {code}"
    if code < 0:
        try:
            word = signal.Signals(-code).name
        except ValueError:
            word = f"signal {-code}"
    return ("stop", f"stopped by the launcher, {word}") if life.stopped else ("bad", f"failed, {word}")


def _curves(record: RunRecord, begin: float, end: float) -> str:
    ranks = [rank for rank in record.ranks if rank.rank >= 0]
    breaks = [one.time for one in record.happenings if _MARKED.get(one.kind) == "restart"]
    parts = []
    for title, of, unit, name in (
        ("Loss", lambda rank: rank.losses, "", _name),
        ("Seconds per step", lambda rank: rank.step_seconds, "s", _name),
        ("Steps", lambda rank: rank.steps, "", _name),
        ("Output per second", lambda rank: _rates(rank.output), "bytes", _name),
        ("Processor cores in use", lambda rank: rank.cpu, "", _name),
        ("Resident memory", lambda rank: rank.memory, "bytes", _name),
        ("NPU cores in use", lambda rank: rank.npu_use, "%", _npu_name),
        ("NPU memory in use", lambda rank: rank.npu_memory, "%", _npu_name),
        ("NPU temperature", lambda rank: rank.npu_temperature, "\N{DEGREE SIGN}C", _npu_name),
    ):
        lines = _lines(ranks, of, begin, end, name)
        chart = line_chart(lines, begin, end, title, unit, breaks=breaks)
        if chart:
            parts.append(f"<h2>{title}</h2>{chart}")
    return "".join(parts)


def _lines(
    ranks: Sequence[RankRecord],
    of: Callable[[RankRecord], Sequence[Point]],
    begin: float,
    end: float,
    name: Callable[[RankRecord], str],
) -> list[Line]:
    curves = [(rank, points) for rank in ranks if len(points := of(rank)) > 1]
    if len(curves) <= _SINGLE_LINES:
        return [
            Line(label=name(rank), points=points, look=look)
            for (rank, points), look in zip(curves, _LOOKS, strict=False)
        ]
    times = [begin + (end - begin) * place / _RESAMPLED for place in range(_RESAMPLED + 1)]
    columns = []
    for rank, points in curves:
        known = [point.time for point in points]
        places = [bisect.bisect_right(known, moment) - 1 for moment in times]
        columns.append((rank, [points[place].value if place >= 0 else None for place in places]))
    lowest, middle, highest = [], [], []
    for place, moment in enumerate(times):
        values = [value for _, column in columns if (value := column[place]) is not None]
        if values:
            lowest.append(Point(time=moment, value=min(values)))
            middle.append(Point(time=moment, value=median(values)))
            highest.append(Point(time=moment, value=max(values)))
    return [
        Line(label=f"highest of {len(curves)} ranks", points=highest, look="b"),
        Line(label="median", points=middle, look="a"),
        Line(label="lowest", points=lowest, look="c"),
    ]


def _rates(points: Sequence[Point]) -> list[Point]:
    return [
        Point(time=after.time, value=max(0.0, after.value - before.value) / (after.time - before.time))
        for before, after in itertools.pairwise(points)
        if after.time > before.time
    ]


def _happened(happenings: Sequence[Happening], begin: float) -> str:
    if not happenings:
        return ""
    rows = [
        f"<tr><td class=n>{escape(span(one.time - begin))}</td><td>{escape(one.kind)}</td>"
        f"<td>{'' if one.rank is None else one.rank}</td><td>{escape(one.node)}</td>"
        f"<td>{escape(one.detail)}</td></tr>"
        for one in happenings[-_HAPPENINGS:]
    ]
    left = len(happenings) - len(rows)
    note = f"<p class=dim>{left} earlier ones are in the events file.</p>" if left else ""
    return (
        "<h2>What happened</h2><table><tr><th class=n>After</th><th>Event</th><th>Rank</th><th>Node</th>"
        f"<th>Detail</th></tr>{''.join(rows)}</table>{note}"
    )


def _table(record: RunRecord, beside: Path | None) -> str:
    rows = []
    for rank in record.ranks:
        life = rank.lives[-1] if rank.lives else None
        steps = f"{rank.steps[-1].value:.0f}" if rank.steps else ""
        if steps and rank.total:
            steps += f" / {rank.total}"
        memory = figure(max(point.value for point in rank.memory), "bytes") if rank.memory else ""
        took = ""
        if life is not None:
            took = span((life.ended if life.ended is not None else record.ended) - life.started)
        rows.append(
            f"<tr><td>{escape(_name(rank))}</td><td>{escape(rank.node)}</td>"
            f"<td class=n>{'' if life is None or life.pid is None else life.pid}</td>"
            f"<td>{'' if life is None else escape(_end_of(life)[1])}</td><td class=n>{took}</td>"
            f"<td class=n>{steps}</td><td class=n>{memory}</td>"
            f"<td>{_link(record, rank.rank, beside)}</td></tr>"
        )
    state = " open" if len(rows) <= _OPEN_TABLE else ""
    return (
        f"<h2>Ranks</h2><details{state}><summary>{len(rows)} processes</summary><table><tr><th>Rank</th>"
        "<th>Node</th><th class=n>Pid</th><th>End</th><th class=n>Ran</th><th class=n>Step</th>"
        f"<th class=n>Most memory</th><th>Log</th></tr>{''.join(rows)}</table></details>"
    )


def _excerpts(record: RunRecord, beside: Path | None) -> str:
    bad = [rank for rank in record.ranks if rank.lives and _end_of(rank.lives[-1])[0] == "bad"]
    parts = []
    for rank in bad[:_EXCERPTS]:
        lines = record.tail(rank.rank)
        if lines:
            link = _link(record, rank.rank, beside)
            parts.append(
                f"<div class=card><b>{escape(_name(rank))}</b> <span class=dim>{link}</span>"
                f"<pre>{escape(chr(10).join(lines))}</pre></div>"
            )
    return f"<h2>Last lines of failed ranks</h2>{''.join(parts)}" if parts else ""


def _link(record: RunRecord, rank: int, beside: Path | None) -> str:
    path = record.logs.get(rank)
    if path is None:
        return ""
    if beside is not None and path.parent.absolute() == beside.absolute():
        target = f"./{quote(path.name)}"
    else:
        target = path.absolute().as_uri()
    return f'<a href="{escape(target)}">{escape(path.name)}</a>'


def _name(rank: RankRecord) -> str:
    return "scheduler" if rank.rank < 0 else f"rank {rank.rank}"


def _npu_name(rank: RankRecord) -> str:
    return f"NPU {rank.npu}, {_name(rank)}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))
