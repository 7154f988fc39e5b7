"""What callers give: refused in words, or taken as it is meant."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from davincirunsdk import (
    DistributedRuntimeError,
    FMKManager,
    start_and_wait_distributed_train,
    wait_distributed_train,
)

PY = sys.executable
COMMAND = [PY, "-m", "davincirunsdk", "--log-dir", "log"]
PIDS = Path("/sys/fs/cgroup/pids")

pytestmark = pytest.mark.usefixtures("job_folder")


@pytest.mark.parametrize("code", [0, 3])
def test_a_finished_job_can_be_waited_for_when_its_loop_is_closed(code: int) -> None:
    """A blocking wait gives the outcome of a job that ended in a loop of the past, as often as asked."""

    async def run() -> FMKManager:
        async with FMKManager(["sh", "-c", f"exit {code}"], nproc_per_node=2) as job:
            while not job._is_over:
                await asyncio.sleep(0.01)
        return job

    job = asyncio.run(run())
    for _ in range(2):
        assert wait_distributed_train(job, raise_exception=False) == min(code, 1)
    if code:
        with pytest.raises(DistributedRuntimeError):
            wait_distributed_train(job, destroy_when_finished=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"command": None}, "command is None: expected a list of words"),
        ({"command": 5}, "command is 5: expected a list of words"),
        ({"command": b"train"}, "expected a list of words"),
        ({"command": ["a", b"b"]}, "expected strings or path-likes"),
        ({"grace_period": "5"}, "grace_period is '5': expected seconds"),
        ({"grace_period": float("nan")}, "grace_period is nan: expected seconds"),
        ({"rank_table_timeout": "x"}, "rank_table_timeout is 'x': expected seconds"),
        ({"rank_table_timeout": -1}, "rank_table_timeout is -1: expected seconds"),
        ({"env": "A=secret"}, "env is a str: expected a mapping"),
        ({"env": ["A=secret"]}, "env is a list: expected a mapping"),
        ({"env": {"A": None}}, "env holds 'A' with a NoneType: expected strings"),
        ({"env": {"A": ["secret"]}}, "env holds 'A' with a list: expected strings"),
        ({"env": {"A": "secret\0"}}, "env holds 'A'"),
        ({"env": {7: "secret"}}, "env holds 7 with a str: expected strings"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_in_words(arguments: dict[str, object], said: str) -> None:
    """At once, with what was found and what is expected, and never with a variable's value."""
    with pytest.raises((TypeError, ValueError)) as caught:
        FMKManager(**{"command": ["true"], **arguments})  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_inside_a_worker_the_callers_address_counts(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job inside a job takes no address from the outer one, but the one that its caller gives it."""
    for name, value in {"DAVINCIRUN_JOB": "outer", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    command = ["sh", "-c", 'echo "$MASTER_ADDR $MASTER_PORT" > told']
    assert start_and_wait_distributed_train(command, nproc_per_node=1) == 0
    assert "10.0.0.1" not in (job_folder / "told").read_text()
    given = {"MASTER_ADDR": "127.0.0.9", "MASTER_PORT": "29777"}
    assert start_and_wait_distributed_train(command, nproc_per_node=1, env=given) == 0
    assert (job_folder / "told").read_text() == "127.0.0.9 29777\n"


def test_a_removed_current_folder_is_said_to_be_removed(job_folder: Path) -> None:
    """One sentence and exit code 3; with absolute paths there is nothing to complain of."""
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    words = ["sh", "-c", script, "sh", PY, "-m", "davincirunsdk", "--nproc-per-node", "1"]
    for command in (["true"], ["train.py"]):
        found = subprocess.run([*words, *command], capture_output=True, text=True, timeout=30, check=False)
        assert found.returncode == 3
        assert "does not exist any more" in found.stderr
        assert len(found.stderr.splitlines()) == 1
    absolute = ["--log-dir", str(job_folder / "log"), "--work-dir", str(job_folder), "true"]
    assert subprocess.run([*words, *absolute], timeout=30, check=False).returncode == 0
