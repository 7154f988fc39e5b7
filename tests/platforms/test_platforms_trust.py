"""Whom to believe about size and place: one order of trust, and no silent contradiction."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from platform_host import devices, located, make_root
from rank_table_samples import device

from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host import addresses
from davincirunsdk.options import Wish
from davincirunsdk.platforms import locate, prepare_rank_table, without_outer_job

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.cluster import Cluster

ELSEWHERE = "192.0.2.1"
"""An address that no machine has."""

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "127.0.0.1,127.0.0.2",
}
MODELARTS = {**VOLCANO, "MA_NUM_HOSTS": "2", "MA_VJ_NAME": "ma-job-1"}
PYTORCH_POD = {
    "MINDX_TASK_ID": "a",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "LOCAL_RANK": "0,1",
    "MASTER_ADDR": ELSEWHERE,
    "MASTER_PORT": "2222",
}
MINDSPORE_POD = {
    "MINDX_TASK_ID": "a",
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "4",
    "MS_LOCAL_WORKER": "2",
    "MS_NODE_RANK": "1",
    "MS_SCHED_HOST": ELSEWHERE,
    "MS_SCHED_PORT": "2222",
    "NPU_POD": "true",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": ELSEWHERE,
    "PET_MASTER_PORT": "23456",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": ELSEWHERE,
}
ALL = {
    "Slurm": SLURM,
    "Volcano": VOLCANO,
    "ModelArts": MODELARTS,
    "AscendJob, PyTorch": PYTORCH_POD,
    "AscendJob, MindSpore": MINDSPORE_POD,
    "Kubeflow": PET,
    "Open MPI": MPI,
}


def wish(**given: int | str | bool) -> Wish:
    """Two workers, and what the test asks for."""
    return replace(Wish(nproc_per_node=2), **given)  # type: ignore[arg-type] # names are the test's own


def told(cluster: Cluster) -> list[str]:
    """List who was believed."""
    return [str(fact) for fact in cluster.facts if fact.believed]


@pytest.mark.parametrize("env", ALL.values(), ids=ALL)
async def test_finds_itself_everywhere(tmp_path: Path, env: dict[str, str]) -> None:
    """The second of two nodes finds size and place under each launcher, without any option but the count."""
    cluster = await located(make_root(tmp_path), env, wish())
    assert (len(cluster.nodes), cluster.node_rank, devices(cluster)) == (2, 1, [(2, 0), (3, 1)])
    assert cluster.master_addr in (ELSEWHERE, "127.0.0.1")


@pytest.mark.parametrize("env", [PYTORCH_POD, MINDSPORE_POD, PET])
async def test_workers_of_a_pod(tmp_path: Path, env: dict[str, str]) -> None:
    """Where the platform counts the workers of a pod, no option is needed at all."""
    assert (await located(make_root(tmp_path), env)).world_size == 4


@pytest.mark.parametrize("count", ["auto", "gpu", "cpu", ""])
async def test_a_count_in_words(tmp_path: Path, count: str) -> None:
    """A word in PET_NPROC_PER_NODE means one worker per device."""
    root = make_root(tmp_path, range(3))
    assert (await located(root, {**PET, "PET_NPROC_PER_NODE": count})).world_size == 6


async def test_a_range_of_nodes(tmp_path: Path) -> None:
    """A range means its lower end: no launcher here takes in nodes that come later."""
    cluster = await located(make_root(tmp_path), {**PET, "PET_NNODES": "2:4"})
    assert len(cluster.nodes) == 2


@pytest.mark.parametrize(
    "env",
    [env for name, env in ALL.items() if name != "ModelArts"],
    ids=[name for name in ALL if name != "ModelArts"],
)
async def test_an_option_that_contradicts_the_launcher(tmp_path: Path, env: dict[str, str]) -> None:
    """A place or number that a script expanded too early is an error that names both, unless allowed."""
    root = make_root(tmp_path)
    with pytest.raises(PlatformError, match=r"found node rank 0 from --node-rank .*, but node rank 1 from "):
        await located(root, env, wish(node_rank=0))
    with pytest.raises(
        PlatformError, match=r"found number of nodes 3 from --nnodes .*, but number of nodes 2 "
    ):
        await located(root, env, wish(nnodes=3, node_rank=1))
    allowed = await located(
        root, env, wish(nnodes=3, node_rank=2, master_addr=ELSEWHERE, ignore_platform=True)
    )
    assert (len(allowed.nodes), allowed.node_rank) == (3, 2)


async def test_two_launchers_that_contradict_each_other(tmp_path: Path) -> None:
    """What two sources say differently is an error that names both with their variables."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path), {**SLURM, **PET, "PET_NODE_RANK": "0"}, wish())
    assert str(caught.value) == (
        "found node rank 1 from Slurm (SLURM_NODEID), but node rank 0 from Kubeflow (PET_NODE_RANK); "
        "expected both to agree, for ranks would be started twice or not at all: leave the wrong one out, or "
        "let the first count with --ignore-platform (ignore_platform)"
    )
    agreed = await located(tmp_path, {**SLURM, **PET}, wish())
    assert told(agreed)[1:3] == [
        "number of nodes: 2, from Slurm (SLURM_STEP_NUM_NODES)",
        "node rank: 1, from Slurm (SLURM_NODEID)",
    ]


