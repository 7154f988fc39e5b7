"""Slurm's variables, and its compressed node lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk.errors import PlatformError
from davincirunsdk.platforms import detect, slurm
from davincirunsdk.platforms.slurm import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,07-09],m5", ["n1", "n2", "n3", "n07", "n08", "n09", "m5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]-ib", ["n008-ib", "n009-ib", "n010-ib"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("gpu-a,gpu-b[3]", ["gpu-a", "gpu-b3"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    """Node lists are expanded as scontrol does: in order, leading zeros kept."""
    assert expand(text) == tuple(names)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("n[1-3", "a bracket that is not closed"),
        ("n1-3]", "brackets that do not match"),
        ("n[[1]]", "brackets that do not match"),
        ("n[3-1]", "a range that runs backwards"),
        ("n[a-b]", "a bracket with something else than numbers and ranges"),
        ("n[]", "a bracket with something else than numbers and ranges"),
        ("n[1-99999999]", "more than 1000000 nodes"),
    ],
)
def test_what_cannot_be_expanded(text: str, found: str) -> None:
    """A list that cannot be read is an error that says why and where it stands."""
    with pytest.raises(PlatformError) as caught:
        expand(text, variable="SLURM_JOB_NODELIST")
    assert str(caught.value) == (
        f"found {found} in SLURM_JOB_NODELIST; expected a node list such as n[1-3,07-09],m5"
    )


@given(st.text("n01[-],9", max_size=12))
def test_any_text(text: str) -> None:
    """Any text is expanded, or is an error of ours."""
    try:
        names = expand(text)
    except PlatformError:
        return
    assert all(name and "[" not in name for name in names)


JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[02-04]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
}


def test_job() -> None:
    """Nodes, own place and the first node's address are taken from the job."""
    assert detect(JOB).NAME == "slurm"
    site = slurm.site(JOB)
    assert (site.hosts, site.nnodes, site.node_rank) == (("n01", "n02", "n03", "n04"), 4, 2)
    assert site.master_addr == "n01"


def test_step_on_fewer_nodes() -> None:
    """A step may use fewer nodes than its job: then those of the step count."""
    site = slurm.site(STEP)
    assert (site.hosts, site.nnodes, site.master_addr) == (("n02", "n03", "n04"), 3, "n02")


def test_all_nodes_agree_on_the_port() -> None:
    """The port comes from the job and step alone, so that every node has the same and other jobs another."""
    ports = {slurm.site({**STEP, "SLURM_NODEID": str(node)}).master_port for node in range(3)}
    assert len(ports) == 1
    assert 20000 <= (ports.pop() or 0) < 30000
    others = {slurm.site({**STEP, "SLURM_JOB_ID": str(job)}).master_port for job in range(20)}
    assert len(others) > 15


def test_several_tasks_per_node() -> None:
    """Started once per device, as other launchers want it, the error says how it is meant."""
    assert slurm.site({**STEP, "SLURM_STEP_NUM_TASKS": "24"}).objection == (
        "found 24 Slurm tasks on 3 nodes (SLURM_STEP_NUM_TASKS); expected one davincirun per node, which "
        "itself starts a worker per device: write srun --ntasks-per-node=1 --kill-on-bad-exit=1 davincirun "
        "..., or --nnodes 1 (nnodes=1) if each task is to be a job of its own"
    )


def test_value_of_a_variable_stays_out_of_the_message() -> None:
    """A variable that holds no number is named, its value is not shown."""
    with pytest.raises(PlatformError) as caught:
        slurm.site({**JOB, "SLURM_NODEID": "hunter2"})
    assert str(caught.value) == (
        "found no such number in the environment variable SLURM_NODEID; expected a whole number of at least "
        "0: correct or unset it"
    )
