"""A Slurm cluster on this machine: one controller, several slurmd, everything in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KILL_WAIT = 5
"""Seconds from Slurm's SIGTERM to its SIGKILL."""


@contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[Path]:
    """Start a cluster whose nodes are called n1, n2, ..., and end it afterwards.

    Args:
        folder: For all its files.
        nodes: Number of nodes, 8 processors each.

    Yields:
        The configuration, for SLURM_CONF.
    """
    for program in ("slurmctld", "slurmd", "srun"):
        assert shutil.which(program), (
            f"{program} is not there: apt-get install --no-install-recommends slurm-wlm"
        )
    conf = _configure(folder, nodes)
    env = {**os.environ, "SLURM_CONF": str(conf)}
    daemons = []
    try:
        for name, words in [
            ("slurmctld", ["slurmctld", "-D"]),
            *((f"n{number}", ["slurmd", "-D", "-N", f"n{number}"]) for number in range(1, nodes + 1)),
        ]:
            with open(folder / f"{name}.out", "wb") as output:
                daemons.append(
                    subprocess.Popen(
                        words,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        _wait_until_idle(folder, env, nodes)
        yield conf
    finally:
        # slurmstepd leaves its slurmd, so it is found before that ends.
        family = [
            child for daemon in daemons for child in psutil.Process(daemon.pid).children(recursive=True)
        ]
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for child in family:
            if child.is_running():
                child.send_signal(signal.SIGKILL)


def _configure(folder: Path, nodes: int) -> Path:
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(nodes + 1)
    for name in ("state", *(f"spool-n{number}" for number in range(1, nodes + 1))):
        (folder / name).mkdir()
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/none",
        "CredType=cred/none",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/none",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_min_interval=10000",
        "ReturnToService=2",
        "InactiveLimit=0",
        f"KillWait={KILL_WAIT}",
        "SlurmdParameters=config_overrides",
        *(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=8"
            for number in range(1, nodes + 1)
        ),
        f"PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP",
    ]
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    (folder / "cgroup.conf").touch()
    return conf


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait_until_idle(folder: Path, env: dict[str, str], nodes: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"],
            env=env,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if answer.stdout.strip() == str(nodes):
            return
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.out"))
            )
            raise AssertionError(f"the Slurm cluster is not ready: {answer.stdout}{answer.stderr}\n{logs}")
        time.sleep(0.05)