async def test_one_node_is_a_choice(tmp_path: Path) -> None:
    """`--nnodes 1` alone takes this node out of an allocation, in a step or not; one line says so."""
    for env, place in ((SLURM, 1), (BATCH, 0), ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, 1)):
        lines: list[str] = []
        cluster = await locate(wish(nnodes=1), env, notify=lines.append, root=tmp_path)
        assert (cluster.world_size, cluster.master_addr, cluster.master_port) == (2, "127.0.0.1", None)
        assert lines == [
            (
                "the option says which nodes are the job's; left aside: the 2 nodes of Slurm, of which this "
                f"is node {place}"
            )
        ]
    with pytest.raises(PlatformError, match="found number of nodes 1 from --nnodes"):
        await located(tmp_path, SLURM, wish(nnodes=1, node_rank=0))


async def test_outside_a_step(tmp_path: Path) -> None:
    """A batch file without srun starts one node of several: an error with the words to write."""
    interactive = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "127.0.0.1"}
    for env in (BATCH, interactive):
        with pytest.raises(PlatformError) as caught:
            await located(tmp_path, env, wish())
        assert str(caught.value) == (
            "found a Slurm job of 2 nodes (SLURM_NNODES) and no step: srun has not started this, so no "
            "davincirun runs on the other nodes; expected one on each: write srun --ntasks-per-node=1 "
            "--kill-on-bad-exit=1 davincirun ..., or --nnodes 1 (nnodes=1) to use this node alone"
        )
    chosen = await located(tmp_path, BATCH, wish(nnodes=3, node_rank=2, master_addr=ELSEWHERE))
    assert (len(chosen.nodes), chosen.node_rank) == (3, 2)
    single = {**BATCH, "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    assert (await located(tmp_path, single, wish())).world_size == 2


async def test_several_tasks_per_node(tmp_path: Path) -> None:
    """srun with several tasks on a node is refused with the words to write, and so is mpirun."""
    with pytest.raises(
        PlatformError, match=r"found 8 Slurm tasks on 2 nodes .*write srun --ntasks-per-node=1"
    ):
        await located(tmp_path, {**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, wish())


async def test_names_that_outlived_mpirun(tmp_path: Path) -> None:
    """Names of an mpirun that is not our ancestor say nothing, where several processes shared a node."""
    cluster = await located(tmp_path, {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, wish(nnodes=1))
    assert cluster.world_size == 2


async def test_mpirun_inside_slurm(tmp_path: Path) -> None:
    """mpirun's own Slurm step counts the nodes of its daemons, one less than the job's: it is no place."""
    step = {**SLURM, "SLURM_STEP_NODELIST": "127.0.0.2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    cluster = await located(tmp_path, {**step, "SLURM_STEP_NUM_TASKS": "1", **MPI}, wish())
    assert (len(cluster.nodes), cluster.node_rank) == (2, 1)


@pytest.mark.parametrize("mark", ["DAVINCIRUN_JOB", "TORCHELASTIC_RUN_ID"])
@pytest.mark.parametrize("env", ALL.values(), ids=ALL)
async def test_inside_a_worker(tmp_path: Path, env: dict[str, str], mark: str) -> None:
    """A job that a worker starts is on its node alone: the launcher outside has used up the places."""
    inner = without_outer_job({**env, mark: "x"})
    cluster = await located(make_root(tmp_path), inner, wish())
    assert (len(cluster.nodes), cluster.master_addr) == (1, "127.0.0.1")


async def test_a_workers_own_job_leaves_the_table_alone(tmp_path: Path) -> None:
    """The table of the job outside would start all its ranks again; a script that asks for it gets it."""
    path = put_table(tmp_path / "t.json", "192.0.2.11")
    env = {"DAVINCIRUN_JOB": "x", "RANK_TABLE_FILE": str(path), "TMPDIR": str(tmp_path)}
    inner = await located(make_root(tmp_path / "host"), env, wish())
    assert (inner.rank_table, inner.world_size) == (None, 2)
    told = await located(tmp_path, env, Wish(rank_table=path))
    assert told.rank_table == path
    names = await prepare_rank_table(env, notify=print, root=tmp_path)
    assert names is not None
    assert names["RANK_TABLE_FILE"] == str(path)


TASKS = {
    "VC_TASK_INDEX": "0",
    "VC_MASTER_HOSTS": "127.0.0.1",
    "VC_WORKER_HOSTS": "127.0.0.2,127.0.0.3",
    "VC_TENSORBOARD_HOSTS": "127.0.0.4",
    "VC_PS_HOSTS": "127.0.0.5",
}


async def test_volcano_plugin_for_pytorch(tmp_path: Path) -> None:
    """The plugin's own size and place win over the lists of all tasks."""
    env = {**TASKS, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    cluster = await located(tmp_path, env, wish())
    assert (len(cluster.nodes), devices(cluster)) == (2, [(2, 0), (3, 1)])


@pytest.mark.parametrize(
    ("host", "place"), [("127", None), ("m-0", 0), ("w-1", 2), ("ps-0", None), ("tb-0", None)]
)
async def test_volcano_tasks_that_train(tmp_path: Path, host: str, place: int | None) -> None:
    """Masters and workers count, other tasks do not; a pod that is none of them asks for its place."""
    env = {
        **TASKS,
        "VC_MASTER_HOSTS": "m-0.job",
        "VC_WORKER_HOSTS": "w-0.job,w-1.job",
        "VC_PS_HOSTS": "ps-0.job",
        "VC_TENSORBOARD_HOSTS": "tb-0.job",
        "HOSTNAME": host,
        "MASTER_ADDR": ELSEWHERE,
    }
    if place is None:
        with pytest.raises(PlatformError, match=r"give --nnodes \(nnodes\) and --node-rank"):
            await located(tmp_path, env, wish())
        chosen = await located(tmp_path, env, wish(nnodes=3, node_rank=1))
        assert chosen.node_rank == 1
    else:
        cluster = await located(tmp_path, env, wish())
        assert (len(cluster.nodes), cluster.node_rank) == (3, place)


async def test_volcano_tasks_of_unknown_use(tmp_path: Path) -> None:
    """One task of any name is the job; of several unknown ones none is guessed."""
    one = {"VC_TASK_INDEX": "1", "VC_TRAIN_HOSTS": "127.0.0.1,127.0.0.2"}
    assert (await located(tmp_path, one, wish())).node_rank == 1
    with pytest.raises(PlatformError, match="found tasks A, TRAIN in this Volcano job"):
        await located(tmp_path, {**one, "VC_A_HOSTS": "127.0.0.3"}, wish())


async def test_mindspore_scheduler_apart(tmp_path: Path) -> None:
    """Pods that count from 0 have the scheduler elsewhere; where its pod trains, it is node 0."""
    first = await located(tmp_path, {**MINDSPORE_POD, "MS_NODE_RANK": "0"}, wish())
    assert (first.node_rank, first.scheduler_elsewhere) == (0, True)
    with_npus = {**MINDSPORE_POD, "MS_NODE_RANK": "0", "MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "127.0.0.1"}
    scheduler = await located(tmp_path, with_npus, wish())
    assert (scheduler.node_rank, scheduler.scheduler_elsewhere) == (0, False)
    bare = {**with_npus, "NPU_POD": "false", "MS_LOCAL_WORKER": "0", "MS_WORKER_NUM": "0"}
    with pytest.raises(PlatformError, match="found the pod of MindSpore's scheduler"):
        await located(tmp_path, bare, wish())


def put_table(path: Path, *servers: str) -> Path:
    """Write a v1.0 table of servers with two devices each."""
    listed = [
        {"server_id": server, "device": [device(2 * n, 0, n), device(2 * n + 1, 1, n)]}
        for n, server in enumerate(servers)
    ]
    top = {"version": "1.0", "status": "completed", "server_list": listed}
    path.write_text(json.dumps(top))
    return path


async def test_table_and_slurm(tmp_path: Path) -> None:
    """Places are compared, not only numbers: another size, or another place of this host, is an error."""
    three = put_table(tmp_path / "3.json", "192.0.2.11", "192.0.2.12", "192.0.2.13")
    env = {**SLURM, "MA_CURRENT_HOST_IP": "192.0.2.12"}
    with pytest.raises(
        PlatformError, match=r"found number of nodes 3 from rank table .*, but number of nodes 2"
    ):
        await located(tmp_path, env, Wish(rank_table=three))
    turned = put_table(tmp_path / "2.json", "192.0.2.12", "192.0.2.11")
    with pytest.raises(
        PlatformError, match=r"found node rank 0 from rank table .*, but node rank 1 from Slurm"
    ):
        await located(tmp_path, env, Wish(rank_table=turned))
    right = put_table(tmp_path / "r.json", "192.0.2.11", "192.0.2.12")
    cluster = await located(tmp_path, env, Wish(rank_table=right))
    assert (devices(cluster), cluster.master_addr) == ([(2, 0), (3, 1)], "192.0.2.11")


async def test_a_table_in_an_allocation(tmp_path: Path) -> None:
    """Outside a step a table of this node alone is a choice; a platform's own table may count anew."""
    alone = put_table(tmp_path / "1.json", "192.0.2.11")
    lines: list[str] = []
    await locate(
        Wish(rank_table=alone), {"TMPDIR": str(tmp_path), **BATCH}, notify=lines.append, root=tmp_path
    )
    assert lines == [
        (
            "the rank table says which nodes are the job's; left aside: the 2 nodes of Slurm, of which this "
            "is node 0"
        )
    ]
    two = put_table(tmp_path / "two.json", "192.0.2.11", "192.0.2.12")
    batch = {**BATCH, "MA_CURRENT_HOST_IP": "192.0.2.11"}
    with pytest.raises(PlatformError, match="and no step: srun has not started this"):
        await located(tmp_path, batch, Wish(rank_table=two))
    assert (await located(tmp_path, batch, Wish(rank_table=two, node_rank=0))).node_rank == 0
    turned = put_table(tmp_path / "2.json", "192.0.2.12", "192.0.2.11")
    env = {**MODELARTS, "MA_CURRENT_HOST_IP": "192.0.2.12"}
    cluster = await located(tmp_path, env, Wish(rank_table=turned))
    assert (cluster.node_rank, cluster.master_addr) == (0, "192.0.2.12")


async def test_a_wish_that_the_table_contradicts(tmp_path: Path) -> None:
    """A node rank of the user against this host's address in the table is an error, unless allowed."""
    path = put_table(tmp_path / "2.json", "192.0.2.11", "192.0.2.12")
    env = {"MA_CURRENT_HOST_IP": "192.0.2.12"}
    with pytest.raises(PlatformError, match="found node rank 0 asked for, but this host is node 1"):
        await located(tmp_path, env, Wish(rank_table=path, node_rank=0))
    allowed = Wish(rank_table=path, node_rank=0, ignore_platform=True)
    assert (await located(tmp_path, env, allowed)).node_rank == 0
    with pytest.raises(RankTableError, match="found 2 nodes; expected 3, the nnodes asked for"):
        await located(tmp_path, env, Wish(rank_table=path, nnodes=3))


async def test_a_master_that_nobody_knows(tmp_path: Path) -> None:
    """A name that cannot be looked up is an error before anything is started."""
    with pytest.raises(PlatformError) as caught:
        await located(tmp_path, {}, wish(nnodes=2, node_rank=1, master_addr="no-such-host.invalid"))
    assert str(caught.value).startswith(
        "the address of node 0, 'no-such-host.invalid', cannot be looked up on this host ("
    )
    assert "--master-addr" in str(caught.value)


async def test_a_pod_whose_name_comes_later(tmp_path: Path) -> None:
    """Among pods the name is waited for, and said at once; cancelling ends it."""
    said = asyncio.Event()
    env = {**VOLCANO, "MASTER_ADDR": "no-such-pod.invalid"}
    task = asyncio.create_task(locate(wish(), env, notify=lambda _: said.set(), root=tmp_path))
    await asyncio.wait_for(said.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_owns_the_masters_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The host of node 0's address is node 0, and no other host is."""
    own = sorted(address for address in addresses.own() if ":" not in address)
    if own:
        await located(tmp_path, {}, wish(nnodes=2, node_rank=0, master_addr=own[0]))
        with pytest.raises(PlatformError, match="expected node rank 0 here and on no other host"):
            await located(tmp_path, {}, wish(nnodes=2, node_rank=1, master_addr=own[0]))
        with pytest.raises(PlatformError, match="expected node rank 0 on the host of that address"):
            await located(tmp_path, {}, wish(nnodes=2, node_rank=0, master_addr=ELSEWHERE))
        allowed = wish(nnodes=2, node_rank=0, master_addr=ELSEWHERE, ignore_platform=True)
        await located(tmp_path, {}, allowed)
    assert not caplog.messages
    await located(tmp_path, {}, wish(nnodes=2, node_rank=1, master_addr="127.0.0.1"))
    assert "own loopback" in caplog.text
