"""The benchmarks' record: what CI compares with, and what a run leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from typing import Any

LAUNCHERS = Path(__file__).parents[2] / "benchmarks" / "launchers.py"
TITLES = ("8 trivial workers, start to end", "8 workers: one dies until the command has ended")


def run_launchers(*options: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, LAUNCHERS, "--repetitions", "1", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def prepared(ours: float) -> dict[str, Any]:
    values = {"davincirun": {"median": ours}, "asyncio + click": {"median": 1.0}}
    return {"figures": [{"title": title, "values": values} for title in TITLES]}


@pytest.mark.parametrize(("ours", "code"), [(1e6, 0), (1e-6, 1)], ids=["faster than recorded", "slower"])
def test_a_quick_run_fails_when_figures_are_worse_than_recorded(
    ours: float, code: int, tmp_path: Path
) -> None:
    kept = tmp_path / "record.json"
    kept.write_text(json.dumps(prepared(ours)))
    done = run_launchers("--quick", "--record", kept)
    assert done.returncode == code, done.stdout + done.stderr
    for title in TITLES:
        assert (f"WORSE: {title}" in done.stdout) == bool(code)


def test_a_run_leaves_a_record_that_a_quick_run_knows(tmp_path: Path) -> None:
    """Every launcher is in it or named as missing; the table and the picture hold its figures."""
    kept = tmp_path / "record.json"
    peers = ("--torchrun", "", "--msrun", "no-such-msrun", "--mpirun", "")
    done = run_launchers("--sizes", "8", "--keep", "--record", kept, *peers)
    assert kept.exists(), done.stdout + done.stderr
    found = json.loads(kept.read_text())
    assert list(found["versions"]) == ["davincirun", "asyncio + click", "spawn loop"]
    assert [line.partition(" ")[0] for line in found["missing"]] == ["0.1.5", "torchrun", "msrun", "mpirun"]
    titles = {figure["title"] for figure in found["figures"]}
    assert titles >= set(TITLES)
    table = kept.with_suffix(".md").read_text()
    assert all(title in table for title in titles)
    picture = ET.parse(kept.with_suffix(".svg")).getroot()
    drawn = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(TITLES) <= drawn
