"""Jobs of clusters that start one launcher per node, written as their manifests: one file per kind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Json, Request

_KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "volcano": ("volcano", "objects", ()),
    "ascendjob": ("ascendjob", "objects", ()),
    "pytorchjob": ("kubeflow", "pytorch_job", ("mindcluster",)),
    "trainjob": ("kubeflow", "train_job", ("mindcluster", "queue")),
    "rayjob": ("rayjob", "objects", ("mindcluster",)),
    "slurm": ("slurm", "batch_file", (
        "image", "namespace", "volumes", "labels", "node_selector", "image_pull_secret", "service_account",
        "shm_size", "mindcluster", "driver_mounts",
    )),
}  # fmt: skip
"""For each kind the file and the function that write it, and what it has no place for."""

KINDS = tuple(_KINDS)

NPU = "huawei.com/Ascend910"
"""As the Ascend device plugin calls whole NPUs of the training series."""


def manifest(kind: str, request: Request, patch: Json = None) -> str:
    """Write a job for a cluster; starts nothing.

    Args:
        kind: One of `KINDS`.
        request: What to run, and where.
        patch: A JSON merge patch for the job itself, None for none.

    Returns:
        JSON for `kubectl apply -f -`; for `slurm` a batch file for `sbatch`.

    Raises:
        ValueError: Something is missing or not possible with this kind.
    """
    from davincirunsdk.manifests.request import as_text, merged

    file, function, not_for = _KINDS[kind]
    for name in not_for:
        if getattr(request, name):
            option = {"volumes": "volume", "labels": "label"}.get(name, name.replace("_", "-"))
            raise ValueError(f"--{option} has no place in a manifest of kind {kind}: leave it out")
    if kind == "slurm":
        if patch is not None:
            raise ValueError("--manifest-patch is for Kubernetes: a batch file is not JSON")
    elif not request.image.strip():
        raise ValueError("image is empty: expected one with davincirunsdk and the training program")
    written = getattr(import_module(f"davincirunsdk.manifests.{file}"), function)(request)
    if isinstance(written, str):
        return written
    *others, job = written
    if patch is not None:
        if not isinstance(patch, dict):
            raise ValueError("the manifest patch is not a JSON object: expected fields of the job")
        changed = merged(job, patch)
        assert isinstance(changed, dict)
        job = changed
    return as_text([*others, job])
