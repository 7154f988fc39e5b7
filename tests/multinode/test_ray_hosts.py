"""A Ray cluster of two hosts, made with `ray start` as users do, and a cable between them to be cut."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hosts import Host, two_hosts
from processes import marked_processes, wait_until

from davincirunsdk.engines.ray import HEALTH_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ray

WORKER = Path(__file__).parent / "programs" / "worker.py"
MARK = "PYTEST_OF_DAVINCIRUN_CLUSTER"
PORT = 6399


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a raylet each, the first one the head."""
    folder = tempfile.mkdtemp(prefix="dr")
    mark = uuid.uuid4().hex
    env = {**os.environ, **HEALTH_CHECKS, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    env.pop("PYTEST_OF_DAVINCIRUN", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with two_hosts() as (first, second):
        monkeypatch.setenv("RAY_ADDRESS", f"{first.address}:{PORT}")
        monkeypatch.setenv(MARK, mark)
        env[MARK] = mark
        ways = [
            (first, ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]),
            (second, [f"--address={first.address}:{PORT}"]),
        ]
        running = []
        try:
            for host, options in ways:
                command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
                command += [f"--node-ip-address={host.address}", "--num-cpus=4"]
                with open(f"{folder}/{host.name}.out", "w") as output:
                    running.append(
                        subprocess.Popen(host.on(*command), env=env, stdout=output, stderr=subprocess.STDOUT)
                    )
                log = Path(f"{folder}/{host.name}.out")
                wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 40, "Ray has started")
            yield first, second
        finally:
            # Ray's own way of ending waits for the host that was cut off.
            for process in marked_processes(MARK, mark):
                process.kill()
            for one in running:
                one.kill()
                one.wait()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(240)
def test_a_cut_cable_ends_both_sides(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The driver's side ends when Ray gives the other up; the side cut off ends by itself, a minute later."""
    head, other = hosts
    log = tmp_path / "log"

    def logs() -> str:
        return "\n".join(path.read_text() for path in sorted(log.glob("*-proc-rank-*.txt")))

    launch = [sys.executable, "-m", "davincirunsdk", "--engine", "ray", "--resource", "CPU"]
    launch += ["--nnodes", "2", "--nproc-per-node", "2", "--log-dir", str(log)]
    driver = subprocess.Popen(head.on(*launch, str(WORKER)), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: logs().count("ready rank") == 4, 60, "all workers ready")
        began = time.time()
        subprocess.run(["ip", "-n", other.name, "link", "set", other.interface, "down"], check=True)
        _, stderr = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.communicate()
    assert driver.returncode == 1, stderr
    assert "is the root cause, lost" in stderr, stderr
    assert logs().count("saved on SIGTERM") == 2, logs()
    wait_until(
        lambda: logs().count("saved on SIGTERM") == 4, 100, "the host that was cut off ended its workers"
    )
    ended = sorted(float(stamp) - began for stamp in re.findall(r"saved on SIGTERM ([\d.]+)", logs()))
    assert ended[1] < 20 < ended[2]
