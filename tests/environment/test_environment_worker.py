"""The variables of a worker, by real workers that print theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINT = "import json, os; print(json.dumps(dict(os.environ)))"
STALE = {
    **dict.fromkeys(
        (
            "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE",
            "SLURM_NTASKS_PER_NODE", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_RDZV_BACKEND", "RANK",
            "DAVINCIRUN_ECHO", "DAVINCIRUN_ANYTHING", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK",
            "TORCHELASTIC_USE_AGENT_STORE", "MS_ROLE", "MS_NODE_RANK", "RANK_START", "ROLE_OTHER",
        ),
        "77",
    ),
    "DAVINCIRUN_ECHO": "all",
}  # fmt: skip
KEPT = {
    "SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "x", "SLURM_SUBMIT_DIR": "/", "SLURM_CPUS_PER_TASK": "2",
    "HCCL_BUFFSIZE": "100", "MASTER_PORT": "23456", "PYTHONFAULTHANDLER": "0", "OMP_NUM_THREADS": "3",
}  # fmt: skip


JOB = {"BATCH_JOB_ID": "j"}


def workers(folder: Path, *options: str, env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Run a job and return the environments of its processes by the names of their log files."""
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in (*STALE, *KEPT)}
    done = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", "--log-dir", "log", *options, sys.executable, "-c", PRINT],
        cwd=folder,
        env={**clean, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path.name: json.loads(path.read_text()) for path in (folder / "log").glob("*.txt")}


@pytest.mark.timeout(120)
def test_what_torch_expects(tmp_path: Path) -> None:
    """A worker has every name that torchrun gives, with its values."""
    found = workers(tmp_path, "--nproc-per-node", "2", env={"BATCH_JOB_ID": "run"})
    worker = found["run-proc-rank-1-device-1.txt"]
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "DAVINCIRUN_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "DEVICE_ID": "1",
        "ASCEND_DEVICE_ID": "1", "RANK_ID": "1", "RANK_SIZE": "2", "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2))
        ),
    }  # fmt: skip
    assert {name: worker.get(name) for name in expected} == expected
    assert worker["MASTER_PORT"].isdigit()
    assert worker["DAVINCIRUN_JOB"]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in worker
    error_file = Path(worker["TORCHELASTIC_ERROR_FILE"])
    assert error_file.parent == tmp_path / "log"
    assert not error_file.exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", ["auto", "mindspore", "torch", "none"])
def test_what_an_outer_launcher_left(tmp_path: Path, framework: str) -> None:
    """Names of an outer launcher are gone, the user's own stay."""
    found = workers(tmp_path, "--nproc-per-node", "2", "--framework", framework, env={**STALE, **KEPT})
    for name, environment in found.items():
        left = {key: value for key, value in environment.items() if key in STALE and value == "77"}
        assert not left, name
        kept = {key: environment.get(key) for key in KEPT}
        assert kept == KEPT, name
        assert [key for key in environment if key.startswith("PET_")] == []
        ours = {key for key in environment if key.startswith("DAVINCIRUN_")}
        assert ours - {"DAVINCIRUN_PROGRESS"} == {"DAVINCIRUN_JOB", "DAVINCIRUN_RESTART_COUNT"}, name


@pytest.mark.timeout(120)
def test_each_framework_gets_its_names(tmp_path: Path) -> None:
    """`auto` gives the Ascend and torch names, `mindspore` those of its cluster and no torchelastic ones."""
    auto = workers(tmp_path / "a", "--nproc-per-node", "1", env=JOB)["j-proc-rank-0-device-0.txt"]
    assert "MS_ROLE" not in auto
    assert "OMP_NUM_THREADS" not in auto or "OMP_NUM_THREADS" in os.environ
    found = workers(tmp_path / "m", "--nproc-per-node", "2", "--framework", "mindspore", env=JOB)
    worker, scheduler = found["j-proc-rank-1-device-1.txt"], found["j-scheduler.txt"]
    assert worker["MS_ROLE"] == "MS_WORKER"
    assert worker["MS_NODE_ID"] == "1"
    assert (scheduler["MS_ROLE"], scheduler["MS_WORKER_NUM"]) == ("MS_SCHED", "2")
    assert scheduler["MS_SCHED_PORT"] == worker["MS_SCHED_PORT"]
    assert "RANK" not in scheduler
    assert scheduler["DAVINCIRUN_JOB"] == worker["DAVINCIRUN_JOB"]
    assert "TORCHELASTIC_RUN_ID" not in worker
    none = workers(tmp_path / "n", "--nproc-per-node", "1", "--framework", "none", env=JOB)
    assert "RANK" not in none["j-proc-rank-0-device-0.txt"]


@pytest.mark.timeout(120)
def test_a_job_id_that_points_elsewhere(tmp_path: Path) -> None:
    """A platform's job id with a path in it stays a name: in log files and in folders for CANN's logs."""
    found = workers(tmp_path, "--nproc-per-node", "1", env={"BATCH_JOB_ID": "../../up"})
    assert [name.partition("-proc-")[0] for name in found] == ["_._.._up"]
