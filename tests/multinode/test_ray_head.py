"""The head of a real Ray cluster is lost: workers save, and what is known is said before Ray ends all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import wait_until
from ray_nodes import RayCluster, ray_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

RAY_PATIENCE = 28.0
"""Seconds after which Ray ends agents and driver here; 60 by default."""

GRACE = 3.0
SAVING = (
    "import os, signal, sys, time\n"
    "def save(*_):\n"
    "    time.sleep(1.5)\n"
    "    os.write(1, f'saved {time.time()}\\n'.encode())\n"
    "    os._exit(0)\n"
    "signal.signal(15, save)\n"
    "os.write(1, b'ready\\n')\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    with ray_cluster(2, RAY_gcs_rpc_server_reconnect_timeout_s=f"{RAY_PATIENCE:g}") as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        yield made


def start() -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "davincirunsdk", "--engine", "ray", "--nnodes", "2"]
    launch += ["--nproc-per-node", "2", "--grace-period", f"{GRACE:g}", "--report", "report.json"]
    return subprocess.Popen(
        [*launch, sys.executable, "-c", SAVING],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def logs() -> str:
    return "\n".join(path.read_text() for path in sorted(Path("log").glob("*-proc-rank-*.txt")))


def test_a_lost_head_leaves_time_to_save_and_to_tell(cluster: RayCluster) -> None:
    """All workers end within their grace period; report, last event and exit code come before Ray's end."""
    with start() as process:
        try:
            wait_until(lambda: logs().count("ready") == 4, timeout=60, what="all workers ready")
            began = time.time()
            os.kill(cluster.head, signal.SIGKILL)
            _, stderr = process.communicate(timeout=60)
            ended = time.time() - began
        finally:
            process.kill()
    saved = [float(moment) - began for moment in re.findall(r"saved ([\d.]+)", logs())]
    assert len(saved) == 4, stderr
    assert process.returncode == 1, stderr
    assert "the cluster was lost" in stderr, stderr
    assert "cannot be reached" in stderr, stderr
    assert "look at that host" in stderr, stderr
    assert max(*saved, ended) < RAY_PATIENCE, (saved, ended)
    report = json.loads(Path("report.json").read_text())
    assert (report["verdict"], report["exit_code"]) == ("node_lost", 1)
    assert report["stopped_ranks"] == [0, 1, 2, 3]
    (events,) = Path("log").glob("*-nodes-events.jsonl")
    assert json.loads(events.read_text().splitlines()[-1])["kind"] == "finished"
    wait_until(lambda: not cluster.agents(), timeout=5, what="no agent is left")
    assert not cluster.job_processes()


def test_ctrl_c_after_the_head_was_lost_returns_soon(cluster: RayCluster) -> None:
    """Nothing waits for the head: the workers save, and the command is back when they have."""
    with start() as process:
        try:
            wait_until(lambda: logs().count("ready") == 4, timeout=60, what="all workers ready")
            os.kill(cluster.head, signal.SIGKILL)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
            took = time.monotonic() - began
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    assert logs().count("saved") == 4
    assert took < 1.5 + 8, stderr
    wait_until(lambda: not cluster.agents(), timeout=5, what="no agent is left")
