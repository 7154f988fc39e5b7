"""`davincirunctl doctor --where` says which source gives what, and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from platform_host import make_root

if TYPE_CHECKING:
    from pathlib import Path

WHERE = [sys.executable, "-c", "from davincirunsdk.ctl.main import main; main()", "doctor", "--where"]


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Ask on a host with these variables."""
    return subprocess.run(
        [*WHERE, *options],
        env={**{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_where_we_are(tmp_path: Path) -> None:
    """Each source is a line, then what a job here would be."""
    root = make_root(tmp_path, [0, 1])
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "192.0.2.1", "PET_MASTER_PORT": "2222"}
    done = run("--root", str(root), **pod)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["platform: pet", "rank table: none"]
    assert "node rank: 1, from Kubeflow (PET_NODE_RANK)" in lines
    assert "a job here: node 1 of 2, 4 workers in all" in lines
    assert "on this node: rank 2 on device 0, rank 3 on device 1" in lines
    assert "workers meet at 192.0.2.1, port 2222" in lines


def test_a_problem(tmp_path: Path) -> None:
    """What keeps a job from being started is told with the facts, and is exit code 3."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}
    done = run("--root", str(make_root(tmp_path)), **batch)
    assert done.returncode == 3
    assert "number of nodes: 2, from Slurm (SLURM_NNODES)" in done.stdout
    assert "write srun --ntasks-per-node=1" in done.stdout


def test_as_data(tmp_path: Path) -> None:
    """With --json it is one object."""
    done = run("--root", str(make_root(tmp_path, [4, 5])), "--json")
    found = json.loads(done.stdout)
    assert (found["platform"], found["node_rank"], found["world_size"]) == ("host", 0, 2)
    assert found["devices"][1] == {"rank": 1, "local_rank": 1, "npu": 5}
    assert found["problem"] is None
