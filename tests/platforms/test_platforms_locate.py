"""Nodes, devices and rendezvous, with a rank table and without one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from platform_host import devices, located, make_root, put_sample
from rank_table_samples import sample, table

from davincirunsdk.errors import PlatformError, RankTableError, RankTableTimeoutError
from davincirunsdk.host import addresses
from davincirunsdk.host.devices import MASK
from davincirunsdk.options import Wish
from davincirunsdk.platforms import job_id, locate, log_root
from davincirunsdk.rank_table import dump, parse

OPERATOR = {
    "RANK": "1",
    "LOCAL_RANK": "0,1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "2222",
    "MINDX_TASK_ID": "abc",
}


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
    "SLURM_NODEID": "1",
}


async def test_bare_slots(tmp_path: Path) -> None:
    """Without table and NPUs the workers asked for get slots."""
    cluster = await located(make_root(tmp_path), {}, Wish(nproc_per_node=3))
    assert devices(cluster) == [(0, 0), (1, 1), (2, 2)]
    assert (cluster.npus, cluster.rank_table, cluster.platform) == (False, None, "host")
    assert (cluster.master_addr, cluster.master_port) == ("127.0.0.1", None)
    assert cluster.job_id == os.uname().nodename


async def test_one_worker_per_device_file(tmp_path: Path) -> None:
    """Without table each device file is a worker; `davinci_manager` and the like are none."""
    cluster = await located(make_root(tmp_path, [6, 4, 5, 10]), {})
    assert devices(cluster) == [(0, 4), (1, 5), (2, 6), (3, 10)]
    assert cluster.npus


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [("1,3", [5, 7]), ("0", [4]), ("0,1,2,3", [4, 5, 6, 7])],
)
async def test_visible_devices(tmp_path: Path, visible: str, wanted: list[int]) -> None:
    """ASCEND_RT_VISIBLE_DEVICES counts the devices present, and leaves those that CANN would leave."""
    cluster = await located(make_root(tmp_path, [4, 5, 6, 7]), {MASK: visible})
    assert [device_id for _, device_id in devices(cluster)] == wanted
    assert [device.local_rank for device in cluster.node.devices] == list(range(len(wanted)))
    assert cluster.visible_devices is None


async def test_no_table_no_device(tmp_path: Path) -> None:
    """With nothing to go by, the error names every option, argument and variable that helps."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path), {})
    assert str(caught.value) == (
        "found no rank table and no NPU (no device file such as /dev/davinci0); expected to learn how many "
        "workers to start: give --nproc-per-node (nproc_per_node), or a rank table by --rank-table "
        "(rank_table) or the variable RANK_TABLE_FILE"
    )


async def test_more_workers_than_devices(tmp_path: Path) -> None:
    """More workers than NPUs is an error with both figures, unless the NPUs are hidden on purpose."""
    root = make_root(tmp_path, [0, 1])
    assert devices(await located(root, {}, Wish(nproc_per_node=1))) == [(0, 0)]
    with pytest.raises(PlatformError) as caught:
        await located(root, {}, Wish(nproc_per_node=4))
    assert str(caught.value) == (
        "found 2 NPUs on this node; expected at least 4, the workers per node 4 from --nproc-per-node "
        "(nproc_per_node): ask for fewer with --nproc-per-node (nproc_per_node), or set "
        "ASCEND_RT_VISIBLE_DEVICES to nothing to run without NPUs"
    )
    cluster = await located(root, {"ASCEND_RT_VISIBLE_DEVICES": ""}, Wish(nproc_per_node=4))
    assert (len(cluster.node.devices), cluster.npus) == (4, False)


async def test_nodes_by_options(tmp_path: Path) -> None:
    """Options alone make several nodes, with as many workers on each."""
    wish = Wish(nproc_per_node=2, nnodes=3, node_rank=1, master_addr="192.0.2.1", master_port=1234)
    cluster = await located(make_root(tmp_path), {}, wish)
    assert (cluster.world_size, devices(cluster)) == (6, [(2, 0), (3, 1)])
    assert (cluster.master_addr, cluster.master_port) == ("192.0.2.1", 1234)
    assert [node.node_rank for node in cluster.nodes] == [0, 1, 2]


