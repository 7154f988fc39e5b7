"""Kubernetes with MindCluster's Ascend Operator: its names for PyTorch and for MindSpore, both for a pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.platforms.site import Site, first_set, names, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "ascendjob"
TITLE = "AscendJob"

HINT = (
    "On Kubernetes the operator writes the table once all pods of the job have their devices: look "
    "for pending pods, and for the mount of the table in the job's description."
)

MARKS = ("MINDX_TASK_ID", "NPU_POD", "REPLICA_TYPE")
"""Variables that the operator alone sets."""


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by what the operator alone sets, or by a pod's RANK that comes with a list of LOCAL_RANK."""
    several = len(names(env, "LOCAL_RANK")) > 1 and bool(env.get("RANK"))
    return several or bool(first_set(env, *MARKS))


def site(env: Mapping[str, str]) -> Site:
    """Read the pod's place and the number of pods, which is that of workers divided by those of a pod."""
    if env.get("MS_ROLE") and env.get("MS_NODE_RANK"):
        return _mindspore(env)
    local = whole(env, "LOCAL_WORLD_SIZE", least=1) or len(names(env, "LOCAL_RANK")) or None
    world = whole(env, "WORLD_SIZE", least=1)
    known = local is not None and world is not None and bool(env.get("RANK"))
    return Site(
        title=TITLE,
        said_by={
            "nnodes": "WORLD_SIZE",
            "node_rank": "RANK",
            "nproc_per_node": "LOCAL_WORLD_SIZE" if env.get("LOCAL_WORLD_SIZE") else "LOCAL_RANK",
        },
        nnodes=max(world // local, 1) if known and world and local else None,
        node_rank=whole(env, "RANK") if known else None,
        nproc_per_node=local if known else None,
        writes_table=True,
        pods=True,
        hint=HINT,
    )


def _mindspore(env: Mapping[str, str]) -> Site:
    """Read MindSpore's names.

    MS_NODE_RANK counts the pods with NPUs. Where the scheduler's pod has some, it is number 0 and
    the workers' pods count from 1; where it has none, they count from 0, and the scheduler runs
    apart from all of them.
    """
    scheduler = env["MS_ROLE"] == "MS_SCHED"
    workers = whole(env, "MS_WORKER_NUM")
    local = whole(env, "MS_LOCAL_WORKER")
    nnodes = max(workers // local, 1) if workers and local else None
    node_rank = whole(env, "MS_NODE_RANK")
    objection = ""
    if scheduler and (env.get("NPU_POD") == "false" or local == 0):
        objection = (
            "found the pod of MindSpore's scheduler (MS_ROLE), which has no NPUs; expected a pod that "
            "trains: run the training script itself in this replica, without davincirun, or give the "
            "Scheduler NPUs, so that it is the first node"
        )
    return Site(
        title=TITLE,
        said_by={
            "nnodes": "MS_WORKER_NUM",
            "node_rank": "MS_NODE_RANK",
            "nproc_per_node": "MS_LOCAL_WORKER",
            "master_addr": "MS_SCHED_HOST",
            "master_port": "MS_SCHED_PORT",
        },
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=local or None,
        master_addr=env.get("MS_SCHED_HOST") or None,
        master_port=whole(env, "MS_SCHED_PORT", least=1, most=65535),
        writes_table=True,
        pods=True,
        hint=HINT,
        objection=objection,
        scheduler_elsewhere=not scheduler and node_rank == 0,
    )
