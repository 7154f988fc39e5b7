"""The benchmark's figures get into both READMEs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).parents[2]
WRITE = """
import sys
from pathlib import Path
from launchers import Launchers
from record import into_table, record
measured = Launchers([], 8)
measured.told.add("davincirun", 3.21)
measured.told.add("msrun", float("inf"))
measured.returned.add("0.1.5", 4321.0)
measured.left.add("davincirun", 0)
measured.left.add("torchrun", 8)
measured.left.add("mpirun", 3)
kept = record("2031-02-03 04:05, a machine", {"davincirun": "9.8.7"}, [], measured.figures())
for path in Path(sys.argv[1]).glob("README*"):
    path.write_text(into_table(kept, path.read_text(), 8))
"""


def test_figures_are_written_in_their_places(tmp_path: Path) -> None:
    """Launchers that took no part keep their cells; version and date are those of the measurement."""
    for name, everyone, never in (("README.md", "all", "never"), ("README.zh-CN.md", "全部", "从不")):
        for each in ("README.md", "README.zh-CN.md"):
            shutil.copy(HOUSE / each, tmp_path)
        words = [sys.executable, "-c", WRITE, str(tmp_path)]
        subprocess.run(words, check=True, timeout=60, cwd=HOUSE / "benchmarks")
        rows = [
            [
                [cell.strip() for cell in line.split("|")]
                for line in text.splitlines()
                if line.startswith("|")
            ][:7]
            for text in ((HOUSE / name).read_text(), (tmp_path / name).read_text())
        ]
        assert rows[0][0][2:] == ["davincirun", "0.1.5", "torchrun", "msrun", "mpirun", ""]
        expected = rows[0]
        expected[2][2], expected[2][5] = "3.21 ms", never
        expected[3][3] = "4321 ms"
        expected[5][2], expected[5][4], expected[5][6] = "0", everyone, "3"
        assert rows[1] == expected
        line = re.search(r"^.*benchmarks/README.md.*$", (tmp_path / name).read_text(), re.MULTILINE)
        assert line is not None
        assert "9.8.7" in line[0]
        assert "2031-02-03" in line[0]