async def test_several_nodes_always_agree_on_a_port(tmp_path: Path) -> None:
    """Without a port of its own, a job of several nodes takes torchrun's, never a free one."""
    wish = Wish(nproc_per_node=1, nnodes=2, node_rank=1, master_addr="192.0.2.1")
    assert (await located(make_root(tmp_path), {}, wish)).master_port == 29500


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            Wish(nproc_per_node=1, nnodes=2, master_addr="192.0.2.1"),
            (
                "found no node rank for a job of 2 nodes without a rank table; expected one from 0 "
                "to 1: give "
                "--node-rank (node_rank), and --nnodes (nnodes)"
            ),
        ),
        (
            Wish(nproc_per_node=1, nnodes=2, node_rank=0),
            (
                "found no address of node 0 for a job of 2 nodes without a rank table; expected one: give "
                "--master-addr (master_addr) or set MASTER_ADDR"
            ),
        ),
        (
            Wish(nproc_per_node=1, nnodes=2, node_rank=2, master_addr="192.0.2.1"),
            "found node rank 2 of 2 nodes; expected 0 to 1",
        ),
        (
            Wish(nproc_per_node=1, node_rank=1),
            (
                "found node rank 1 from --node-rank (node_rank) for a job of 1 node without a rank table; "
                "expected one from 0 to 0: give "
                "--node-rank (node_rank), and --nnodes (nnodes)"
            ),
        ),
    ],
)
async def test_options_that_do_not_suffice(tmp_path: Path, wish: Wish, message: str) -> None:
    """What is missing or contradicts itself is named with the option to give."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path), {}, wish)
    assert str(caught.value) == message


async def test_operator_without_table(tmp_path: Path) -> None:
    """A pod's RANK, WORLD_SIZE and MASTER_* are the nodes' and are taken as such."""
    cluster = await located(make_root(tmp_path, [0, 1]), OPERATOR)
    assert (cluster.platform, cluster.node_rank, devices(cluster)) == ("ascendjob", 1, [(2, 0), (3, 1)])
    assert (cluster.master_addr, cluster.master_port) == ("10.0.0.5", 2222)


async def test_slurm_without_table(tmp_path: Path) -> None:
    """On Slurm nodes, place, address and port are the step's; a node is named as Slurm names it."""
    first, second = [
        await located(make_root(tmp_path / node), {**STEP, "SLURM_NODEID": node}, Wish(nproc_per_node=2))
        for node in ("0", "1")
    ]
    assert (second.node.name, devices(second)) == ("127.0.0.2", [(2, 0), (3, 1)])
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert first.master_addr == "127.0.0.1"


@pytest.mark.parametrize("mark", ["DAVINCIRUN_JOB", "TORCHELASTIC_RUN_ID"])
async def test_inside_another_launcher(tmp_path: Path, mark: str) -> None:
    """The rank and rendezvous of an outer launcher's worker are not ours; set by a user they are."""
    outer = {
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "LOCAL_RANK": "3,4",
        "WORLD_SIZE": "8",
    }
    root = make_root(tmp_path)
    inner = await located(root, {**outer, mark: "x"}, Wish(nproc_per_node=1))
    assert (inner.world_size, inner.master_addr, inner.master_port) == (1, "127.0.0.1", None)
    users = await located(root, {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}, Wish(nproc_per_node=1))
    assert (users.master_addr, users.master_port) == ("10.0.0.9", 29500)


async def test_bad_master_port(tmp_path: Path) -> None:
    """A port that is none is an error that names the variable and keeps its value to itself."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path), {"MASTER_PORT": "70000"}, Wish(nproc_per_node=1))
    assert str(caught.value) == (
        "found no such number in the environment variable MASTER_PORT; expected a whole number from 1 to "
        "65535: correct or unset it"
    )


async def test_table_given(tmp_path: Path) -> None:
    """A v1.0 table that HCCL reads as it stands is handed on where it is."""
    path = put_sample("v1_0_one_host", tmp_path / "t.json")
    cluster = await located(make_root(tmp_path), {"RANK_TABLE_FILE": "/nowhere"}, Wish(rank_table=path))
    assert devices(cluster) == [(n, n) for n in range(8)]
    assert (cluster.rank_table, cluster.npus, cluster.master_port) == (path, True, None)
    assert cluster.nodes[0].devices[7].device_ip == "29.1.0.8"


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("RANK_TABLE_FILE", "config", "config/jobstart_hccl.json"),
        ("RANK_TABLE_FILE", "config", "config/hccl.json"),
        ("RANK_TABLE_FILE", "t.json", "t.json"),
        ("RANK_TABLE_FILE_V_1_0", "t.json", "t.json"),
        ("MINDSPORE_HCCL_CONFIG_PATH", "t.json", "t.json"),
        ("UNRELATED", "", "user/config/jobstart_hccl.json"),
        ("UNRELATED", "", "user/serverid/devindex/config/hccl.json"),
        ("UNRELATED", "", "user/mindx-dl/ranktable/ns.job/hccl.json"),
        ("UNRELATED", "", "etc/ranktable/jobstart_hccl.json"),
    ],
)
async def test_where_the_table_is(tmp_path: Path, variable: str, value: str, place: str) -> None:
    """The table is found as a file, as ModelArts' folder, and at every place where platforms put it."""
    root = make_root(tmp_path)
    put_sample("v1_0_one_host", root / place)
    cluster = await located(root, {variable: str(root / value)})
    assert cluster.rank_table == root / place


