"""Jobs of clusters that start one launcher per node, written as their manifests: one file per kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Json, Request

_NOT_FOR = {
    "volcano": (),
    "ascendjob": (),
    "pytorchjob": ("mindcluster",),
    "trainjob": ("mindcluster", "queue"),
    "rayjob": ("mindcluster",),
    "slurm": (
        "image", "namespace", "volumes", "labels", "node_selector", "image_pull_secret", "service_account",
        "shm_size", "mindcluster", "driver_mounts",
    ),
}  # fmt: skip
"""What a kind has no place for."""

NPU = "huawei.com/Ascend910"
"""As the Ascend device plugin calls whole NPUs of the training series."""

KINDS = ("volcano", "ascendjob", "pytorchjob", "trainjob", "rayjob", "slurm")


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
    from davincirunsdk.manifests import ascendjob, kubeflow, rayjob, slurm, volcano
    from davincirunsdk.manifests.request import as_text, merged

    for name in _NOT_FOR[kind]:
        if getattr(request, name):
            option = {"volumes": "volume", "labels": "label"}.get(name, name.replace("_", "-"))
            raise ValueError(f"--{option} has no place in a manifest of kind {kind}: leave it out")
    if kind == "slurm":
        if patch is not None:
            raise ValueError("--manifest-patch is for Kubernetes: a batch file is not JSON")
        return slurm.batch_file(request)
    if not request.image.strip():
        raise ValueError("image is empty: expected one with davincirunsdk and the training program")
    write = {
        "volcano": volcano.objects,
        "ascendjob": ascendjob.objects,
        "pytorchjob": kubeflow.pytorch_job,
        "trainjob": kubeflow.train_job,
        "rayjob": rayjob.objects,
    }[kind]
    *others, job = write(request)
    if patch is not None:
        if not isinstance(patch, dict):
            raise ValueError("the manifest patch is not a JSON object: expected fields of the job")
        changed = merged(job, patch)
        assert isinstance(changed, dict)
        job = changed
    return as_text([*others, job])
