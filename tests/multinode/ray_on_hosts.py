"""A Ray cluster of several hosts, made with `ray start` as users do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from processes import marked_processes, wait_until

from davincirunsdk.engines.ray import HEALTH_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hosts import Host

MARK = "PYTEST_OF_DAVINCIRUN_CLUSTER"
PORT = 6399


class RayHosts:
    """The cluster: the first host is the head, and takes part in jobs, too.

    Args:
        hosts: The hosts.
        npus: NPUs that each pretends to have, 0 for CPUs alone.
        own: A folder of which each has its own.
        table: Rank table of a platform, on hosts where the NPUs have device files.
    """

    def __init__(self, hosts: Sequence[Host], *, npus: int, own: str, table: str) -> None:
        self.hosts = hosts
        self.address = f"{hosts[0].address}:{PORT}"
        self._npus = npus
        self._own = own
        self._table = table
        # Short, for the paths of Ray's sockets have to be.
        self._folder = tempfile.mkdtemp(prefix="dr")
        self._marks = {host: uuid.uuid4().hex for host in hosts}
        self._running: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled"}

    def start(self, host: Host) -> None:
        """Start Ray on a host."""
        head = host == self.hosts[0]
        options = ["--head", f"--port={PORT}", "--include-dashboard=false"] if head else []
        options += [f"--temp-dir={self._folder}/t"] if head else [f"--address={self.address}"]
        options += [f"--node-ip-address={host.address}", "--num-cpus=4", f"--object-store-memory={80 << 20}"]
        if self._npus:
            options.append(f'--resources={{"NPU": {self._npus}}}')
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        env = {**os.environ, **HEALTH_CHECKS, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        if self._table:
            env["RANK_TABLE_FILE"] = self._table
        # What a host loses is not this test run's own.
        env.pop("PYTEST_OF_DAVINCIRUN", None)
        log = Path(f"{self._folder}/{host.name}.{len(self._running)}.out")
        with log.open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    host.on(*command, own=self._own, npus=self._npus if self._table else 0),
                    env={**env, MARK: self._marks[host]},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        wait_until(lambda: "Ray runtime started" in log.read_text(), 40, f"Ray has started on {host.name}")

    def power_off(self, host: Host) -> None:
        """Kill all that runs on a host at once, as a power cut does."""
        while processes := marked_processes(MARK, self._marks[host]):
            for process in processes:
                process.kill()

    def launch(self, *words: str, host: Host | None = None, address: str = "") -> subprocess.Popen[str]:
        """Run davincirun.

        Args:
            words: Its options and command.
            host: Where; by default on the head's host.
            address: Of the cluster as seen from there, where that is another one.
        """
        launch = [sys.executable, "-m", "davincirunsdk", "--engine", "ray", *words]
        return subprocess.Popen(
            (host or self.hosts[0]).on(*launch),
            env={**self.env, "RAY_ADDRESS": address or self.address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> None:
        """End all of it; Ray's own way of ending waits for hosts that are gone."""
        for host in self.hosts:
            self.power_off(host)
        for one in self._running:
            one.kill()
            one.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def ray_on(hosts: Sequence[Host], *, npus: int = 0, own: str = "", table: str = "") -> Iterator[RayHosts]:
    """Start Ray on hosts, and end it afterwards, whatever became of it.

    Args:
        hosts: The first one is the head.
        npus: NPUs that each pretends to have, 0 for CPUs alone.
        own: A folder of which each has its own.
        table: Rank table of a platform, on hosts where the NPUs have device files.
    """
    cluster = RayHosts(hosts, npus=npus, own=own, table=table)
    try:
        for host in hosts:
            cluster.start(host)
        yield cluster
    finally:
        cluster.end()
