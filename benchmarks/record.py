"""What a run of the launchers has measured, to keep and to compare with: JSON, a table, a picture."""

from __future__ import annotations

import math
import re
from statistics import median
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from peers import FLOOR, OURS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from measure import Figure

WORSE = 1.5
"""What a figure may have become, in multiples of what was recorded, both beside the floor of the same run."""

Record = dict[str, Any]


def record(when: str, versions: dict[str, str], missing: Sequence[str], figures: Sequence[Figure]) -> Record:
    """Make the record of a run; what never came, such as a SIGTERM that nobody sent, is null."""
    return {
        "machine": when,
        "versions": versions,
        "missing": list(missing),
        "figures": [
            {
                "title": figure.title,
                "unit": figure.unit,
                "target": figure.bound(),
                "reached": figure.reached(),
                "values": {
                    name: {
                        "median": _finite(median(values)),
                        "least": _finite(min(values)),
                        "most": _finite(max(values)),
                        "number": len(values),
                    }
                    for name, values in figure.values.items()
                },
            }
            for figure in figures
        ],
    }


def _finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def markdown(kept: Record) -> str:
    """Make a table of the medians, one column per launcher."""
    names = list(kept["versions"])
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    lines = [
        f"{kept['machine']}. {versions}. Medians (smallest to largest).",
        *(["", f"Missing: {'; '.join(kept['missing'])}."] if kept["missing"] else []),
        "",
        f"| | target | {' | '.join(names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for figure in kept["figures"]:
        cells = [_cell(figure["values"].get(name), figure["unit"]) for name in names]
        target = figure["target"] + ("" if figure["reached"] else " (missed)")
        lines.append(f"| {figure['title']} | {target} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, float | None] | None, unit: str) -> str:
    if found is None:
        return ""
    if found["median"] is None:
        return "never"
    return f"{_short(found['median'])} {unit} ({_short(found['least'])} to {_short(found['most'])})"


def _short(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def into_table(kept: Record, text: str, workers: int) -> str:
    """Write the medians into the first table of a README; who was not measured keeps its cell."""
    rows = (
        f"{workers} workers: one dies until a sibling gets SIGTERM",
        f"{workers} workers: one dies until the command has ended",
        f"{workers} workers: launch until the last one's first line is shown",
        f"{workers} workers: left after SIGKILL of the launcher",
    )
    figures = {figure["title"]: figure for figure in kept["figures"]}
    every, never = ("全部", "从不") if "全部" in text else ("all", "never")
    lines = text.split("\n")
    head = next(number for number, line in enumerate(lines) if "| davincirun | 0.1.5 |" in line)
    columns = [cell.strip() for cell in lines[head].split("|")]
    for number, title in enumerate(rows, head + 2):
        cells = lines[number].split("|")
        for place, column in enumerate(columns):
            figure = figures.get(title, {"values": {}})
            if (found := figure["values"].get(column)) is None:
                continue
            if (value := found["median"]) is None:
                cells[place] = f" {never} "
            elif figure["unit"] == "workers":
                cells[place] = f" {every if value == workers else f'{value:g}'} "
            else:
                cells[place] = f" {_short(value)} {figure['unit']} "
        lines[number] = "|".join(cells)
    told = next(number for number in range(head, len(lines)) if "benchmarks/README.md" in lines[number])
    lines[told] = re.sub(r"\d+\.\d+\.\d+", kept["versions"][OURS], lines[told])
    lines[told] = re.sub(r"\d{4}-\d\d-\d\d", kept["machine"].partition(" ")[0], lines[told])
    return "\n".join(lines)


def worse(kept: Record, now: Sequence[Figure]) -> list[str]:
    """Compare a run with a record: each of our figures beside the floor's of the same run.

    Returns:
        What has become worse than it may, in words.
    """
    before = {figure["title"]: figure["values"] for figure in kept["figures"]}
    found = []
    for figure in now:
        values = before.get(figure.title, {})
        if not {OURS, FLOOR} <= values.keys() or not {OURS, FLOOR} <= figure.values.keys():
            continue
        old = values[OURS]["median"] / values[FLOOR]["median"]
        new = figure.median(OURS) / figure.median(FLOOR)
        print(f"{figure.title}: {new:.2f} x {FLOOR}, recorded {old:.2f} x")
        if new > WORSE * old:
            found.append(
                f"{figure.title}: {new:.2f} x {FLOOR}, recorded {old:.2f} x, allowed {WORSE:g} x of that"
            )
    return found


_WIDTH, _LEFT, _RIGHT, _ROW = 760, 130, 90, 20
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-weight: 600; } .quiet { fill: #57606a; }
.ours { fill: #1a7f5a; } .other { fill: #9aa4af; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .quiet { fill: #9198a1; } .ours { fill: #3fb68b; } .other { fill: #59636e; }
}
"""


def chart(kept: Record, titles: Sequence[str]) -> str:
    """Draw bars, one panel per figure; a bar too long for its panel is cut and says its number."""
    parts: list[str] = []
    top = 10
    for figure in kept["figures"]:
        if figure["title"] not in titles:
            continue
        parts.append(f'<text class="title" x="0" y="{top + 14}">{escape(figure["title"])}</text>')
        top += 22
        values = {name: found["median"] for name, found in figure["values"].items()}
        # Some are a hundred times slower: the panel's scale is what tells the others apart.
        scale = min(max(filter(None, values.values())), 6 * (values[OURS] or math.inf))
        for name, value in values.items():
            length = 0.0 if value is None else min(value / scale, 1.0) * (_WIDTH - _LEFT - _RIGHT)
            cut = " ›" if value is not None and value > scale else ""
            says = "never" if value is None else f"{_short(value)} {figure['unit']}{cut}"
            kind = "ours" if name == OURS else "other"
            parts += [
                f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{top + 3}" width="{length:.0f}" height="{_ROW - 6}"/>',
                f'<text class="quiet" x="{_LEFT + length + 6:.0f}" y="{top + 14}">{says}</text>',
            ]
            top += _ROW
        top += 12
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items() if name != FLOOR)
    for line in (f"{kept['machine']}. Medians, smaller is better.", versions):
        parts.append(f'<text class="quiet" x="0" y="{top + 12}">{escape(line)}</text>')
        top += 18
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 6}" width="{_WIDTH}" '
        f'role="img" aria-label="Launchers compared"><style>{_STYLE}</style>\n{inside}\n</svg>\n'
    )
