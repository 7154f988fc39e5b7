"""A Ray cluster of three hosts with names, addresses and disks of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hosts import Host, named_hosts
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
def hosts() -> Iterator[tuple[Host, ...]]:
    with named_hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: tuple[Host, ...]) -> Iterator[RayHosts]:
    with ray_on(hosts, npus=8) as made:
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
