"""A Ray cluster of several nodes on this machine, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from processes import marked_processes

from davincirunsdk.engines.ray import HEALTH_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = Path(__file__).parent / "programs"
_MARK = "PYTEST_OF_DAVINCIRUN_CLUSTER"


@dataclass(slots=True, kw_only=True)
class RayCluster:
    """The cluster.

    Attributes:
        env: Environment in which a driver finds it.
        head: Pid of the head's own server.
        raylets: Pid of every node's raylet, those of lost nodes too.
    """

    process: subprocess.Popen[str]
    env: dict[str, str]
    head: int = 0
    raylets: list[int] = field(default_factory=list)

    def add_node(self) -> None:
        """Add one, in place of one that a test has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.learn()

    def learn(self) -> None:
        """Read what the cluster's process says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the Ray cluster ended with {self.process.wait()}"
        known = json.loads(line)
        self.env["RAY_ADDRESS"], self.head, self.raylets = known["address"], known["head"], known["raylets"]

    def job_processes(self) -> list[psutil.Process]:
        """List the living processes of jobs on this cluster's nodes: workers and what they started."""
        return [process for process, env, _ in self._of_nodes() if "DAVINCIRUN_JOB" in env]

    def agents(self) -> dict[int, psutil.Process]:
        """Tell the actors that are agents, by the pid of their raylet."""
        return {
            int(env["RAY_RAYLET_PID"]): process
            for process, env, command in self._of_nodes()
            if "RayAgent" in command
        }

    def _of_nodes(self) -> list[tuple[psutil.Process, dict[str, str], str]]:
        """Living processes of these nodes, with environment and command."""
        nodes = {str(pid) for pid in self.raylets}
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                if env.get("RAY_RAYLET_PID") in nodes and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process, env, " ".join(process.cmdline())))
            except (psutil.Error, OSError):
                continue
        return found


@contextmanager
def ray_cluster(count: int, **settings: str) -> Iterator[RayCluster]:
    """Start a cluster and end it afterwards, whatever became of it.

    Args:
        count: Nodes beside the head.
        settings: Further variables for it.
    """
    assert importlib.util.find_spec("ray"), "Ray is not installed: pip install 'davincirunsdk[ray]'"
    mark = uuid.uuid4().hex
    # Short, for the paths of Ray's sockets have to be.
    folder = tempfile.mkdtemp(prefix="dr")
    env = {
        **os.environ,
        **HEALTH_CHECKS,
        _MARK: mark,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # Whatever the name says, on Linux too it makes Ray use 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        **settings,
    }
    with open(f"{folder}/cluster.err", "w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "ray_cluster.py"), str(count)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    cluster = RayCluster(process=process, env={name: value for name, value in env.items() if name != _MARK})
    try:
        cluster.learn()
        yield cluster
    finally:
        # Ray's own way of ending waits half a minute for nodes that are gone.
        for one in marked_processes(_MARK, mark):
            one.kill()
        process.kill()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)
