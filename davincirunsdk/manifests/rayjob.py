"""A RayJob of KubeRay, `ray.io/v1`: a cluster of its own, and `davincirun --engine ray` on its head.

KubeRay makes Ray resources of GPUs and of nothing of `huawei.com`, so the NPUs are named by
`rayStartParams`; the head has none. Fields as in KubeRay's `rayjob_types.go` and
`raycluster_types.go`.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from davincirunsdk.manifests.pod import launcher, metadata, pod

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Json, Request


def objects(request: Request) -> list[dict[str, Json]]:
    """Write the job."""
    own = ["--engine", "ray", "--nnodes", str(request.nnodes)]
    if request.npus and request.nproc_per_node is None:
        own += ["--nproc-per-node", str(request.npus)]
    elif not request.npus:
        own += ["--resource", "CPU"]
    entry = shlex.join(launcher(request, *own))
    worker_parameters: dict[str, Json] = {"num-gpus": "0"}
    if request.npus:
        # Ray's command line wants the JSON in quotes of its own.
        worker_parameters["resources"] = json.dumps(json.dumps({"NPU": request.npus}))
    spec: dict[str, Json] = {
        "entrypoint": entry,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "backoffLimit": request.retries,
        # The default mode has the words read by two shells and Kubernetes, this one by one shell.
        "submissionMode": "HTTPMode",
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"num-gpus": "0"},
                "template": pod(request, container="ray-head", command=[], npus=0),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "npus",
                    "replicas": request.nnodes,
                    "minReplicas": request.nnodes,
                    "maxReplicas": request.nnodes,
                    "rayStartParams": worker_parameters,
                    "template": pod(request, container="ray-worker", command=[]),
                }
            ],
        },
    }
    labels = {}
    if request.queue:
        # KubeRay hands these to Volcano, which it then uses for the whole cluster.
        labels = {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": request.queue}
    return [
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata(request, labels), "spec": spec}
    ]
