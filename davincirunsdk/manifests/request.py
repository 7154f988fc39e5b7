"""What a user may ask for in a manifest, whatever its kind: checked once, before a line is printed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, Union

from davincirunsdk.manifests import NPU

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json: TypeAlias = Union[str, int, bool, "Sequence[Json]", "Mapping[str, Json]", None]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_NAME_LENGTH = 40
"""Characters of an object's name: pods add theirs, and a label has at most 63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Storage for the pods.

    Attributes:
        source: As Kubernetes describes it, without a name.
        path: Where the pods see it.
        read_only: They may not write there.
    """

    source: Mapping[str, Json]
    path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One job of a cluster.

    Attributes:
        command: What `davincirun` is to run, as seen in the image.
        options: Options for `davincirun` in the pods.
        image: Image with this package and the training program; "" where there are no pods.
        nnodes: Pods, or nodes.
        npus: NPUs per pod; 0 for none.
        nproc_per_node: Workers per pod, None for one per NPU.
        name: Of the object, a DNS label.
        namespace: Where it goes, "" for the client's own.
        queue: Of the scheduler, "" for its default.
        npu_resource: Name of the NPUs as a resource.
        shm_size: Limit of `/dev/shm`, such as `16Gi`; "" for none but the pod's memory.
        volumes: Storage.
        env: Variables of the container.
        labels: Of the object and its pods.
        node_selector: Labels that the nodes must have.
        image_pull_secret: For the image, "" for none.
        service_account: Of the pods, "" for the default one.
        mindcluster: The product series as MindCluster names it in `ring-controller.atlas`, such as
            `ascend-910b`; "" without MindCluster.
        driver_mounts: Mount the host's driver, where no container runtime of Ascend does.
        retries: How often the platform starts the whole job again.
        grace_period: Seconds from SIGTERM to SIGKILL of the workers.
    """

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    image: str = ""
    nnodes: int = 1
    npus: int = 8
    nproc_per_node: int | None = None
    name: str = ""
    namespace: str = ""
    queue: str = ""
    npu_resource: str = NPU
    shm_size: str = ""
    volumes: tuple[Volume, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    image_pull_secret: str = ""
    service_account: str = ""
    mindcluster: str = ""
    driver_mounts: bool = False
    retries: int = 0
    grace_period: float = 15.0

    def __post_init__(self) -> None:
        if self.nnodes < 1 or self.npus < 0 or self.retries < 0:
            raise ValueError(
                f"nnodes is {self.nnodes}, npus {self.npus}, retries {self.retries}: "
                "expected at least 1, 0 and 0"
            )
        if not 0 <= self.grace_period < math.inf:
            raise ValueError(f"grace_period is {self.grace_period!r}: expected seconds, 0 or more")
        if not self.name:
            object.__setattr__(self, "name", name_after(self.command))
        for option, text in (
            ("name", self.name),
            ("namespace", self.namespace),
            ("image-pull-secret", self.image_pull_secret),
            ("service-account", self.service_account),
            ("queue", self.queue),
        ):
            _check_label(option, text)
        if len(self.name) > _NAME_LENGTH:
            raise ValueError(
                f"name {self.name!r} has {len(self.name)} characters: expected at most {_NAME_LENGTH}, "
                "since the pods' names are longer and must fit into 63"
            )
        if not _QUALIFIED.fullmatch(self.npu_resource) or "/" not in self.npu_resource:
            raise ValueError(f"npu-resource is {self.npu_resource!r}: expected a name such as {NPU}")
        if self.shm_size and not _QUANTITY.fullmatch(self.shm_size):
            raise ValueError(f"shm-size is {self.shm_size!r}: expected an amount such as 16Gi")
        for option, pairs in (("label", self.labels), ("node-selector", self.node_selector)):
            for name, value in pairs.items():
                if not _QUALIFIED.fullmatch(name) or not _VALUE.fullmatch(value) or len(value) > 63:
                    raise ValueError(
                        f"{option} {name}={value!r} is not one that Kubernetes takes: expected NAME=VALUE of "
                        "letters, digits, '-', '_' and '.', with a letter or digit at both ends"
                    )
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"env {name!r} is not a variable's name: expected letters, digits and '_'")
        if self.mindcluster:
            _check_label("mindcluster", self.mindcluster)


def volume(text: str) -> Volume:
    """Read a volume from the command line.

    Args:
        text: `/host/folder:/path`, `pvc:CLAIM:/path`, `nfs:SERVER:/folder:/path` or
            `configmap:NAME:/path`, each with `:ro` behind it where the pods may not write.

    Raises:
        ValueError: It is none of these.
    """
    body = text.removesuffix(":ro")
    parts = body.split(":")
    source: dict[str, Json] | None = None
    if parts[0] == "pvc" and len(parts) == 3:
        source = {"persistentVolumeClaim": {"claimName": parts[1]}}
    elif parts[0] == "configmap" and len(parts) == 3:
        source = {"configMap": {"name": parts[1]}}
    elif parts[0] == "nfs" and len(parts) == 4 and parts[2].startswith("/"):
        source = {"nfs": {"server": parts[1], "path": parts[2]}}
    elif len(parts) == 2 and parts[0].startswith("/"):
        source = {"hostPath": {"path": parts[0]}}
    if source is None or not all(parts) or not parts[-1].startswith("/"):
        raise ValueError(
            f"volume {text!r} is not understood: expected /host/folder:/path, pvc:CLAIM:/path, "
            "nfs:SERVER:/folder:/path or configmap:NAME:/path, with :ro behind it to forbid writing"
        )
    return Volume(source=source, path=parts[-1], read_only=body != text)


def name_after(command: Sequence[str]) -> str:
    """Name a job after its program, as Kubernetes allows: lower-case letters, digits and hyphens."""
    words = [word for word in command if not word.startswith("-")]
    program = next((word for word in words if word.endswith(".py")), words[0] if words else "")
    stem = program.rpartition("/")[2].removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).lstrip("-0123456789")[:_NAME_LENGTH].strip("-")
    return name or "training"


def merged(document: Json, patch: Json) -> Json:
    """Apply a JSON merge patch (RFC 7386): objects are merged, null removes, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def as_text(objects: Sequence[Mapping[str, Json]]) -> str:
    """Write objects as JSON for `kubectl apply -f -`: several of them as one list."""
    whole: Mapping[str, Json] = (
        objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    )
    return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"


def _check_label(option: str, text: str) -> None:
    if text and (not _LABEL.fullmatch(text) or len(text) > 63):
        raise ValueError(
            f"{option} {text!r} is not a name that Kubernetes takes: expected at most 63 lower-case letters, "
            "digits and hyphens, with a letter or digit at both ends"
        )
