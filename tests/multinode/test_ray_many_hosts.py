"""A Ray cluster of three hosts with names, addresses and disks of their own."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hosts import Host, named_hosts
from processes import wait_until
from ray_on_hosts import RayHosts, ray_on
from test_driver import write_table

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

WORKER = str(Path(__file__).parent / "programs" / "worker.py")
SHOW = (
    "import os; print('rank', *(os.environ[name] for name in "
    "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'ASCEND_RT_VISIBLE_DEVICES')), os.uname().nodename)"
)


@pytest.fixture(scope="module")
def all_hosts() -> Iterator[tuple[Host, ...]]:
    with named_hosts(4) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(all_hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Those of the cluster; the last one is outside of it."""
    return all_hosts[:3]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which each host has its own."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def cluster(hosts: tuple[Host, ...], disk: Path) -> Iterator[RayHosts]:
    with ray_on(hosts, npus=8, own=str(disk)) as made:
        yield made


def test_a_rank_table_says_which_nodes_and_devices(
    cluster: RayHosts, hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """By address or name, in the table's order, a part of each one's NPUs; one begun is waited for."""
    table = tmp_path / "table.json"
    rows = {hosts[2].address: (4, 5, 6), hosts[0].name: (0, 7)}
    write_table(table, rows, status="initializing")
    done = cluster.launch("--rank-table", str(table), "--log-dir", str(tmp_path), sys.executable, "-c", SHOW)
    with done:
        assert done.stderr is not None
        said = done.stderr.readline()
        assert f'waiting for rank table {table}: its status is "initializing"' in said, said
        write_table(table, rows)
        stdout, stderr = done.communicate(timeout=60)
    assert done.returncode == 0, stderr
    assert sorted(re.findall(r"^\[node (\d) rank \d\] rank (.*)", stdout, re.MULTILINE)) == [
        ("0", f"0 5 0 4,5,6 {hosts[2].name}"),
        ("0", f"1 5 1 4,5,6 {hosts[2].name}"),
        ("0", f"2 5 2 4,5,6 {hosts[2].name}"),
        ("1", f"3 5 0 0,7 {hosts[0].name}"),
        ("1", f"4 5 1 0,7 {hosts[0].name}"),
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"10.77.1.3": (0,), "192.0.2.9": (0,)}, r"1 of 2 now; 192.0.2.9 not among dr\d+h0 \(10.77.1.1\), "),
        (
            {"10.77.1.3": tuple(range(9))},
            r"found 9 devices of 10.77.1.3; expected at most 8, the NPU",
        ),
    ],
    ids=["another node", "too many devices"],
)
def test_a_rank_table_of_other_nodes_starts_nothing(
    cluster: RayHosts, rows: dict[str, tuple[int, ...]], said: str, tmp_path: Path
) -> None:
    """One error says what does not fit, and which nodes Ray has; no log was begun."""
    table = tmp_path / "table.json"
    write_table(table, rows)
    log = tmp_path / "log"
    options = ["--rank-table", str(table), "--placement-timeout", "6", "--log-dir", str(log)]
    with cluster.launch(*options, WORKER) as done:
        _, stderr = done.communicate(timeout=60)
    assert done.returncode == 3, stderr
    assert re.search(rf"error: .*{said}", stderr), stderr
    assert not log.exists()


