"""Kubernetes with Volcano or MindCluster's Ascend Operator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from davincirunsdk.platforms.site import Site, names, shared_port, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "volcano"

HINT = (
    "On Kubernetes the operator writes the table once all pods of the job have their devices: look "
    "for pending pods, and for the mount of the table in the job's description."
)

_HOSTS = re.compile(r"VC_(\w+)_HOSTS")


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by Volcano's VC_TASK_INDEX or by what the operator alone sets."""
    return bool(
        env.get("VC_TASK_INDEX") or env.get("VK_TASK_INDEX") or env.get("MINDX_TASK_ID") or _operator(env)
    )


def site(env: Mapping[str, str]) -> Site:
    """Read nodes and own place from the operator's RANK or from Volcano's host lists."""
    local = names(env, "LOCAL_RANK")
    world = whole(env, "WORLD_SIZE", least=1)
    if _operator(env) and world is not None:
        # Pod level: RANK is the node's, LOCAL_RANK lists the pod's devices, WORLD_SIZE counts all.
        return Site(
            nnodes=max(world // len(local), 1),
            node_rank=whole(env, "RANK"),
            writes_table=True,
            hint=HINT,
        )
    tasks = {match[1]: names(env, match[0]) for name in sorted(env) if (match := _HOSTS.fullmatch(name))}
    tasks = {task: hosts for task, hosts in tasks.items() if hosts}
    # Masters come first: so Volcano's own rank plugin counts.
    ordered = sorted(tasks, key=lambda task: (task != "MASTER", task))
    hosts = tuple(host for task in ordered for host in tasks[task])
    return Site(
        hosts=hosts,
        nnodes=len(hosts) or None,
        node_rank=_own_place(env, hosts, several_tasks=len(tasks) > 1),
        master_addr=hosts[0] if hosts else None,
        master_port=shared_port(",".join(hosts)) if hosts else None,
        writes_table=True,
        hint=HINT,
    )


def _operator(env: Mapping[str, str]) -> bool:
    # One process per pod sees RANK and a LOCAL_RANK list; torchrun's workers see a single number
    # together with GROUP_RANK.
    local = names(env, "LOCAL_RANK")
    return bool(
        local
        and env.get("RANK")
        and (len(local) > 1 or env.get("MINDX_TASK_ID") or env.get("NPU_POD") or env.get("REPLICA_TYPE"))
    )


def _own_place(env: Mapping[str, str], hosts: tuple[str, ...], *, several_tasks: bool) -> int | None:
    # A host entry is `<pod>.<service>`, and HOSTNAME is the pod's name unless it uses the host's network.
    own = env.get("HOSTNAME", "")
    matches = [place for place, host in enumerate(hosts) if own and host.partition(".")[0] == own]
    if len(matches) == 1:
        return matches[0]
    if env.get("RANK"):
        return whole(env, "RANK")
    if several_tasks:
        return None  # the index counts within the task, and nothing says which task this is
    index = whole(env, "VC_TASK_INDEX")
    return index if index is not None else whole(env, "VK_TASK_INDEX")
