"""Kubernetes with Volcano: its env and svc plugins, and the one for PyTorch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from davincirunsdk.platforms.ascendjob import HINT
from davincirunsdk.platforms.site import Site, first_set, names, shared_port, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "volcano"
TITLE = "Volcano"

TRAINS = ("MASTER", "CHIEF", "WORKER")
"""Tasks that are known to train, in the order in which Volcano's own rank plugin counts them."""

_HOSTS = re.compile(r"VC_(\w+)_HOSTS")


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by the place in its task that Volcano gives a pod."""
    return bool(first_set(env, "VC_TASK_INDEX", "VK_TASK_INDEX"))


def site(env: Mapping[str, str]) -> Site:
    """Read nodes and own place: the PyTorch plugin's, else those of the tasks that train.

    A job may have pods that do not train: parameter servers, an evaluator, TensorBoard. Which
    tasks are the job's nodes is known for some names, and where there is only one task.
    """
    tasks = {match[1]: names(env, match[0]) for name in sorted(env) if (match := _HOSTS.fullmatch(name))}
    tasks = {task: hosts for task, hosts in tasks.items() if hosts}
    counted = [task for task in TRAINS if task in tasks] or (list(tasks) if len(tasks) == 1 else [])
    hosts = tuple(host for task in counted for host in tasks[task])
    listed = ", ".join(f"VC_{task}_HOSTS" for task in counted)
    if env.get("RANK") and env.get("WORLD_SIZE"):
        nnodes = whole(env, "WORLD_SIZE", least=1)
        return Site(
            title=TITLE,
            said_by={"nnodes": "WORLD_SIZE", "node_rank": "RANK", "master_port": listed},
            hosts=hosts if len(hosts) == nnodes else (),
            nnodes=nnodes,
            node_rank=whole(env, "RANK"),
            master_port=shared_port(",".join(hosts)) if hosts else None,
            writes_table=True,
            pods=True,
            hint=HINT,
        )
    place, placed = _own_place(env, hosts, several_tasks=len(tasks) > 1)
    objection = ""
    if tasks and (not counted or (place is None and len(tasks) > 1)):
        objection = (
            f"found tasks {', '.join(sorted(tasks))} in this Volcano job (VC_*_HOSTS) and nothing that says "
            f"{'which of them train' if not counted else 'that this pod is one of those that train'}; "
            "expected the size of the job and the place of this pod: give --nnodes (nnodes) and "
            "--node-rank (node_rank)"
        )
    return Site(
        title=TITLE,
        said_by={"nnodes": listed, "node_rank": placed, "master_addr": listed, "master_port": listed},
        hosts=hosts,
        nnodes=len(hosts) or None,
        node_rank=place,
        master_addr=hosts[0] if hosts else None,
        master_port=shared_port(",".join(hosts)) if hosts else None,
        writes_table=True,
        pods=True,
        hint=HINT,
        objection=objection,
        offer=bool(objection),
    )


def _own_place(
    env: Mapping[str, str], hosts: tuple[str, ...], *, several_tasks: bool
) -> tuple[int | None, str]:
    # A host entry is `<pod>.<service>`, and HOSTNAME is the pod's name unless it uses the host's network.
    own = env.get("HOSTNAME", "")
    matches = [place for place, host in enumerate(hosts) if own and host.partition(".")[0] == own]
    if len(matches) == 1:
        return matches[0], "HOSTNAME"
    if env.get("RANK"):
        return whole(env, "RANK"), "RANK"
    if several_tasks:
        return None, ""  # the index counts within the task, and nothing says which task this is
    name = first_set(env, "VC_TASK_INDEX", "VK_TASK_INDEX")
    return whole(env, name), name
