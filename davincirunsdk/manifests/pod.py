"""The pod that all kinds of Kubernetes jobs share: one `davincirun` in a container."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from davincirunsdk.manifests.request import Json, Request

SAVING = 15
"""Seconds from the workers' SIGKILL to the pod's, for logs to be written."""

HOPELESS = {
    2: "wrong arguments",
    3: "wrong rank table, platform or folder",
    126: "no program",
    127: "no such command",
}
"""Exit codes of davincirun that the next try would end with, too."""

_DRIVER_FOLDERS = ("/usr/local/Ascend/driver", "/usr/local/Ascend/add-ons", "/usr/local/dcmi")
_RANK_TABLE = "/user/serverid/devindex/config"
"""Where MindCluster's jobs find their rank table."""


def termination_seconds(request: Request) -> int:
    """Say how long a pod may take from its SIGTERM to its SIGKILL."""
    return math.ceil(request.grace_period) + SAVING


def launcher(request: Request, *own: str) -> list[str]:
    """Words of `davincirun` on a node: options of this kind of job, the user's, the command."""
    return ["davincirun", *own, *request.options, *request.command]


def literal(text: str) -> str:
    """Write a text so that Kubernetes, which takes `$(NAME)` for a variable, leaves it as it is."""
    return text.replace("$", "$$")


def variables(request: Request) -> list[Json]:
    """The user's variables, as a container has them."""
    return [{"name": name, "value": literal(value)} for name, value in request.env.items()]


def metadata(request: Request, labels: Mapping[str, str] | None = None) -> dict[str, Json]:
    """Name, namespace and labels of the job itself."""
    data: dict[str, Json] = {"name": request.name}
    if request.namespace:
        data["namespace"] = request.namespace
    if every := {**(labels or {}), **request.labels}:
        data["labels"] = every
    return data


def pod(
    request: Request,
    *,
    container: str,
    command: Sequence[str],
    labels: Mapping[str, str] | None = None,
    port: tuple[str, int] | None = None,
    npus: int | None = None,
    rank_table: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """Describe a pod as a template.

    Args:
        request: What the user asked for.
        container: Name of the container, by which operators find it.
        command: Its words, empty for the image's own.
        labels: Further labels of the pod.
        port: Name and number that the operator looks for.
        npus: NPUs of this pod, by default the request's.
        rank_table: Volume source of the rank table that MindCluster writes.
    """
    count = request.npus if npus is None else npus
    shm: dict[str, Json] = {"medium": "Memory"}
    if request.shm_size:
        shm["sizeLimit"] = request.shm_size
    # Collectives between workers of a node use more shared memory than a pod's 64 MiB.
    volumes: list[Json] = [{"name": "shm", "emptyDir": shm}]
    mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if rank_table is not None:
        # The operator looks for a volume of this name.
        volumes.append({"name": "ranktable", **rank_table})
        mounts.append({"name": "ranktable", "mountPath": _RANK_TABLE, "readOnly": True})
    if request.driver_mounts:
        for place, folder in enumerate(_DRIVER_FOLDERS):
            volumes.append({"name": f"driver-{place}", "hostPath": {"path": folder}})
            mounts.append({"name": f"driver-{place}", "mountPath": folder, "readOnly": True})
    for place, volume in enumerate(request.volumes):
        volumes.append({"name": f"volume-{place}", **volume.source})
        mount: dict[str, Json] = {"name": f"volume-{place}", "mountPath": volume.path}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    main: dict[str, Json] = {"name": container, "image": request.image, "volumeMounts": mounts}
    if command:
        main["command"] = [literal(word) for word in command]
    if request.env:
        main["env"] = variables(request)
    if port is not None:
        main["ports"] = [{"name": port[0], "containerPort": port[1]}]
    if count:
        main["resources"] = {
            "limits": {request.npu_resource: count},
            "requests": {request.npu_resource: count},
        }
    spec: dict[str, Json] = {
        "terminationGracePeriodSeconds": termination_seconds(request),
        "containers": [main],
        "volumes": volumes,
    }
    if request.node_selector:
        spec["nodeSelector"] = dict(request.node_selector)
    if request.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": request.image_pull_secret}]
    if request.service_account:
        spec["serviceAccountName"] = request.service_account
    template: dict[str, Json] = {"spec": spec}
    if every := {**(labels or {}), **request.labels}:
        template["metadata"] = {"labels": every}
    return template


def with_restart_policy(template: Mapping[str, Json], policy: str) -> dict[str, Json]:
    """Give a pod's restart policy; where a kind has its own field for it, the pod must have none."""
    spec = template["spec"]
    assert isinstance(spec, dict)
    return {**template, "spec": {"restartPolicy": policy, **spec}}
