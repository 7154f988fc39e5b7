"""The manifests that `davincirun --manifest` prints: after each CRD's schema, and without injection."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from davincirunsdk.manifests import manifest
from davincirunsdk.manifests.request import Request, merged, volume

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = ("*", "PodPending", "PodRunning", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "OutOfSync",
          "CommandIssued", "JobUpdated", "TaskFailed")  # fmt: skip
ACTIONS = ("AbortJob", "RestartJob", "RestartTask", "RestartPod", "RestartPartition", "TerminateJob",
           "CompleteJob", "ResumeJob")  # fmt: skip
COUNT = {"type": "integer", "minimum": 0}
NAME = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}


def closed(required: tuple[str, ...], **properties: object) -> dict[str, object]:
    """An object with no other fields than these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


POLICIES = {
    "type": "array",
    "items": {
        **closed(
            ("action",),
            action={"enum": ACTIONS},
            event={"enum": EVENTS},
            events={"type": "array", "items": {"enum": EVENTS}},
            exitCode={"type": "integer", "not": {"const": 0}},
            timeout={"type": "string"},
        ),
        "oneOf": [{"required": ["event"]}, {"required": ["events"]}, {"required": ["exitCode"]}],
    },
}
# Closed schemas of the jobs' own parts, written after the public CRDs and their types; the pods' part is
# held against Kubernetes' own schemas.
TEMPLATE = {"type": "object"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
METADATA = closed(("name",), name=NAME, namespace=NAME, labels=LABELS)
POLICY = {"enum": ["Never", "OnFailure", "Always", "ExitCode"]}
REPLICAS = closed(("template",), replicas=COUNT, restartPolicy=POLICY, template=TEMPLATE)


def of_kind(version: str, kind: str, spec: object) -> dict[str, object]:
    """The schema of an object with a spec."""
    return closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


SCHEDULING = closed((), minAvailable=COUNT, queue={"type": "string"}, priorityClass={"type": "string"})
RESOURCES = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}
GROUP: dict[str, object] = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": TEMPLATE,
}
SCHEMAS = {
    "ConfigMap": closed(
        ("apiVersion", "kind", "metadata", "data"),
        apiVersion={"const": "v1"},
        kind={"const": "ConfigMap"},
        metadata=METADATA,
        data={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    "Job": of_kind(
        "batch.volcano.sh/v1alpha1",
        "Job",
        closed(
            ("tasks",),
            maxRetry=COUNT,
            minAvailable=COUNT,
            minSuccess={"type": "integer", "minimum": 1},
            plugins={
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": "string"}},
            },
            policies=POLICIES,
            priorityClassName={"type": "string", "maxLength": 253},
            queue={"type": "string", "maxLength": 253},
            schedulerName={"type": "string", "maxLength": 63},
            tasks={
                "type": "array",
                "minItems": 1,
                "items": closed(
                    ("name", "replicas", "template"),
                    name=NAME,
                    replicas=COUNT,
                    minAvailable=COUNT,
                    maxRetry=COUNT,
                    policies=POLICIES,
                    template=TEMPLATE,
                ),
            },
        ),
    ),
    "AscendJob": of_kind(
        "mindxdl.gitee.com/v1",
        "AscendJob",
        closed(
            ("replicaSpecs",),
            schedulerName={"type": "string"},
            successPolicy={"enum": ["", "AllWorkers"]},
            runPolicy=closed((), backoffLimit=COUNT, schedulingPolicy=SCHEDULING),
            replicaSpecs=closed(("Master",), Master=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "PyTorchJob": of_kind(
        "kubeflow.org/v1",
        "PyTorchJob",
        closed(
            ("pytorchReplicaSpecs",),
            nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
            runPolicy=closed(
                (),
                backoffLimit=COUNT,
                cleanPodPolicy={"enum": ["None", "All", "Running"]},
                schedulingPolicy=SCHEDULING,
            ),
            pytorchReplicaSpecs=closed(("Master",), Master=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "TrainJob": of_kind(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        closed(
            ("runtimeRef", "trainer"),
            runtimeRef=closed(
                ("name",), name=NAME, kind={"const": "TrainingRuntime"}, apiGroup={"type": "string"}
            ),
            trainer=closed(
                (),
                image={"type": "string"},
                command={"type": "array", "items": {"type": "string"}},
                numNodes={"type": "integer", "minimum": 1},
                numProcPerNode={"type": "integer", "minimum": 1},
                env={"type": "array"},
                resourcesPerNode=closed((), limits=RESOURCES, requests=RESOURCES),
            ),
        ),
    ),
    "TrainingRuntime": of_kind(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        closed(
            ("template",),
            mlPolicy=closed((), numNodes=COUNT, torch=closed(())),
            template=closed(
                ("spec",),
                spec=closed(
                    ("replicatedJobs",),
                    failurePolicy=closed((), maxRestarts=COUNT),
                    replicatedJobs={
                        "type": "array",
                        "items": closed(
                            ("name", "template"),
                            name={"const": "node"},
                            template=closed(
                                ("spec",),
                                metadata=closed((), labels=LABELS),
                                spec=closed(("template",), backoffLimit=COUNT, template=TEMPLATE),
                            ),
                        ),
                    },
                ),
            ),
        ),
    ),
    "RayJob": of_kind(
        "ray.io/v1",
        "RayJob",
        closed(
            ("entrypoint", "rayClusterSpec"),
            entrypoint={"type": "string"},
            shutdownAfterJobFinishes={"type": "boolean"},
            ttlSecondsAfterFinished=COUNT,
            backoffLimit=COUNT,
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            rayClusterSpec=closed(
                ("headGroupSpec", "workerGroupSpecs"),
                headGroupSpec=closed(("rayStartParams", "template"), **GROUP),
                workerGroupSpecs={
                    "type": "array",
                    "items": closed(
                        ("groupName", "rayStartParams", "template"),
                        groupName=NAME,
                        replicas=COUNT,
                        minReplicas=COUNT,
                        maxReplicas=COUNT,
                        **GROUP,
                    ),
                },
            ),
        ),
    ),
}
NAMED_CONTAINER = {"AscendJob": "ascend", "PyTorchJob": "pytorch", "TrainingRuntime": "node"}
KUBERNETES = ["volcano", "ascendjob", "pytorchjob", "trainjob", "rayjob"]


def templates(value: object) -> list[dict[str, Any]]:
    """Every pod template of an object: what has containers in its spec."""
    if isinstance(value, list):
        return [found for one in value for found in templates(one)]
    if not isinstance(value, dict):
        return []
    spec = value.get("spec")
    if isinstance(spec, dict) and "containers" in spec:
        return [value]
    return [found for one in value.values() for found in templates(one)]


def check(text: str) -> dict[str, Any]:
    """Read a manifest, hold all its objects against their schemas, and return the job itself."""
    whole: dict[str, Any] = json.loads(text)
    objects = whole["items"] if whole["kind"] == "List" else [whole]
    for one in objects:
        jsonschema.Draft202012Validator(SCHEMAS[one["kind"]]).validate(one)
        for template in templates(one):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
            kubernetes_validate.validate(pod, "1.30", strict=True)
            if one["kind"] in NAMED_CONTAINER:
                assert template["spec"]["containers"][0]["name"] == NAMED_CONTAINER[one["kind"]]
    job: dict[str, Any] = objects[-1]
    return job


def as_kubernetes_reads(text: str) -> str:
    """What a container gets of a word: `$$` is a dollar sign, `$(NAME)` a variable's value."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else "EXPANDED", text)


def volcano_job(command: list[str], **request: Any) -> str:
    """The Volcano manifest of a command."""
    return manifest("volcano", Request(command=tuple(command), **request))


FULL: dict[str, Any] = {
    "namespace": "team",
    "shm_size": "16Gi",
    "volumes": (volume("/data:/data:ro"), volume("pvc:claim:/out"), volume("nfs:server:/export:/nfs")),
    "env": {"HF_HOME": "/data/a b"},
    "labels": {"example.org/team": "vision"},
    "node_selector": {"host-arch": "huawei-arm"},
    "image_pull_secret": "registry",
    "service_account": "trainer",
    "driver_mounts": True,
    "retries": 3,
}


@pytest.mark.parametrize("npus", [0, 8])
@pytest.mark.parametrize("nnodes", [1, 4])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize("kind", KUBERNETES)
def test_each_kind_obeys_its_schema(kind: str, full: bool, nnodes: int, npus: int) -> None:
    """With and without everything that can be asked for, all objects are ones that the cluster takes."""
    asked = dict(FULL) if full else {}
    if full and kind != "trainjob":
        asked["queue"] = "training"
    if full and kind in ("volcano", "ascendjob"):
        asked["mindcluster"] = "ascend-910b"
    request = Request(
        command=("train.py", "--lr", "0.1"),
        image="registry/team/train:1.0",
        nnodes=nnodes,
        npus=npus,
        nproc_per_node=npus or 2,
        **asked,
    )
    text = manifest(kind, request)
    job = check(text)
    pods = sum(
        part.get("replicas", 0)
        for part in (
            *job["spec"].get("tasks", []),
            *job["spec"].get("replicaSpecs", {}).values(),
            *job["spec"].get("pytorchReplicaSpecs", {}).values(),
            *job["spec"].get("rayClusterSpec", {}).get("workerGroupSpecs", []),
        )
    )
    assert (pods or job["spec"]["trainer"]["numNodes"]) == nnodes
    assert ('"huawei.com/Ascend910": 8' in text) is bool(npus)
    if full:
        for word in ("16Gi", "claim", "/export", "huawei-arm", "registry", "trainer", "vision", "a b"):
            assert word in text


@pytest.mark.parametrize("kind", [*KUBERNETES, "slurm"])
@settings(max_examples=25, deadline=None)
@example(word="$(HOSTNAME) $$ `id` $((1))")
@given(word=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
def test_no_word_changes_its_meaning_in_any_kind(kind: str, word: str) -> None:
    """Whatever a word holds, the nodes get it as it was given, and nothing else comes of it."""
    request = Request(
        command=("train.py", word), image="" if kind == "slurm" else "i", env={"VALUE": word}, npus=1
    )
    text = manifest(kind, request)
    if kind == "slurm":
        done = subprocess.run(
            ["bash", "-c", text.replace("exec srun", "printf '%s\\0' \"$VALUE\"; printf '%s\\0'")],
            capture_output=True,
            check=True,
        )
        value, *words, _ = done.stdout.decode().split("\0")
        assert (value, words[-2:]) == (word, ["train.py", word])
        return
    job = check(text)
    if kind == "rayjob":
        assert shlex.split(job["spec"]["entrypoint"])[-2:] == ["train.py", word]
    else:
        commands = [
            container["command"]
            for template in templates(job)
            for container in template["spec"]["containers"]
        ] or [job["spec"]["trainer"]["command"]]
        for command in commands:
            assert [as_kubernetes_reads(one) for one in command[-2:]] == ["train.py", word]
        assert all(
            as_kubernetes_reads(variable["value"]) == word
            for template in templates(job)
            for container in template["spec"]["containers"]
            for variable in container["env"]
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "Has_Upper"}, "name 'Has_Upper' is not a name"),
        ({"name": "x" * 41}, "has 41 characters"),
        ({"namespace": "a b"}, "namespace 'a b'"),
        ({"npu_resource": "npu"}, "expected a name such as huawei.com/Ascend910"),
        ({"shm_size": "lots"}, "shm-size is 'lots'"),
        ({"labels": {"a": "b c"}}, "label a='b c'"),
        ({"labels": {"a": "b\n"}}, "label a="),
        ({"node_selector": {"../x": "y"}}, "node-selector ../x"),
        ({"env": {"A B": "c"}}, "env 'A B' is not a variable's name"),
        ({"mindcluster": "A3 "}, "mindcluster 'A3 '"),
        ({"retries": -1}, "retries -1"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(wrong: dict[str, Any], said: str) -> None:
    """A name, label, amount or count that no cluster takes is an error that shows it."""
    with pytest.raises(ValueError, match=re.escape(said)):
        Request(command=("train.py",), image="i", **wrong)


@pytest.mark.parametrize("text", ["data", "data:/x", "/a", "/a:b", "pvc::/x", "pvc:x:y", "nfs:s:e:/x", ""])
def test_a_volume_that_is_none(text: str) -> None:
    """What is not of one of the four forms is refused with all of them."""
    with pytest.raises(ValueError, match="expected /host/folder:/path"):
        volume(text)


@pytest.mark.parametrize(
    ("kind", "asked", "option"),
    [
        ("slurm", {"image": "i"}, "--image"),
        ("slurm", {"volumes": (volume("/a:/b"),)}, "--volume"),
        ("trainjob", {"image": "i", "queue": "q"}, "--queue"),
        ("rayjob", {"image": "i", "mindcluster": "ascend-910b"}, "--mindcluster"),
    ],
)
def test_what_a_kind_has_no_place_for(kind: str, asked: dict[str, Any], option: str) -> None:
    """An option that would be left aside is refused by its name."""
    with pytest.raises(ValueError, match=f"{option} has no place in a manifest of kind {kind}"):
        manifest(kind, Request(command=("train.py",), **asked))


def test_mindcluster_fills_the_table_of_a_volcano_job() -> None:
    """The ConfigMap that the operator fills comes first, is labelled, and is mounted in every pod."""
    whole = json.loads(volcano_job(["train.py"], image="i", nnodes=2, mindcluster="ascend-910b"))
    config, job = whole["items"]
    assert config["metadata"]["name"] == "rings-config-train"
    assert json.loads(config["data"]["hccl.json"]) == {"status": "initializing"}
    (template,) = templates(job)
    for labelled in (config, job, template):
        assert labelled["metadata"]["labels"] == {"ring-controller.atlas": "ascend-910b"}
    assert {"name": "ranktable", "configMap": {"name": "rings-config-train"}} in template["spec"]["volumes"]


def test_a_patch_says_what_no_option_says(tmp_path: Path) -> None:
    """Objects are merged, null removes; the result is what the command prints."""
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": None, "d": 3}}) == {"a": {"c": 2, "d": 3}}
    patch = tmp_path / "patch.json"
    patch.write_text(json.dumps({"spec": {"priorityClassName": "high", "maxRetry": None}}))
    done = subprocess.run(
        [
            sys.executable, "-m", "davincirunsdk", "--manifest", "volcano", "--image", "i",
            "--manifest-patch", patch, "train.py",
        ],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    spec = check(done.stdout)["spec"]
    assert spec["priorityClassName"] == "high"
    assert "maxRetry" not in spec


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, 0, False), (1, 0, True), (1, 2, False), (3, 0, False)]
)
def test_the_batch_file_requeues_what_a_retry_may_cure(
    code: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    """It ends with the step's code, and asks for a requeue below the limit, never after usage errors."""
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    for tool in ("srun", "scontrol"):
        (tmp_path / tool).chmod(0o755)
    text = manifest("slurm", Request(command=("train.py",), nnodes=2, retries=2))
    done = subprocess.run(
        ["bash", "-c", text],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(restarts),
        },
        check=False,
    )
    assert done.returncode == code
    assert (tmp_path / "asked").exists() is requeued


@pytest.mark.parametrize(
    ("retries", "action"), [(0, "AbortJob"), (3, "RestartJob")], ids=["without retries", "with retries"]
)
def test_a_failed_pod_ends_or_restarts_the_job(retries: int, action: str) -> None:
    """The manifest obeys the public schemas, and its policies do with a failed pod what was asked for."""
    job = check(volcano_job(["train.py"], image="registry/team/train:1.0", nnodes=4, retries=retries))
    spec = job["spec"]
    assert (spec["minAvailable"], spec["maxRetry"], spec["tasks"][0]["replicas"]) == (4, retries, 4)
    by_event = {policy["event"]: policy["action"] for policy in spec["policies"] if "event" in policy}
    assert by_event == {"PodFailed": action, "PodEvicted": action, "TaskCompleted": "CompleteJob"}


def test_what_no_retry_can_mend_ends_the_job_first() -> None:
    """Exit codes for wrong arguments, tables and commands come before the rule for any failure."""
    policies = check(volcano_job(["train.py"], image="i", nnodes=2, retries=3))["spec"]["policies"]
    first = policies.index({"event": "PodFailed", "action": "RestartJob"})
    assert {policy["exitCode"] for policy in policies[:first]} == {2, 3, 126, 127}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train.py"], "train"),
        (["scripts/Train_GPT.py", "--x", "other.py"], "train-gpt"),
        (["-m", "pkg.train"], "pkg-train"),
        (["2d.py"], "d"),
        (["___"], "training"),
        (["x" * 80], "x" * 40),
    ],
)
def test_the_job_is_named_after_the_program(command: list[str], name: str) -> None:
    """The name follows Kubernetes' rules for any program."""
    assert check(volcano_job(command, image="i", nnodes=1))["metadata"]["name"] == name


def test_the_command_prints_it() -> None:
    """The pods get the options that make sense there, before the command, and none of the manifest."""
    done = subprocess.run(
        [
            sys.executable, "-m", "davincirunsdk", "--manifest", "volcano", "--nnodes", "2", "--image", "i",
            "--nproc-per-node", "4", "--grace-period", "60", "--quiet", "--prefix", "time,rank",
            "-m", "pkg.train", "--lr", "0.1",
        ],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    pod = check(done.stdout)["spec"]["tasks"][0]["template"]["spec"]
    words = pod["containers"][0]["command"]
    assert words[0] == "davincirun"
    assert words[-3:] == ["pkg.train", "--lr", "0.1"]
    options = " ".join(words[1:-3])
    for option in ("--nproc-per-node 4", "--grace-period 60.0", "--quiet", "--prefix time,rank", "--module"):
        assert option in options
    assert "--nnodes" not in options
    assert "--image" not in options
    assert pod["containers"][0]["resources"]["limits"] == {"huawei.com/Ascend910": 4}
    assert pod["terminationGracePeriodSeconds"] > 60


def test_pods_without_npus_are_asked_for_as_with_an_engine() -> None:
    """With `--resource CPU` a pod asks for no NPU, and starts as many workers as it is told."""
    done = subprocess.run(
        [
            sys.executable, "-m", "davincirunsdk", "--manifest", "volcano", "--nnodes", "2", "--image", "i",
            "--resource", "CPU", "--nproc-per-node", "4", "train.py",
        ],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    (container,) = check(done.stdout)["spec"]["tasks"][0]["template"]["spec"]["containers"]
    assert container["command"] == ["davincirun", "--nproc-per-node", "4", "train.py"]
    assert "resources" not in container


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--manifest needs --image"),
        (["--image", " "], "image is empty"),
        (["--image", "i", "--grace-period", "inf"], "grace_period is inf"),
        (["--image", "i", "--grace-period", "nan"], "grace_period is nan"),
        (["--image", "i", "--engine", "ray"], "--engine has no use with --manifest"),
        (["--image", "i", "--node-rank", "1"], "--node-rank has no use with --manifest"),
        (["--image", "i", "--label", "x"], "is not of the form NAME=VALUE"),
        (["--image", "i", "--volume", "x"], "is not understood"),
        (["--image", "i", "--manifest-patch", "/dev/null"], "cannot be read as JSON"),
        (["--image", "i", "--manifest-patch", "nowhere.json"], "does not exist"),
        (["--image", "i", "--resource", "CPU"], "--resource CPU needs --nproc-per-node"),
    ],
)
def test_what_makes_no_job_is_refused(options: list[str], said: str) -> None:
    """What is missing, has no sense or would be wrong in each pod is a usage error that names the option."""
    done = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", "--manifest", "volcano", *options, "train.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