async def test_several_tables_of_the_operator(tmp_path: Path) -> None:
    """Of several jobs' tables none is guessed."""
    root = make_root(tmp_path)
    paths = [
        put_sample("v1_0_one_host", root / f"user/mindx-dl/ranktable/ns.{job}/hccl.json") for job in "ab"
    ]
    with pytest.raises(RankTableError) as caught:
        await located(root, {})
    assert str(caught.value) == (
        f"found several rank tables ({paths[0]}, {paths[1]}) and nothing that says which is this job's; "
        "expected one: set RANK_TABLE_FILE or give --rank-table (rank_table)"
    )


async def test_conversion_for_the_workers(tmp_path: Path) -> None:
    """A v0.1 table is converted into a private file by content; source and other tables stay untouched."""
    root = make_root(tmp_path)
    source = put_sample("v0_1_devices_4_to_7", root / "a.json")
    other = put_sample("v0_1_one_pod_any_name", root / "b.json")
    source.chmod(0o444)
    first = await located(root, {}, Wish(rank_table=source))
    second = await located(root, {}, Wish(rank_table=other))
    again = await located(root, {}, Wish(rank_table=source))
    assert first.rank_table is not None
    assert second.rank_table is not None
    assert first.rank_table == again.rank_table != second.rank_table
    assert first.rank_table.read_text() == dump(table("v0_1_devices_4_to_7"))
    assert source.read_bytes() == sample("v0_1_devices_4_to_7")
    folder = first.rank_table.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert devices(first) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert first.visible_devices is None


async def test_conversion_at_home(tmp_path: Path) -> None:
    """Where ModelArts' home exists, the converted table is there; no home is made where none is."""
    root = make_root(tmp_path)
    source = put_sample("v0_1_devices_4_to_7", root / "a.json")
    home = tmp_path / "ma"
    without = await located(root, {"MA_HOME": str(home)}, Wish(rank_table=source))
    assert not home.exists()
    home.mkdir()
    cluster = await located(root, {"MA_HOME": str(home)}, Wish(rank_table=source))
    assert cluster.rank_table is not None
    assert cluster.rank_table.parent == home / "rank_table"
    assert without.rank_table is not None
    assert without.rank_table.name == cluster.rank_table.name


async def test_private_folder_of_somebody_else(tmp_path: Path) -> None:
    """A folder that others can write to is not trusted with the table."""
    root = make_root(tmp_path)
    source = put_sample("v0_1_devices_4_to_7", root / "a.json")
    trap = tmp_path / f"davincirun-{os.geteuid()}"
    trap.mkdir()
    trap.chmod(0o777)
    cluster = await located(root, {}, Wish(rank_table=source))
    assert cluster.rank_table is not None
    assert cluster.rank_table.parent != trap
    assert list(trap.iterdir()) == []


async def test_name_without_json(tmp_path: Path) -> None:
    """HCCL refuses a table whose name lacks `.json`, so it gets a copy that has it."""
    root = make_root(tmp_path)
    path = put_sample("v1_0_one_host", root / "ranktable")
    cluster = await located(root, {"RANK_TABLE_FILE": str(path)})
    assert cluster.rank_table is not None
    assert cluster.rank_table.suffix == ".json"
    assert parse(cluster.rank_table.read_bytes()).world_size == 8