def test_a_job_may_be_driven_from_outside_of_the_cluster(
    cluster: RayHosts, all_hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """Through `ray://` a failure is told as inside, and an address without a cluster at once."""
    assert importlib.util.find_spec("grpc"), "Ray's client is not installed: pip install 'ray[client]'"
    ready = tmp_path / "ready"
    ready.mkdir()
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--log-dir", f"{tmp_path}/log"]
    command = [WORKER, "--fail", "3:9", "--when-ready", str(ready)]
    head = cluster.hosts[0].address
    with cluster.launch(*options, *command, host=all_hosts[3], address=f"ray://{head}:10001") as done:
        _, stderr = done.communicate(timeout=90)
    assert done.returncode == 9, stderr
    assert "rank 3 is the root cause, exit code 9" in stderr, stderr
    with cluster.launch(*options, "true", host=all_hosts[3], address=f"ray://{head}:10009") as done:
        _, stderr = done.communicate(timeout=20)
    assert done.returncode == 3, stderr
    assert f"found no Ray cluster at ray://{head}:10009" in stderr, stderr


def test_logs_are_brought_from_other_disks(cluster: RayHosts, disk: Path, tmp_path: Path) -> None:
    """After a failure the driver's folder has every rank's log; without the option only what is here."""
    options = ["--nnodes", "3", "--nproc-per-node", "1", "--name", "far", "--log-dir", f"{disk}/log"]
    ready = tmp_path / "ready"
    ready.mkdir()
    command = [WORKER, "--fail", "1:9", "--when-ready", str(ready)]
    # Whatever is in the folder of the driver's own host is shown when the job is over.
    show = f"--on-end=sh -c 'head -c 60 {disk}/log/far-proc-rank-* >{tmp_path}/seen'"
    done = cluster.launch("--collect-logs", show, *options, *command)
    _, stderr = done.communicate(timeout=90)
    assert done.returncode == 9, stderr
    assert re.search(rf"logs of ranks? .* brought to {disk}/log", stderr), stderr
    seen = (tmp_path / "seen").read_text()
    assert sorted(re.findall(r"ready rank (\d) of 3", seen)) == ["0", "1", "2"], seen


def test_a_job_goes_on_with_the_nodes_that_are_left(
    cluster: RayHosts, hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """One host loses its power: the next attempt is on the two others, with ranks and size of these."""
    log = tmp_path / "log"
    code = (
        "import os, time; e = os.environ\n"
        "names = ('TORCHELASTIC_RESTART_COUNT', 'RANK', 'WORLD_SIZE', 'GROUP_WORLD_SIZE')\n"
        "print('attempt', *(e[name] for name in names), flush=True)\n"
        "time.sleep(600 * (e['WORLD_SIZE'] == '6'))"
    )
    options = ["--nnodes", "2:3", "--nproc-per-node", "2", "--log-dir", str(log), "--grace-period", "1"]
    options += ["--max-restarts", "2", "--restart-delay", "1"]
    done = cluster.launch(*options, sys.executable, "-c", code)
    try:
        wait_until(lambda: written(log).count("attempt 0") == 6, 60, "all workers run")
        cluster.power_off(hosts[1])
        stdout, stderr = done.communicate(timeout=120)
    finally:
        done.kill()
        cluster.start(hosts[1])
    assert done.returncode == 0, stderr
    assert re.search(r"attempt 0 ended after .*: node 1, .*; restart 1 of at most 2 in ", stderr), stderr
    assert re.search(r"waiting for 2 to 3 nodes .*, then going on with 2; 2 of 3 now", stderr), stderr
    assert f"attempt 1 is on 2 nodes instead of 3: {hosts[0].name}, {hosts[2].name}" in stderr, stderr
    assert sorted(re.findall(r"attempt 1 (\d \d \d)", stdout)) == ["0 4 2", "1 4 2", "2 4 2", "3 4 2"]
    names = [path.name for path in log.glob("*-proc-rank-*")]
    assert len([name for name in names if name.endswith("-attempt-0.txt")]) == 6, names
    assert len([name for name in names if "-attempt-" not in name]) == 4, names


def test_a_job_goes_on_on_another_node(cluster: RayHosts, hosts: tuple[Host, ...], tmp_path: Path) -> None:
    """With a node to spare, the next attempt has as many nodes as the first."""
    log = tmp_path / "log"
    code = "import os, time; print('on', os.uname().nodename, flush=True); "
    code += "time.sleep(600 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--log-dir", str(log), "--grace-period", "1"]
    options += ["--max-restarts", "1", "--restart-delay", "1"]
    done = cluster.launch(*options, sys.executable, "-c", code)
    lost = hosts[1]
    try:
        wait_until(lambda: written(log).count("on ") == 2, 60, "both workers run")
        lost = next(host for host in hosts[1:] if f"on {host.name}" in written(log))
        cluster.power_off(lost)
        _, stderr = done.communicate(timeout=120)
    finally:
        done.kill()
        cluster.start(lost)
    assert done.returncode == 0, stderr
    left = sorted(host.name for host in hosts if host != lost)
    assert f"attempt 1 is on 2 nodes: {', '.join(left)}" in stderr, stderr
    on = sorted(path.read_text().split()[1] for path in log.glob("*-rank-?-device-?.txt"))
    assert on == left


def test_too_few_nodes_are_waited_for_and_told(
    cluster: RayHosts, hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """Below the least number the job waits its time, says what is missing, and the loss is the report."""
    log = tmp_path / "log"
    options = ["--nnodes", "3", "--nproc-per-node", "1", "--log-dir", str(log), "--grace-period", "1"]
    options += ["--max-restarts", "1", "--restart-delay", "1", "--placement-timeout", "15"]
    done = cluster.launch(*options, WORKER)
    try:
        wait_until(lambda: written(log).count("ready rank") == 3, 60, "all workers run")
        cluster.power_off(hosts[2])
        _, stderr = done.communicate(timeout=120)
    finally:
        done.kill()
        cluster.start(hosts[2])
    assert done.returncode == 1, stderr
    assert "is the root cause, lost" in stderr, stderr
    assert re.search(r"no restart: found no 3 nodes with 1 NPU free on each within 15 s; 2 of 3 now", stderr)


def written(log: Path) -> str:
    """What all workers wrote."""
    return "\n".join(path.read_text() for path in sorted(log.glob("*-proc-rank-*.txt")))
