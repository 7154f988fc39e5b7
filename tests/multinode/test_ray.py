"""One command, or one call, starts the workers of all nodes of a real Ray cluster, and ends them all."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import is_alive, wait_until
from ray_nodes import PROGRAMS, RayCluster, ray_cluster

from davincirunsdk.background import COUNTS_AFTER

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

WORKER = str(PROGRAMS / "worker.py")
NODES = 4
SOON = 6.0
"""Seconds: half of what Ray alone needs to tell that a raylet was killed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(NODES) as made:
        yield made


@pytest.fixture(autouse=True)
def in_folder(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs run in a folder of the test's own; after each test no process of a job and no agent is left."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield
    # A killed agent leaves its workers' children the grace period, and its guardian 3 s after it.
    wait_until(lambda: not cluster.job_processes(), timeout=15 + 3 + 7, what="no worker is left on any node")
    wait_until(lambda: not cluster.agents(), timeout=15, what="no agent is left on any node")
    while sum(is_alive(raylet) for raylet in cluster.raylets) < NODES:
        cluster.add_node()


def words(*command: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command line of a job over all nodes, two workers each."""
    launch = [sys.executable, "-m", "davincirunsdk", "--engine", "ray", "--nnodes", str(NODES)]
    return [*launch, "--nproc-per-node", "2", *options, *command]


@contextlib.contextmanager
def job(*arguments: str, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A job of workers that wait, entered when all of them are ready."""
    with subprocess.Popen(
        words(WORKER, *arguments, options=options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: logs().count("ready rank") == 2 * NODES, timeout=60, what="all workers ready")
            yield process
        finally:
            process.kill()


def logs() -> str:
    """What the workers wrote, all of them."""
    return "\n".join(path.read_text() for path in sorted(Path("log").glob("*-proc-rank-*.txt")))


def saved_after(moment: float) -> list[float]:
    """Seconds from a moment to each worker's SIGTERM; the nodes share this machine's clock."""
    return sorted(float(stamp) - moment for stamp in re.findall(r"saved on SIGTERM ([\d.]+)", logs()))


def wait_until_a_further_signal_counts() -> None:
    """Let the second pass within which a further signal is taken for the same wish, delivered twice."""
    counted = time.monotonic()
    wait_until(lambda: time.monotonic() - counted > COUNTS_AFTER + 0.2)


def drive(way: str, *arguments: str) -> dict[str, object]:
    """Use the engine from Python; see programs/ray_driver.py."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "ray_driver.py"), way, str(NODES), "log", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_torch_trains_over_all_nodes() -> None:
    """Eight ranks of torch with gloo on four nodes end with the same weights; lines name node and rank."""
    done = subprocess.run(
        words("-m", "davincirunsdk.demo", "--backend", "torch", options=("--framework", "torch")),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^\[node (\d) rank (\d)\] rank \2 of 8: weights checksum (\w+)", done.stdout, re.MULTILINE
    )
    assert sorted((int(node), int(rank)) for node, rank, _ in found) == [
        (rank // 2, rank) for rank in range(8)
    ]
    assert len({checksum for *_, checksum in found}) == 1, done.stdout


def test_a_failure_ends_all_nodes(tmp_path: Path) -> None:
    """The failed rank's own code and a report over all nodes; the workers of all others were asked to end."""
    ready = tmp_path / "ready"
    ready.mkdir()
    done = subprocess.run(
        words(WORKER, "--fail", "5:7", "--when-ready", str(ready)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "rank 5 is the root cause, exit code 7" in done.stderr
    assert "(node rank 2)" in done.stderr
    assert "7 stopped by us in time" in done.stderr
    assert "clocks:" in done.stderr
    failed = float(re.findall(r"failing ([\d.]+)", logs())[0])
    assert len(saved_after(failed)) == 7
    assert saved_after(failed)[-1] < SOON


def test_a_command_that_is_not_there_starts_nothing() -> None:
    """An unknown command ends with 127 and says on which node; nothing ran anywhere."""
    done = subprocess.run(words("no-such-command"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127, done.stderr
    assert re.search(r"error: node \d .*: command not found: 'no-such-command'", done.stderr), done.stderr
    assert not logs()


def test_a_killed_raylet_ends_all_nodes(cluster: RayCluster) -> None:
    """The lost node's workers hear from their agent, all others from the driver, long before Ray knows."""
    with job() as process:
        victim = next(iter(cluster.agents()))
        began = time.time()
        psutil.Process(victim).kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "is the root cause, lost" in stderr, stderr
    assert "its raylet has died" in stderr, stderr
    assert len(saved_after(began)) == 2 * NODES, logs()
    assert saved_after(began)[-1] < SOON


def test_a_node_that_goes_without_a_word_ends_all_others(cluster: RayCluster) -> None:
    """When raylet and agent are gone at once, the driver ends the other nodes as soon as Ray knows."""
    with job("--grandchild") as process:
        victim, agent = cluster.agents().popitem()
        began = time.time()
        psutil.Process(victim).suspend()
        agent.kill()
        psutil.Process(victim).kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "is the root cause, lost" in stderr, stderr
    # What the lost node's two workers say is kept by its guardian.
    assert len(saved_after(began)) == 2 * NODES, logs()


def test_a_killed_agent_ends_all_nodes(cluster: RayCluster) -> None:
    """An agent's death is a lost node; its workers are ended by its guardian, grandchildren too."""
    with job("--grandchild") as process:
        began = time.time()
        next(iter(cluster.agents().values())).kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "is the root cause, lost" in stderr, stderr
    assert len(saved_after(began)) == 2 * NODES, logs()
    assert saved_after(began)[-1] < SOON


def test_nothing_outlives_a_killed_driver(cluster: RayCluster) -> None:
    """SIGKILL of the driver ends every worker of every node, those deaf to SIGTERM and their children too."""
    with job("--deaf", "--grandchild", options=("--grace-period", "3")) as process:
        assert len(cluster.job_processes()) == 4 * NODES
        process.kill()
        process.communicate()
        wait_until(lambda: not cluster.job_processes(), timeout=15, what="all gone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_driver_stops_all_nodes(number: signal.Signals, code: int) -> None:
    """Ctrl-C and SIGTERM give all workers of all nodes their SIGTERM; exit code and words are ours."""
    with job() as process:
        began = time.time()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert len(saved_after(began)) == 2 * NODES
    assert saved_after(began)[-1] < SOON
    assert f"ranks 0-{2 * NODES - 1} ended in time\n" in stderr
    assert all(line.startswith("davincirun: ") for line in stderr.splitlines()), stderr


def test_a_second_signal_kills_at_once() -> None:
    """Workers deaf to SIGTERM do not hold a second Ctrl-C for the grace period."""
    with job("--deaf", options=("--grace-period", "600")) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "SIGINT: stopping" not in process.stderr.readline():
            pass
        wait_until_a_further_signal_counts()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_usr1_reaches_every_worker() -> None:
    """A batch system's request for a checkpoint is passed on to all nodes."""
    with job() as process:
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: logs().count("saved on SIGUSR1") == 2 * NODES, what="all have saved")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_the_blocking_twin_works_inside_a_running_loop() -> None:
    """`run_blocking` gives the result of CPU workers, in a thread whose loop runs as a notebook's does."""
    assert drive("blocking", "--seconds", "0") == {"state": "SUCCEEDED", "ranks": list(range(8))}


def test_the_blocking_twin_raises_the_failure() -> None:
    """The error is the same as on one node: root cause, exit code, report."""
    told = drive("blocking", "--fail", "6:3")
    assert (told["exit_code"], told["root"]) == (3, 6)
    assert "rank 6 is the root cause" in str(told["report"])


def test_cancelling_stops_all_nodes() -> None:
    """A cancelled `run` lets the cancellation through when all workers were stopped."""
    assert drive("cancel")["cancelled"] is True
    assert logs().count("saved on SIGTERM") == 2 * NODES


def test_cancelling_works_at_every_stage_of_the_start() -> None:
    """However far the start has got, a cancellation comes through soon; the next job finds all nodes free."""
    seconds = drive("stages")["seconds"]
    assert isinstance(seconds, list)
    assert len(seconds) == 7
    assert max(seconds) < SOON


def test_two_jobs_of_one_program_do_not_part_each_other_from_the_cluster() -> None:
    """The end of one job leaves the other's connection alone, and the program can go on to a third."""
    assert drive("two")["states"] == ["SUCCEEDED"] * 3


def test_a_job_may_be_run_inside_of_the_cluster() -> None:
    """A task may run a job to its end, and an asynchronous actor may await one."""
    assert drive("inside", "--seconds", "0")["states"] == ["SUCCEEDED"] * 2


def test_sigterm_ends_the_blocking_twin_s_workers_first() -> None:
    """The program ends by the signal, as without a job, when the workers of all nodes have had theirs."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "ray_driver.py"), "patient", str(NODES), "log"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: logs().count("ready rank") == 2 * NODES, timeout=60, what="all workers ready")
            process.terminate()
            assert process.wait(timeout=30) == -signal.SIGTERM
        finally:
            process.kill()
    assert logs().count("saved on SIGTERM") == 2 * NODES


def test_a_second_interrupt_ends_the_blocking_twin_at_once() -> None:
    """Ctrl-C twice does not wait for workers deaf to SIGTERM; nothing of them is left."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "ray_driver.py"), "patient", str(NODES), "log", "--deaf"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: logs().count("ready rank") == 2 * NODES, timeout=60, what="all workers ready")
            (events,) = Path("log").glob("*-nodes-events.jsonl")
            process.send_signal(signal.SIGINT)
            wait_until(lambda: '"stopping"' in events.read_text(), timeout=15, what="the stop has begun")
            wait_until_a_further_signal_counts()
            process.send_signal(signal.SIGINT)
            stdout, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert json.loads(stdout.splitlines()[-1]) == {"interrupted": True}


def test_streams_hold_all_nodes() -> None:
    """Lines and events of all nodes come in one place, each rank's in order, and end with the job."""
    told = drive("streams", "--seconds", "0.2")
    lines, events = told["lines"], told["events"]
    assert isinstance(lines, list)
    assert isinstance(events, list)
    assert sorted(rank for rank, text in lines if text.startswith("ready rank")) == list(range(8))
    for rank in range(8):
        assert [kind for kind, of in events if of == rank] == ["started", "exited"]
    assert events[-1] == ["finished", None]


def test_more_nodes_than_there_are_is_an_error_that_says_so() -> None:
    """Nodes that cannot be had are waited for no longer than asked, and the message tells what there is."""
    code = (
        "from davincirunsdk.engines import ray\n"
        "ray.run_blocking(['true'], nnodes=40, nproc_per_node=8, placement_timeout=6)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "PlatformError: found no 40 nodes with 8 NPU free on each" in done.stderr, done.stderr
    assert re.search(r"4 of 40 now; NPU free: \S+ 8 of 8, \S+ 8 of 8, ", done.stderr), done.stderr


def test_waiting_for_nodes_can_be_interrupted() -> None:
    """Ctrl-C ends a job that waits for nodes, with the usual exit code and no words of Ray's."""
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "davincirunsdk",
            "--engine",
            "ray",
            "--nnodes",
            "40",
            "--nproc-per-node",
            "8",
            "--placement-timeout",
            "92",
            "true",
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            assert "waiting for 40 nodes with 8 NPU free on each" in said
            assert re.search(r"free on each, 0:01:\d\d more at most \(--placement-timeout\)", said), said
            assert "; 4 of 40 now; NPU free: " in said, said
            process.send_signal(signal.SIGINT)
            stderr = process.stderr.read()
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
    assert "before a worker was started" in stderr
    assert "exception" not in stderr


def test_an_address_without_a_cluster_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens, the error says what is expected there; Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    done = subprocess.run(words("true"), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert f"found no Ray cluster at {address}" in done.stderr


def test_a_head_that_does_not_answer_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a start that waits for a cluster whose head takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.settimeout(30)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{deaf.getsockname()[1]}")
        with subprocess.Popen(words("true"), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                # Our own look, then Ray's first try, which gets no answer.
                deaf.accept()[0].close()
                with deaf.accept()[0]:
                    process.send_signal(signal.SIGINT)
                    assert process.wait(timeout=30) == 130
            finally:
                process.kill()
