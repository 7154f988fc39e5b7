"""An AscendJob of MindCluster's operator, `mindxdl.gitee.com/v1`, with one `davincirun` per pod.

The container is called `ascend`, since the operator gives its variables to no other; the first
replica is the Master with PyTorch. With `fault-retry-times` MindCluster sees a failure of the program
by the container's exit code and starts the job again. Fields and labels as in the operator's
`pkg/api/v1/ascendjob_types.go` and MindCluster's page on `ascend_job`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.manifests.pod import launcher, metadata, pod, with_restart_policy

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Json, Request

_SERIES = "ascend-910"
_RANK_TABLES = "/user/mindx-dl/ranktable"
"""Folder that the operator writes rank tables to; on shared storage, so that all nodes see it."""


def objects(request: Request) -> list[dict[str, Json]]:
    """Write the job: a Master and, with more than one pod, Workers."""
    series = {"ring-controller.atlas": request.mindcluster or _SERIES}
    job_labels = {"framework": "pytorch", **series}
    if request.retries:
        # The operator then looks at how the container ends, and starts the job anew.
        job_labels |= {"fault-scheduling": "grace", "fault-retry-times": str(request.retries)}
    table: dict[str, Json] = {
        "hostPath": {
            "path": f"{_RANK_TABLES}/{request.namespace or 'default'}.{request.name}",
            "type": "DirectoryOrCreate",
        }
    }
    template = pod(
        request,
        container="ascend",
        command=launcher(request),
        labels=series,
        port=("ascendjob-port", 2222),
        rank_table=table,
    )

    def replicas(count: int) -> dict[str, Json]:
        return {
            "replicas": count,
            "restartPolicy": "Never",
            "template": with_restart_policy(template, "Never"),
        }

    specs: dict[str, Json] = {"Master": replicas(1)}
    if request.nnodes > 1:
        specs["Worker"] = replicas(request.nnodes - 1)
    scheduling: dict[str, Json] = {"minAvailable": request.nnodes, "queue": request.queue or "default"}
    return [
        {
            "apiVersion": "mindxdl.gitee.com/v1",
            "kind": "AscendJob",
            "metadata": metadata(request, job_labels),
            "spec": {
                "schedulerName": "volcano",
                "runPolicy": {"backoffLimit": request.retries, "schedulingPolicy": scheduling}
                if request.retries
                else {"schedulingPolicy": scheduling},
                "successPolicy": "AllWorkers",
                "replicaSpecs": specs,
            },
        }
    ]
