"""ModelArts: training jobs old and new, custom images, notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.platforms.paths import log_root
from davincirunsdk.platforms.site import Site, first_set, names, shared_port, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "modelarts"

MARKS = (
    "MA_VJ_NAME",  # training jobs
    "MA_JOB_DIR",
    "MA_NUM_HOSTS",
    "BATCH_JOB_ID",
    "BATCH_TASK_CURRENT_INSTANCE",
    "MA_CURRENT_INSTANCE_NAME",
    "DLS_TASK_NUMBER",  # jobs of the older kind
    "RANK_TABLE_FILE_V_1_0",  # notebooks
)
"""Variables that ModelArts alone sets. MA_HOME and MA_MOUNT_PATH are none: images set them, and users
who test a job at home."""

HINT = (
    "On ModelArts the platform writes a table only if the job itself was created with the variable "
    "RANK_TABLE_FILE (a folder, such as /user/config); jobs of custom images often lack it."
)


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by the variables that ModelArts alone sets."""
    return any(env.get(name) for name in MARKS)


def site(env: Mapping[str, str]) -> Site:
    """Read nodes and own place from VC_* (new jobs) or DLS_* (old ones)."""
    hosts = names(env, "VC_WORKER_HOSTS")
    counted = first_set(env, "MA_NUM_HOSTS", "DLS_TASK_NUMBER")
    nnodes = (whole(env, counted, least=1) if counted else len(hosts)) or None
    # With a route plan the platform numbers the nodes anew, by the network's shape.
    planned = env.get("ROUTE_PLAN", "").lower() == "true" and bool(env.get("RANK_AFTER_ACC"))
    placed = "RANK_AFTER_ACC" if planned else first_set(env, "VC_TASK_INDEX", "DLS_TASK_INDEX")
    rank = whole(env, placed)
    old_hosts = tuple(
        env[name].partition(":")[0] for i in range(nnodes or 0) if env.get(name := f"BATCH_CUSTOM{i}_HOSTS")
    )
    hosts = hosts or old_hosts
    first = whole(env, "MA_MASTER_INDEX", most=max(len(hosts) - 1, 0)) if planned else 0
    job = env.get("MA_VJ_NAME") or env.get("BATCH_JOB_ID")
    return Site(
        title="ModelArts",
        said_by={
            "nnodes": counted or "VC_WORKER_HOSTS",
            "node_rank": placed,
            "master_addr": "VC_WORKER_HOSTS" if env.get("VC_WORKER_HOSTS") else "BATCH_CUSTOM0_HOSTS",
            "master_port": first_set(env, "MA_VJ_NAME", "BATCH_JOB_ID"),
        },
        hosts=hosts if len(hosts) == nnodes and not planned else (),
        nnodes=nnodes,
        node_rank=rank,
        master_addr=hosts[first] if hosts and first is not None else None,
        master_port=shared_port(job) if job else None,
        log_dir=Path(env["MA_LOG_DIR"]) if env.get("MA_LOG_DIR") else log_root(env),
        writes_table=True,
        pods=True,
        hint=HINT,
    )
