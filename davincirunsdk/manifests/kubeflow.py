"""Kubeflow's jobs with one `davincirun` per pod: PyTorchJob (training operator v1) and TrainJob (trainer v2).

The pods learn their place from RANK and PET_*; the number of workers is an option, since the
operators would take the pod's CPUs for it. Fields as in `pytorch_types.go` of kubeflow.org/v1 and
`trainjob_types.go` of trainer.kubeflow.org/v1alpha1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.manifests.pod import launcher, literal, metadata, pod, variables, with_restart_policy

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Json, Request


def pytorch_job(request: Request) -> list[dict[str, Json]]:
    """Write a PyTorchJob: a Master and, with more than one pod, Workers."""
    template = pod(request, container="pytorch", command=launcher(request), port=("pytorchjob-port", 23456))

    def replicas(count: int) -> dict[str, Json]:
        return {"replicas": count, "restartPolicy": "Never", "template": template}

    specs: dict[str, Json] = {"Master": replicas(1)}
    if request.nnodes > 1:
        specs["Worker"] = replicas(request.nnodes - 1)
    policy: dict[str, Json] = {"backoffLimit": request.retries, "cleanPodPolicy": "None"}
    if request.queue:
        policy["schedulingPolicy"] = {"minAvailable": request.nnodes, "queue": request.queue}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata(request),
            "spec": {
                "nprocPerNode": str(_workers(request)),
                "runPolicy": policy,
                "pytorchReplicaSpecs": specs,
            },
        }
    ]


def train_job(request: Request) -> list[dict[str, Json]]:
    """Write a TrainJob and the runtime that it needs, since the trainer ships none for NPUs."""
    template = pod(request, container="node", command=[])
    runtime: dict[str, Json] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(request, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": request.nnodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": request.retries},
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {
                                    "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                                },
                                # A pod that fails is a failed job: retries are the whole set's.
                                "spec": {
                                    "backoffLimit": 0,
                                    "template": with_restart_policy(template, "Never"),
                                },
                            },
                        }
                    ],
                }
            },
        },
    }
    trainer: dict[str, Json] = {
        "image": request.image,
        "command": [literal(word) for word in launcher(request)],
        "numNodes": request.nnodes,
        "numProcPerNode": _workers(request),
    }
    if request.env:
        trainer["env"] = variables(request)
    if request.npus:
        trainer["resourcesPerNode"] = {
            "limits": {request.npu_resource: request.npus},
            "requests": {request.npu_resource: request.npus},
        }
    job: dict[str, Json] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(request),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": request.name,
            },
            "trainer": trainer,
        },
    }
    return [runtime, job]


def _workers(request: Request) -> int:
    return request.nproc_per_node or request.npus or 1
