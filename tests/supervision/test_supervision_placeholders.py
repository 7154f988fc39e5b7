"""Words that differ from worker to worker: folders, variables and, where asked for, the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from davincirunsdk import FMKManager, WorkerSpawnError
from davincirunsdk.supervision.placeholders import NAMES, differs, fill

if TYPE_CHECKING:
    from pathlib import Path

PY = sys.executable
VALUES = dict(zip(NAMES, range(10, 10 + len(NAMES)), strict=True))
pytestmark = pytest.mark.usefixtures("job_folder")

SHOW = """
import json, os, sys
told = {"args": sys.argv[1:], "cwd": os.getcwd(), "x": os.environ.get("X"), "y": os.environ.get("Y")}
print(json.dumps(told), flush=True)
"""

PIECES = "{ } {{ }} rank {rank} {device} !r :>9 .__class__ $(id) %d".split()
pieces = st.lists(st.sampled_from(PIECES))


@given(pieces.map("".join))
@example("{{rank}}")
@example("{rank!r}{rank:>9}{rank.__class__}{}{0}{RANK}{ rank }{rank")
def test_only_what_is_known_is_filled_in(text: str) -> None:
    """Each whole placeholder becomes a number, once; all other text is there, byte for byte."""
    parts = re.split(f"({'|'.join(re.escape(f'{{{name}}}') for name in NAMES)})", text)
    expected = "".join(str(VALUES[part[1:-1]]) if number % 2 else part for number, part in enumerate(parts))
    assert fill(text, VALUES) == expected
    assert differs(text) is (len(parts) > 1)


def told(folder: Path) -> list[dict[str, object]]:
    """Read what the workers have printed, in rank order."""
    logs = sorted(folder.glob("log/*-proc-rank-*.txt"))
    return [json.loads(log.read_text()) for log in logs]


@pytest.mark.parametrize("expand", [True, False])
def test_the_command_fills_in(job_folder: Path, expand: bool) -> None:
    """Folders are made for each worker; words of the command change with --expand only."""
    script = job_folder / "show.py"
    script.write_text(SHOW)
    words = [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", "--work-dir", "device{device}/{attempt}"]
    words += ["--env", "X={rank}/{local_rank}/{node_rank}", "--env", "Y={unknown}{", *["--expand"] * expand]
    done = subprocess.run(
        [*words, str(script), "--local_rank={local_rank}", "{}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank, one in enumerate(told(job_folder)):
        assert one == {
            "args": [f"--local_rank={rank}" if expand else "--local_rank={local_rank}", "{}"],
            "cwd": str(job_folder / f"device{rank}" / "0"),
            "x": f"{rank}/{rank}/0",
            "y": "{unknown}{",
        }


async def test_a_restart_has_numbers_of_its_own(job_folder: Path) -> None:
    """`{attempt}` counts, and its folder is made before the restart."""
    source = "import os, sys; sys.exit(os.environ['X'] == '0')"

    words = [PY, "-c", source]
    env = {"X": "{attempt}"}
    manager = FMKManager(words, "try{attempt}", nproc_per_node=1, env=env, max_restarts=1, restart_delay=0)
    async with manager:
        await manager.wait()
    assert sorted(path.name for path in job_folder.glob("try*")) == ["try0", "try1"]


async def test_a_script_of_one_rank_that_is_not_there(job_folder: Path) -> None:
    """Every worker's own command is looked at before any is started."""
    (job_folder / "train0.py").write_text("open('ran', 'w')")
    with pytest.raises(WorkerSpawnError, match=r"train1\.py"):
        await FMKManager([PY, "train{rank}.py"], nproc_per_node=2, expand=True).__aenter__()
    assert not (job_folder / "ran").exists()
