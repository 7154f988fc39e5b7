"""The Volcano job that `davincirun --manifest volcano` prints."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from davincirunsdk.manifests.volcano import volcano_job

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
# The part of a Job that is Volcano's own, after its public CRD (volcano-sh/volcano,
# config/crd/volcano/bases/batch.volcano.sh_jobs.yaml) and the rules of its admission; the pods' part is
# held against Kubernetes' own schemas.
JOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata=closed(("name",), name=NAME, namespace=NAME),
    spec=closed(
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
                template={"type": "object"},
            ),
        },
    ),
)


def check(text: str) -> dict[str, Any]:
    """Read a manifest and hold it against the schemas."""
    job: dict[str, Any] = yaml.safe_load(text)
    jsonschema.Draft202012Validator(JOB).validate(job)
    for task in job["spec"]["tasks"]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **task["template"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)
    return job


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
    "word",
    [
        "yes",
        "0x10",
        "a: b",
        "# no",
        "- x",
        "'",
        '"',
        "\\",
        "ünï",
        "a\nb",
        "",
        "~",
        "1e3",
        "{x}",
        "2026-01-01",
    ],
)
def test_no_word_of_the_command_changes_its_meaning(word: str) -> None:
    """Whatever a word looks like to YAML, the pod gets it as it was given."""
    job = check(volcano_job(["train.py", word], image="i", nnodes=1))
    assert job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"][-1] == word


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train.py"], "train"),
        (["scripts/Train_GPT.py", "--x", "other.py"], "train-gpt"),
        (["-m", "pkg.train"], "pkg-train"),
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