@pytest.mark.parametrize(
    ("line", "physical"), [("Version=20.1.0\nx", True), ("Version=20.1.0.SPC", False), ("", False)]
)
async def test_the_old_driver(tmp_path: Path, line: str, physical: bool) -> None:
    """Exactly one driver release wants physical numbers."""
    root = make_root(tmp_path, [0])
    version = root / "usr/local/Ascend/driver/version.info"
    version.parent.mkdir(parents=True)
    version.write_text(line)
    assert (await located(root, {})).physical_device_id is physical


async def test_two_pods_on_one_host(tmp_path: Path) -> None:
    """Each pod starts its own devices only, though the host has the other pod's as well."""
    root = make_root(tmp_path)
    path = put_sample("v0_1_two_pods_one_host", root / "t.json")
    found = {}
    for pod in ("job-0", "job-1", "job-2"):
        cluster = await located(root, {"RANK_TABLE_FILE": str(path), "MA_CURRENT_INSTANCE_NAME": pod})
        found[pod] = devices(cluster)
    assert found == {
        "job-0": [(0, 0), (1, 1)],
        "job-2": [(2, 2), (3, 3)],
        "job-1": [(4, 0), (5, 1)],
    }


async def test_several_servers(tmp_path: Path) -> None:
    """Each host starts its own devices with ranks of their own, and all agree where node 0 is."""
    root = make_root(tmp_path)
    path = put_sample("v1_0_two_hosts", root / "t.json")
    clusters = [
        await located(root, {"RANK_TABLE_FILE": str(path), "MA_CURRENT_HOST_IP": host})
        for host in ("192.0.2.11", "192.0.2.12")
    ]
    assert devices(clusters[1]) == [(8 + n, n) for n in range(8)]
    assert [cluster.world_size for cluster in clusters] == [16, 16]
    assert {cluster.master_addr for cluster in clusters} == {"192.0.2.11"}
    ports = {cluster.master_port for cluster in clusters}
    assert len(ports) == 1
    assert None not in ports


async def test_master_by_host_ip(tmp_path: Path) -> None:
    """Where servers have names, node 0 is reached by its host_ip."""
    root = make_root(tmp_path)
    path = put_sample("v1_0_names_and_ports", root / "t.json")
    cluster = await located(root, {"RANK_TABLE_FILE": str(path), "XDL_IP": "192.0.2.12"})
    assert (cluster.node_rank, cluster.master_addr) == (1, "192.0.2.11")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            Wish(nproc_per_node=4),
            (
                "found 8 devices on this node (192.0.2.11); expected 4, the nproc_per_node asked "
                "for: drop that "
                "figure, as a table settles it, or give another table"
            ),
        ),
        (
            Wish(nnodes=2),
            "found 1 node; expected 2, the nnodes asked for: drop that figure, or give the table of this job",
        ),
    ],
)
async def test_table_and_wish_disagree(tmp_path: Path, wish: Wish, message: str) -> None:
    """A figure that contradicts the table is an error with both."""
    root = make_root(tmp_path)
    path = put_sample("v1_0_one_host", root / "t.json")
    with pytest.raises(RankTableError) as caught:
        await located(root, {"RANK_TABLE_FILE": str(path)}, wish)
    assert str(caught.value) == f"rank table {path}: {message}"


async def test_oddities_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is odd about a table is a warning in the log."""
    root = make_root(tmp_path)
    path = put_sample("v1_1_number_only", root / "t.json")
    await located(root, {"RANK_TABLE_FILE": str(path)})
    assert caplog.messages == [
        (
            f'rank table {path}: version: found "1.1"; expected "1.0", for the content is that of '
            f"v1.0; HCCL gets "
            "a corrected copy"
        )
    ]


async def test_limit_from_the_environment(tmp_path: Path) -> None:
    """DAVINCIRUN_RANK_TABLE_TIMEOUT bounds the waiting, also for a missing file; ModelArts' hint is given."""
    env = {
        "MA_VJ_NAME": "ma-job-1",
        "RANK_TABLE_FILE": str(tmp_path / "config"),
        "DAVINCIRUN_RANK_TABLE_TIMEOUT": "0.3",
    }
    with pytest.raises(RankTableTimeoutError) as caught:
        await located(make_root(tmp_path), env)
    assert "jobstart_hccl.json (named by RANK_TABLE_FILE) is not complete after 0 s" in str(caught.value)
    assert "RANK_TABLE_FILE (a folder, such as /user/config)" in str(caught.value)
    with pytest.raises(PlatformError, match="DAVINCIRUN_RANK_TABLE_TIMEOUT; expected 0 or more"):
        await located(tmp_path, {**env, "DAVINCIRUN_RANK_TABLE_TIMEOUT": "soon"})


