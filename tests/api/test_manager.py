"""The awaitable API: start, wait, stop, streams, states, cancellation."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from davincirunsdk import DistributedRuntimeError, FMKManager, JobState, WorkerSpawnError, WorkerState

if TYPE_CHECKING:
    from pathlib import Path

PY = sys.executable
SLEEPER = [PY, "-c", "print('ready', flush=True); import time; time.sleep(600)"]

pytestmark = pytest.mark.usefixtures("job_folder")


async def until_ready(manager: FMKManager, count: int) -> None:
    """Wait until `count` workers have printed `ready`."""
    async for line in manager.logs():
        count -= line.text == "ready"
        if count == 0:
            return


async def test_success_gives_a_result_with_every_worker() -> None:
    """A job whose workers end well gives a result that names each with its log file."""
    async with FMKManager([PY, "-c", "print('hello')"], nproc_per_node=3) as manager:
        result = await manager.wait()
    assert (result.state, result.exit_code) == (JobState.SUCCEEDED, 0)
    assert [(w.rank, w.exit_code, w.state) for w in result.workers] == [
        (rank, 0, WorkerState.SUCCEEDED) for rank in range(3)
    ]
    assert [w.log_path.read_bytes() for w in result.workers] == [b"hello\n"] * 3
    assert manager.state == "SUCCEEDED"


async def test_failure_names_the_first_rank_and_stops_the_others() -> None:
    """The worker that failed by itself is the root cause; the others are stopped, not blamed."""
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(600)"
    with pytest.raises(DistributedRuntimeError) as caught:
        async with FMKManager([PY, "-c", code], nproc_per_node=4) as manager:
            await manager.wait()
    error = caught.value
    assert (error.root_cause.rank, error.exit_code, len(error.failures)) == (2, 7, 1)
    assert [str(w.state) for w in manager.workers] == ["STOPPED", "STOPPED", "FAILED", "STOPPED"]
    assert str(error.root_cause.log_path) in str(error)


async def test_streams_give_every_line_and_end_with_the_job() -> None:
    """A reader gets all lines in order per rank, from before it came, and then the end."""
    code = "import os\nfor i in range(200): print(os.environ['RANK'], i)"
    async with FMKManager([PY, "-c", code], nproc_per_node=2) as manager:
        lines = [line async for line in manager.logs()]
        only = [line.text async for line in manager.logs(ranks=[1])]
    assert [line.text for line in lines if line.rank == 0] == [f"0 {i}" for i in range(200)]
    assert only == [f"1 {i}" for i in range(200)]
    kinds = [event.kind async for event in manager.events()]
    assert (kinds.count("started"), kinds.count("exited"), kinds[-1]) == (2, 2, "finished")


async def test_leaving_the_block_stops_the_job() -> None:
    """What still runs is stopped when the block is left, and the state says so."""
    async with FMKManager(SLEEPER, nproc_per_node=2) as manager:
        await until_ready(manager, 2)
        assert manager.state == "RUNNING"
    assert manager.state == "STOPPED"
    assert [w.exit_code for w in manager.workers] == [-15, -15]


async def test_an_error_of_the_body_comes_out_bare() -> None:
    """The body's own error is neither wrapped nor replaced."""
    with pytest.raises(KeyError, match="body"):
        async with FMKManager(SLEEPER, nproc_per_node=2):
            raise KeyError("body")


async def test_cancelling_wait_does_not_stop_the_job() -> None:
    """Only the waiting is cancelled."""
    async with FMKManager(SLEEPER, nproc_per_node=1) as manager:
        waiting = asyncio.create_task(manager.wait())
        await until_ready(manager, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert manager.state == "RUNNING"


async def test_stop_now_does_not_wait_for_the_grace_period() -> None:
    """`stop(now=True)` ends workers that are deaf to SIGTERM."""
    deaf = [
        PY,
        "-c",
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
    ]
    async with FMKManager(deaf, nproc_per_node=2, grace_period=600) as manager:
        await until_ready(manager, 2)
        await manager.stop(now=True)
        result = await manager.wait()
    assert result.state == "STOPPED"
    assert [w.state for w in result.workers] == [WorkerState.KILLED] * 2


@pytest.mark.parametrize("ignored", [None, signal.SIGINT, signal.SIGTERM])
async def test_a_worker_that_cannot_be_started_ends_those_before_it(
    ignored: signal.Signals | None, tmp_path: Path
) -> None:
    """The error is bare, and nothing is left of workers that ran already, whatever the program ignores."""
    script = tmp_path / "no-interpreter"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    handler = None if ignored is None else signal.signal(ignored, signal.SIG_IGN)
    try:
        with pytest.raises(WorkerSpawnError, match=r"rank 0 cannot be started: .*interpreter"):
            async with FMKManager([script], nproc_per_node=8):
                pass
    finally:
        if ignored is not None:
            signal.signal(ignored, handler)


@pytest.mark.parametrize(
    ("command", "kind"),
    [("python train.py", TypeError), ([], ValueError), ([1], TypeError), ([""], ValueError)],
)
def test_a_command_without_sense_is_refused_at_once(command: object, kind: type[Exception]) -> None:
    """A bare string, an empty list and a word that is no word are told apart from a command."""
    with pytest.raises(kind, match="command"):
        FMKManager(command)  # type: ignore[arg-type] # that is the point


async def test_a_peer_that_leaves_first_is_not_the_root_cause(job_folder: Path) -> None:
    """Who raised is to blame, also when a peer noticed and was gone before it had left."""
    (job_folder / "train.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('Traceback (most recent call last):\\nValueError: boom', flush=True)\n"
        "    open('raised', 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists('raised'): time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "sys.exit('ConnectionResetError: [Errno 104] Connection reset by peer')"
    )
    with pytest.raises(DistributedRuntimeError) as caught:
        async with FMKManager([PY, "train.py"], nproc_per_node=3) as manager:
            await manager.wait()
    error = caught.value
    assert (error.root_cause.rank, error.exit_code) == (1, 1)
    assert "ValueError: boom" in str(error)
    assert str(manager.workers[1].state) == "FAILED"


async def test_a_stop_before_the_start_starts_nothing(job_folder: Path) -> None:
    """While a rank table is awaited, `stop` ends that; no worker is started then or later."""
    (job_folder / "table.json").write_text('{"status": "initializing"}')
    waiting = asyncio.Event()
    manager = FMKManager(
        ["touch", "started"],
        rank_table="table.json",
        rank_table_timeout=600,
        notify=lambda text: waiting.set(),
    )
    entering = asyncio.create_task(manager.__aenter__())
    await asyncio.wait_for(waiting.wait(), 20)
    await manager.stop()
    with pytest.raises(WorkerSpawnError, match="stopped before"):
        await entering
    assert not (job_folder / "started").exists()
