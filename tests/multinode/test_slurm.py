"""One `srun` starts one `davincirun` per node, which finds its place by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import marked_processes, wait_until
from slurm_cluster import slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slurm

WORKER = [str(Path(__file__).parent / "programs" / "worker.py")]
LAUNCH = [sys.executable, "-m", "davincirunsdk"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), 4) as conf:
        yield conf


@pytest.fixture(autouse=True)
def environment(cluster: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every command here speaks to this cluster, and finds `davincirun` where it is installed."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.chdir(tmp_path)


def run(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )


def worker_logs(folder: Path) -> str:
    """What all workers wrote, node by node."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("**/*-proc-rank-*.txt")))


def marked() -> list[str]:
    """Processes of this test that still live."""
    name = "PYTEST_OF_DAVINCIRUN"
    return [str(process) for process in marked_processes(name, os.environ[name])]


@pytest.mark.timeout(60)
def test_each_node_finds_its_place(tmp_path: Path) -> None:
    """Node rank, world size and master come from Slurm's variables, also where the node list has a gap."""
    done = run(
        "srun", "--nodelist=n[1,3-4]", "--nodes=3", "--ntasks-per-node=1", *LAUNCH, "--nproc-per-node", "2",
        *WORKER, "--seconds", "0", timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"ready rank (\d) of 6 master 127.0.0.1:(\d+) node (\d)", done.stdout)
    assert sorted((int(rank), int(node)) for rank, _, node in found) == [
        (0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2),
    ], done.stdout  # fmt: skip
    assert len({port for _, port, _ in found}) == 1


@pytest.mark.timeout(60)
def test_more_than_one_task_per_node_is_refused() -> None:
    """srun with two tasks on a node is an error that names the option, not a job with every rank twice."""
    done = run(
        "srun", "--nodes=2", "--ntasks-per-node=2", *LAUNCH, "--nproc-per-node", "2", *WORKER, timeout=50
    )
    assert done.returncode == 3, done.stderr
    assert "--ntasks-per-node=1" in done.stderr


@pytest.mark.timeout(200)
def test_the_batch_file_of_the_readme_trains(tmp_path: Path) -> None:
    """The file that README shows, unchanged, trains on two nodes and leaves the same weights on all ranks."""
    shutil.copy(Path(__file__).parent / "train.sbatch", tmp_path)
    done = run("sbatch", "--wait", "--parsable", "train.sbatch", timeout=180)
    job = done.stdout.strip()
    output = (tmp_path / f"digits-{job}.out").read_text()
    assert done.returncode == 0, output
    sums = dict(re.findall(r"rank (\d) of 4: weights checksum (\w+)", output))
    assert sorted(sums) == ["0", "1", "2", "3"], output
    assert len(set(sums.values())) == 1
    assert len(list((tmp_path / "log" / job).glob("*-proc-rank-*.txt"))) == 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kill", [0, 1])
def test_a_failure_ends_all_nodes_and_is_told_truly(tmp_path: Path, kill: int) -> None:
    """With --kill-on-bad-exit and without, all nodes stop gracefully and end with the rank's own code."""
    ready = tmp_path / "ready"
    ready.mkdir()
    done = run(
        "srun", "--nodes=3", "--ntasks-per-node=1", f"--kill-on-bad-exit={kill}", *LAUNCH,
        "--nproc-per-node", "2", *WORKER, "--fail", "3:7", "--when-ready", str(ready), timeout=50,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("failed: rank 3 is the root cause, exit code 7") == 3, done.stderr
    assert worker_logs(tmp_path).count("saved on SIGTERM") == 5, worker_logs(tmp_path)
    wait_until(lambda: not marked(), timeout=10, what="nothing left")


@pytest.mark.timeout(60)
def test_workers_that_slurm_itself_signalled_are_not_blamed() -> None:
    """Slurm signals workers and launchers alike; whichever is faster, all blame the rank that failed."""
    command = "if [ $RANK = 3 ]; then sleep 1; exit 7; fi; exec sleep 600"
    done = run(
        "srun", "--nodes=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *LAUNCH, "--nproc-per-node", "2",
        "sh", "-c", command, timeout=50,
    )  # fmt: skip
    assert re.findall(r"failed: (rank \d) is", done.stderr) == ["rank 3"] * 3, done.stderr
    assert done.returncode == 7, done.stderr


@pytest.mark.timeout(60)
def test_scancel_stops_all_nodes_gracefully(tmp_path: Path) -> None:
    """scancel's SIGTERM gives every worker time to save, and nothing is left on any node."""
    batch = "\n".join(
        [
            "#!/bin/sh",
            "#SBATCH --nodes=3",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --output=job.out",
            f"srun {' '.join(LAUNCH)} --nproc-per-node 2 {WORKER[0]}",
        ]
    )
    (tmp_path / "job.sh").write_text(batch)
    job = run("sbatch", "--parsable", "job.sh", timeout=20).stdout.strip()
    wait_until(lambda: worker_logs(tmp_path).count("ready rank") == 6, timeout=30, what="all workers ready")
    assert run("scancel", job, timeout=20).returncode == 0
    wait_until(lambda: not marked(), timeout=20, what="nothing left")
    assert worker_logs(tmp_path).count("saved on SIGTERM") == 6, worker_logs(tmp_path)
    output = (tmp_path / "job.out").read_text()
    assert output.count("stopped by SIGTERM: ") == 3, output


@pytest.mark.timeout(240)
def test_the_warning_before_the_time_limit_reaches_every_worker(tmp_path: Path) -> None:
    """--signal=USR1 asks every worker for a checkpoint and ends nobody; the limit itself stops all."""
    done = run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--time=1", "--signal=USR1@55", *LAUNCH,
        "--nproc-per-node", "2", *WORKER, timeout=200,
    )  # fmt: skip
    logs = [path.read_text() for path in sorted(tmp_path.glob("log/*-proc-rank-*.txt"))]
    assert len(logs) == 4, done.stderr
    for log in logs:
        assert 0 < log.find("saved on SIGUSR1") < log.find("saved on SIGTERM"), log
    assert "DUE TO TIME LIMIT" in done.stderr, done.stderr
    assert done.returncode != 0
    wait_until(lambda: not marked(), timeout=20, what="nothing left")
