"""Launchers that start apart on hosts of their own: cables that are cut, hosts that are gone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import wait_until
from ssh_hosts import SshHosts, ssh_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]

WORKER = str(Path(__file__).parent / "programs" / "worker.py")
PORT = 29533


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path) as made:
        yield made


@contextmanager
def launched(hosts: SshHosts, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A launcher on each host, all met, all ranks ready."""
    running = [
        subprocess.Popen(
            host.command(
                sys.executable, "-m", "davincirunsdk", "--nnodes", "3", "--node-rank", str(rank),
                "--master-addr", hosts.hosts[0].address, "--master-port", str(PORT), "--nproc-per-node", "1",
                "--grace-period", "5", "--log-dir", str(host.folder / "log"), *options, WORKER,
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts.hosts)
    ]  # fmt: skip
    try:
        wait_until(lambda: logs(hosts).count("ready rank") == 3, 40, "all ranks are ready")
        wait_until(lambda: connections(hosts) == 2, 20, "all nodes have met")
        yield running
    finally:
        for host in hosts.hosts:
            for pid in host.running("davincirunsdk"):
                subprocess.run(["kill", str(pid)], check=False)
        for process in running:
            process.communicate(timeout=30)


def logs(hosts: SshHosts) -> str:
    paths = sorted(hosts.folder.glob("h*/log/*-proc-rank-*.txt"))
    return "\n".join(path.read_text() for path in paths)


def connections(hosts: SshHosts) -> int:
    """Connections that stand at the meeting's port of node 0."""
    done = subprocess.run(
        hosts.hosts[0].command("cat", "/proc/net/tcp"), capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    return sum(row[1].endswith(f":{PORT + 1:04X}") and row[3] == "01" for row in rows)


def test_a_cable_out_for_a_moment_does_no_harm(hosts: SshHosts) -> None:
    """Three seconds without a cable: the nodes go on, and end as one later."""
    with launched(hosts, "--lost-after", "20") as running:
        hosts.hosts[1].cut()
        time.sleep(3)  # the fault itself: a cable that is out for so long
        hosts.hosts[1].mend()
        worker = hosts.hosts[2].running(WORKER)[-1]
        subprocess.run(["kill", "-KILL", str(worker)], check=True)
        said = [process.communicate(timeout=60)[1] for process in running]
        assert [process.returncode for process in running] == [137, 137, 137], said
        assert all("rank 2" in text for text in said)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("way", ["cable", "power"])
def test_a_host_that_is_gone_ends_all(hosts: SshHosts, lost: int, way: str) -> None:
    """After --lost-after both sides of a cut stop their workers, and name whom they do not hear."""
    with launched(hosts, "--lost-after", "3") as running:
        began = time.monotonic()
        if way == "cable":
            hosts.hosts[lost].cut()
        else:
            hosts.hosts[lost].power_off()
        others = [rank for rank in range(3) if rank != lost]
        for rank in others:
            _, said = running[rank].communicate(timeout=40)
            assert running[rank].returncode == 1, said
            assert re.search(rf"node {lost} is the root cause", said), said
            assert "no sign of it for 3 s" in said
        assert time.monotonic() - began < 3 + 5 + 5 + 3
        if way == "cable":
            _, said = running[lost].communicate(timeout=40)
            assert running[lost].returncode == 1, said
            assert logs(hosts).count("saved on SIGTERM") == 3


def volcano(rank: int, _: Path) -> dict[str, str]:
    hosts = ",".join(f"job-worker-{place}.job" for place in range(3))
    return {"VC_TASK_INDEX": str(rank), "VC_WORKER_HOSTS": hosts, "HOSTNAME": f"job-worker-{rank}"}


def modelarts(rank: int, folder: Path) -> dict[str, str]:
    return {
        **volcano(rank, folder),
        "MA_VJ_NAME": "ma-job-7f",
        "MA_NUM_HOSTS": "3",
        "MA_LOG_DIR": str(folder / f"ma{rank}"),
    }


def kubeflow(rank: int, _: Path) -> dict[str, str]:
    return {
        "PET_NNODES": "3",
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "job-worker-0.job",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "job-worker-0.job",
        "MASTER_PORT": "23456",
    }


def ascendjob(rank: int, folder: Path) -> dict[str, str]:
    """MASTER_ADDR is that of a service, at which nobody can be met: the table knows the pods' own."""
    servers = [
        {
            "server_id": f"10.78.0.{place + 1}",
            "device": [{"device_id": "0", "device_ip": f"192.168.0.{place + 1}", "rank_id": str(place)}],
        }
        for place in range(3)
    ]
    table = folder / f"table{rank}.json"
    table.write_text(
        json.dumps({"version": "1.0", "server_count": "3", "status": "completed", "server_list": servers})
    )
    return {
        "RANK_TABLE_FILE": str(table),
        "MINDX_TASK_ID": "uid",
        "MASTER_ADDR": "10.96.7.7",
        "MASTER_PORT": "2222",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
    }


@pytest.mark.parametrize("pod", [volcano, modelarts, kubeflow, ascendjob])
def test_pods_meet_by_what_their_platform_says(
    tmp_path: Path, pod: Callable[[int, Path], dict[str, str]]
) -> None:
    """One command in each pod, without a word about its place: one root cause, one exit code."""
    gate = tmp_path / "gate"
    gate.mkdir()
    names = [f"echo 10.78.0.{rank + 1} job-worker-{rank} job-worker-{rank}.job" for rank in range(3)]
    with ssh_hosts(tmp_path, more=" && ".join(f"{name} >>/etc/hosts" for name in names)) as hosts:
        running = [
            subprocess.Popen(
                host.command(
                    "env", *(f"{name}={value}" for name, value in pod(rank, tmp_path).items()),
                    sys.executable, "-m", "davincirunsdk", "--nproc-per-node", "1", "--grace-period", "5",
                    "--log-dir", str(host.folder / "log"), WORKER, "--fail", "1:7", "--when-ready", str(gate),
                ),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts.hosts)
        ]  # fmt: skip
        said = [process.communicate(timeout=60)[1] for process in running]
        assert [process.returncode for process in running] == [7, 7, 7], said
        assert all("rank 1 is the root cause, exit code 7" in text for text in said), said
        assert logs(hosts).count("saved on SIGTERM") == 2
        # Of the others' addresses that the platform names nobody else is let in; Kubeflow names one.
        assert ("takes the first 2 launchers" in said[0]) == (pod is kubeflow), said[0]
