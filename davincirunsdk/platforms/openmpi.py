"""Open MPI: one davincirun per node, started by `mpirun -N 1`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from davincirunsdk.platforms.site import Site, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "openmpi"

STARTERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun", "orted", "prted"})
"""Programs of Open MPI that start processes on a node."""

MOST_ANCESTORS = 64


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by the three names that say whether a process stands for a node.

    They outlive the program that they were meant for: where several processes share a node and
    mpirun is not among our ancestors, they say nothing about us.
    """
    if not all(env.get(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_SIZE")):
        return False
    return env["OMPI_COMM_WORLD_LOCAL_SIZE"] == "1" or _started_by_mpirun()


def site(env: Mapping[str, str]) -> Site:
    """Read size and place; more than one of us on a node is refused."""
    local = whole(env, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    objection = ""
    if local != 1:
        objection = (
            f"found {local} processes of mpirun on this node (OMPI_COMM_WORLD_LOCAL_SIZE); expected one "
            "davincirun per node, which itself starts a worker per device: write mpirun -N 1 davincirun ..., "
            "or --nnodes 1 (nnodes=1) if each process is to be a job of its own"
        )
    return Site(
        title="Open MPI",
        said_by={"nnodes": "OMPI_COMM_WORLD_SIZE", "node_rank": "OMPI_COMM_WORLD_RANK"},
        nnodes=whole(env, "OMPI_COMM_WORLD_SIZE", least=1),
        node_rank=whole(env, "OMPI_COMM_WORLD_RANK"),
        objection=objection,
    )


def _started_by_mpirun() -> bool:
    pid = os.getpid()
    for _ in range(MOST_ANCESTORS):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return False
        if name in STARTERS:
            return True
        pid = int(rest.split()[1])
        if pid <= 1:
            return False
    return False
