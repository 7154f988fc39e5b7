"""Hosts of a Ray cluster that have device files of NPUs, whose addresses a platform's rank table knows."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from hosts import named_hosts
from ray_on_hosts import RayHosts, ray_on
from test_driver import write_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The platform's table."""
    return tmp_path_factory.mktemp("platform") / "hccl.json"


@pytest.fixture(scope="module")
def cluster(table: Path) -> Iterator[RayHosts]:
    with named_hosts(2) as hosts, ray_on(hosts, npus=2, table=str(table)) as made:
        yield made


def test_a_table_that_its_platform_still_writes_is_waited_for(
    cluster: RayHosts, table: Path, tmp_path: Path
) -> None:
    """Every node waits for it, the driver says so, and the job's table has what the platform wrote then."""
    first, second = (host.address for host in cluster.hosts)
    # The platform's order is another one than the job's.
    rows = {second: (0, 1), first: (0, 1)}
    write_table(table, rows, status="initializing")
    show = "import os; print('table', open(os.environ['RANK_TABLE_FILE']).read())"
    options = ["--nnodes", "2", "--log-dir", str(tmp_path), "--echo", "0"]
    done = cluster.launch(*options, sys.executable, "-c", show)
    try:
        assert done.stderr is not None
        said = done.stderr.readline()
        assert f'waiting for rank table {table}: its status is "initializing"' in said, said
        assert any(host.name in said for host in cluster.hosts), said
        write_table(table, rows)
        stdout, stderr = done.communicate(timeout=60)
    finally:
        done.kill()
    assert done.returncode == 0, stderr
    made = json.loads(stdout.partition("table ")[2])
    assert [
        (server["server_id"], row["rank_id"], row["device_ip"])
        for server in made["server_list"]
        for row in server["device"]
    ] == [
        (first, "0", "29.0.1.1"),
        (first, "1", "29.0.1.2"),
        (second, "2", "29.0.0.1"),
        (second, "3", "29.0.0.2"),
    ]


def test_a_cluster_that_grows_is_waited_for(cluster: RayHosts, table: Path, tmp_path: Path) -> None:
    """A node that is not there yet is said to be missing, though only it settles the number of workers."""
    write_table(table, {host.address: (0, 1) for host in cluster.hosts})
    cluster.power_off(cluster.hosts[1])
    done = cluster.launch("--nnodes", "2", "--log-dir", str(tmp_path), "true")
    try:
        assert done.stderr is not None
        said = ""
        while "1 of 2 now" not in said:
            said = done.stderr.readline()
            assert "waiting for 2 nodes with" in said, said
        cluster.start(cluster.hosts[1])
        _, stderr = done.communicate(timeout=60)
    finally:
        done.kill()
    assert done.returncode == 0, stderr
    assert "4 workers succeeded" in stderr, stderr