async def test_wrong_path_on_a_host(tmp_path: Path) -> None:
    """On a plain host a table in a folder that does not exist is an error at once."""
    path = tmp_path / "no" / "hccl.json"
    with pytest.raises(RankTableError, match="does not exist yet; expected a file: correct the path"):
        await located(make_root(tmp_path), {"RANK_TABLE_FILE": str(path)})


async def test_cancelled_while_waiting(tmp_path: Path) -> None:
    """Cancelling only ends the waiting."""
    path = put_sample("initializing", make_root(tmp_path) / "t.json")
    told = asyncio.Event()
    env = {"RANK_TABLE_FILE": str(path)}
    task = asyncio.create_task(locate(Wish(), env, notify=lambda _: told.set(), root=tmp_path))
    await asyncio.wait_for(told.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_v2_nodes(tmp_path: Path) -> None:
    """v2.0 is used where node rank, device count or own addresses settle it, and refused elsewhere."""
    root = make_root(tmp_path)
    two = {"RANK_TABLE_FILE": str(put_sample("v2_0_two_hosts", root / "two.json"))}
    rack = {"RANK_TABLE_FILE": str(put_sample("v2_0_one_rack", root / "rack.json"))}
    assert devices(await located(root, two, Wish(node_rank=1))) == [(2, 0), (3, 1)]
    assert devices(await located(root, rack)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    halves = await located(root, rack, Wish(node_rank=1, nproc_per_node=2))
    assert (devices(halves), len(halves.nodes)) == ([(2, 2), (3, 3)], 2)
    assert len((await located(root, two, Wish(nproc_per_node=4))).nodes) == 1
    with pytest.raises(PlatformError, match="Give --node-rank"):
        await located(root, two)
    with pytest.raises(PlatformError, match="its 4 ranks do not divide by the 3 devices"):
        await located(root, two, Wish(nproc_per_node=3))


async def test_v2_by_own_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of v2.0 with an address of this machine tells which node it is."""
    root = make_root(tmp_path)
    path = put_sample("v2_0_two_hosts", root / "t.json")
    monkeypatch.setattr(addresses, "own", lambda: frozenset({"198.51.100.4"}))
    assert (await located(root, {"RANK_TABLE_FILE": str(path)})).node_rank == 1


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"BATCH_JOB_ID": "b", "MA_VJ_NAME": "ma-job-x"}, "b"),
        ({"MA_VJ_NAME": "ma-job-ma-job"}, "modelarts-job-ma-job"),
        ({}, os.uname().nodename),
    ],
)
def test_job_id(env: dict[str, str], name: str) -> None:
    """The job is named as ModelArts' own tools name it."""
    assert job_id(env) == name


def test_log_root(tmp_path: Path) -> None:
    """Of the log folders the first that exists counts; the Python API has its own."""
    env = {"BATCH_TASK_LOG_PATH": str(tmp_path / "batch"), "MA_MOUNT_PATH": str(tmp_path)}
    assert log_root(env) == Path("/tmp/log")
    (tmp_path / "log").mkdir()
    assert log_root(env) == tmp_path / "log"
    (tmp_path / "batch").mkdir()
    assert log_root(env) == tmp_path / "batch"
    assert log_root(env, command_line=False) == Path("/tmp/logdir")


async def test_log_folder_of_the_platform(tmp_path: Path) -> None:
    """ModelArts has a folder for worker logs, a plain host has none."""
    root = make_root(tmp_path)
    wish = Wish(nproc_per_node=1)
    assert (await located(root, {}, wish)).log_dir is None
    job = {"MA_VJ_NAME": "ma-job-1"}
    assert (await located(root, {**job, "MA_LOG_DIR": "/logs"}, wish)).log_dir == Path("/logs")
    assert (await located(root, job, wish)).log_dir == Path("/tmp/log")


def test_import_is_cheap() -> None:
    """Importing the platforms, and locating without a table, loads none of the heavy libraries."""
    program = (
        "import asyncio, sys; from davincirunsdk.platforms import locate; from davincirunsdk.options "
        "import Wish; "
        "asyncio.run(locate(Wish(nproc_per_node=1), {}, notify=print)); "
        "print([m for m in ('anyio', 'psutil', 'click', 'msgspec', 'aiofiles', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"
