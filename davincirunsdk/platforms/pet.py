"""PET_*: torchrun's options as variables, which Kubeflow's TrainJob and PyTorchJob set for a pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.platforms.site import Site, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "pet"


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by the number of nodes, which both kinds of job set."""
    return bool(env.get("PET_NNODES") or env.get("PET_NODE_RANK"))


def site(env: Mapping[str, str]) -> Site:
    """Read size and place of the pod; a range of nodes means its lower end, as nodes do not come later."""
    fewest = env.get("PET_NNODES", "").partition(":")[0]
    count = env.get("PET_NPROC_PER_NODE", "")
    return Site(
        title="Kubeflow",
        said_by={
            "nnodes": "PET_NNODES",
            "node_rank": "PET_NODE_RANK",
            "nproc_per_node": "PET_NPROC_PER_NODE",
            "master_addr": "PET_MASTER_ADDR",
            "master_port": "PET_MASTER_PORT",
        },
        nnodes=whole({"PET_NNODES": fewest}, "PET_NNODES", least=1),
        node_rank=whole(env, "PET_NODE_RANK"),
        # A word such as `auto` means one per device, as it does without the variable.
        nproc_per_node=int(count) or None if count.isascii() and count.isdigit() and len(count) < 6 else None,
        master_addr=env.get("PET_MASTER_ADDR") or None,
        master_port=whole(env, "PET_MASTER_PORT", least=1, most=65535),
        pods=True,
    )
