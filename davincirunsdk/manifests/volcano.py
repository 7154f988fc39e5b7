"""A Volcano job that runs one `davincirun` per pod.

Inside a pod nothing is given by options: number of nodes, place and master come from the variables
of Volcano's `svc` and `env` plugins. A pod ends with the exit code of its `davincirun`, which is
what the job's policies look at. Fields as in Volcano's CRD `jobs.batch.volcano.sh`, v1alpha1; with
MindCluster, its operator fills the ConfigMap `rings-config-<job>` with the rank table.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from davincirunsdk.manifests.pod import HOPELESS, launcher, metadata, pod, with_restart_policy

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Json, Request


def objects(request: Request) -> list[dict[str, Json]]:
    """Write the job, and with MindCluster the ConfigMap that its rank table goes to."""
    on_failure = "RestartJob" if request.retries else "AbortJob"
    labels = {"ring-controller.atlas": request.mindcluster} if request.mindcluster else {}
    table = f"rings-config-{request.name}"
    template = pod(
        request,
        container="worker",
        command=launcher(request),
        labels=labels,
        rank_table={"configMap": {"name": table}} if request.mindcluster else None,
    )
    spec: dict[str, Json] = {
        "schedulerName": "volcano",
        # All pods or none: a part of the job would only wait for the rest.
        "minAvailable": request.nnodes,
        "maxRetry": request.retries,
        "plugins": {"env": [], "svc": []},
        # The first that fits counts.
        "policies": [
            *({"exitCode": code, "action": "AbortJob"} for code in HOPELESS),
            {"event": "PodFailed", "action": on_failure},
            {"event": "PodEvicted", "action": on_failure},
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "tasks": [
            {
                "name": "worker",
                "replicas": request.nnodes,
                "template": with_restart_policy(template, "Never"),
            }
        ],
    }
    if request.queue:
        spec["queue"] = request.queue
    job: dict[str, Json] = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": metadata(request, labels),
        "spec": spec,
    }
    if not request.mindcluster:
        return [job]
    config: dict[str, Json] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata(request, labels), "name": table},
        "data": {"hccl.json": json.dumps({"status": "initializing"})},
    }
    return [config, job]
