"""A Volcano job that runs one `davincirun` per pod, as YAML for `kubectl apply -f -`.

Inside a pod nothing is told by options: number of nodes, place and master come from the variables
of Volcano's `svc` and `env` plugins. A pod ends with the exit code of its `davincirun`, which is
what the job's policies look at. Fields as in Volcano's CRD `jobs.batch.volcano.sh`, v1alpha1.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Yaml: TypeAlias = Union[str, int, "Sequence[Yaml]", "Mapping[str, Yaml]"]

_NPU = "huawei.com/Ascend910"
"""As the Ascend device plugin calls whole NPUs of the training series."""

_HOPELESS = {
    2: "wrong arguments",
    3: "wrong rank table, platform or folder",
    126: "no program",
    127: "no such command",
}
"""Exit codes of davincirun that the next try would end with, too."""

_SAVING = 15
"""Seconds from the workers' SIGKILL to the pod's, for logs to be written."""


def volcano_job(
    command: Sequence[str],
    *,
    image: str,
    nnodes: int,
    npus: int = 8,
    options: Sequence[str] = (),
    retries: int = 0,
    grace_period: float = 15.0,
) -> str:
    """Write the manifest.

    Args:
        command: What `davincirun` is to run, as seen in the image.
        image: Image with this package and the training program.
        nnodes: Pods.
        npus: NPUs per pod; 0 for none.
        options: Options for `davincirun` in the pods.
        retries: How often the whole job is started again when a pod fails; 0 ends it at once.
        grace_period: Seconds from SIGTERM to SIGKILL of the workers.

    Returns:
        The YAML text.

    Raises:
        ValueError: An argument has no sense.
    """
    if not image.strip():
        raise ValueError("image is empty: expected one with davincirunsdk and the training program")
    if nnodes < 1 or npus < 0 or retries < 0:
        raise ValueError(f"nnodes is {nnodes}, npus {npus}, retries {retries}: expected at least 1, 0 and 0")
    if not 0 <= grace_period < math.inf:
        raise ValueError(f"grace_period is {grace_period!r}: expected seconds, 0 or more")
    name = _job_name(command)
    on_failure = "RestartJob" if retries else "AbortJob"
    container: dict[str, Yaml] = {
        "name": "worker",
        "image": image,
        "command": ["davincirun", *options, *command],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if npus:
        container["resources"] = {"limits": {_NPU: npus}, "requests": {_NPU: npus}}
    spec: dict[str, Yaml] = {
        "schedulerName": "volcano",
        # All pods or none: a part of the job would only wait for the rest.
        "minAvailable": nnodes,
        "maxRetry": retries,
        "plugins": {"env": [], "svc": []},
        # The first that fits counts.
        "policies": [
            *({"exitCode": code, "action": "AbortJob"} for code in _HOPELESS),
            {"event": "PodFailed", "action": on_failure},
            {"event": "PodEvicted", "action": on_failure},
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "tasks": [
            {
                "name": "worker",
                "replicas": nnodes,
                "template": {
                    "spec": {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": math.ceil(grace_period) + _SAVING,
                        "containers": [container],
                        # Collectives between workers of a node use more shared memory than a pod's 64 MiB.
                        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                    }
                },
            }
        ],
    }
    job: dict[str, Yaml] = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": spec,
    }
    return "\n".join(_lines(job, "")) + "\n"


def _job_name(command: Sequence[str]) -> str:
    """Name the job after the program; a name may have lower-case letters, digits and hyphens."""
    words = [word for word in command if not word.startswith("-")]
    program = next((word for word in words if word.endswith(".py")), words[0] if words else "")
    stem = program.rpartition("/")[2].removesuffix(".py").lower()
    # Pods are called <job>-worker-<index>, and a label has at most 63 characters.
    return re.sub(r"[^a-z0-9]+", "-", stem)[:40].strip("-") or "training"


def _lines(value: Yaml, indent: str) -> Iterator[str]:
    """Write block YAML: mappings and lists of them one entry a line, all else as JSON, a part of YAML."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict) and inner:
                yield f"{indent}{key}:"
                yield from _lines(inner, indent + "  ")
            elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
                yield f"{indent}{key}:"
                for item in inner:
                    first, *rest = _lines(item, indent + "    ")
                    yield f"{indent}  - {first.strip()}"
                    yield from rest
            else:
                yield f"{indent}{key}: {_scalar(inner)}"


def _scalar(value: Yaml) -> str:
    # Plain where no YAML reader could take it for anything but this text.
    if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Za-z]{4,}|[a-z]+\.[a-z.]+/v1alpha1", value):
        return value
    return json.dumps(value, ensure_ascii=False)
