"""Which card each rank opens: device and rank from the same row, whatever is in sight here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from platform_host import located, make_root

from davincirunsdk.environment.worker import worker_environment
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host.devices import MASK, span
from davincirunsdk.options import Wish
from davincirunsdk.platforms import locate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from davincirunsdk.cluster import Cluster

CARD = ("DEVICE_ID", "ASCEND_DEVICE_ID", "LOCAL_RANK")
"""Every variable by which a framework chooses its card."""


def put_table(path: Path, rows: Sequence[tuple[int, int]]) -> Path:
    """Write a v1.0 table of one server from (rank, device) pairs."""
    devices = [
        {"device_id": str(device), "device_ip": f"192.0.2.{device + 1}", "rank_id": str(rank)}
        for rank, device in rows
    ]
    top = {
        "version": "1.0",
        "status": "completed",
        "server_count": "1",
        "server_list": [{"server_id": "192.0.2.100", "device": devices}],
    }
    path.write_text(json.dumps(top))
    return path


def environments(cluster: Cluster, env: Mapping[str, str], framework: str) -> dict[int, dict[str, str]]:
    """Build each rank's environment."""
    return {
        device.rank: worker_environment(
            cluster=cluster,
            device=device,
            master_port=1,
            framework=framework,
            inherited=env,
            extra={},
            mark="m",
            cores=4,
        )
        for device in cluster.node.devices
    }


def opened(worker: Mapping[str, str], present: Sequence[int], name: str) -> int:
    """Tell which card CANN opens for a number: a place among those that the mask leaves."""
    seen = list(present)
    if MASK in worker:
        seen = [seen[int(entry)] for entry in worker[MASK].split(",")]
    return seen[int(worker[name])]


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[int], list[int] | None, list[tuple[int, int]]]:
    """Draw devices present, a mask or none, and a table of visible devices with ranks in any order."""
    present = sorted(draw(st.sets(st.integers(0, 15), min_size=1, max_size=8)))
    places = st.sets(st.integers(0, len(present) - 1), min_size=1)
    mask = draw(st.none() | places.map(sorted))
    seen = present if mask is None else [present[place] for place in mask]
    chosen = draw(st.lists(st.sampled_from(seen), unique=True, min_size=1))
    ranks = draw(st.permutations(range(len(chosen))))
    return present, mask, list(zip(ranks, chosen, strict=True))


@pytest.mark.parametrize("framework", ["auto", "torch", "mindspore"])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(host=hosts())
async def test_device_and_rank_from_the_same_row(
    tmp_path_factory: pytest.TempPathFactory,
    framework: str,
    host: tuple[list[int], list[int] | None, list[tuple[int, int]]],
) -> None:
    """On a bare host and in a container, with and without mask, each rank opens the device of its row."""
    present, mask, rows = host
    root = make_root(tmp_path_factory.mktemp("host"), present)
    env = {} if mask is None else {MASK: ",".join(str(place) for place in mask)}
    cluster = await located(root, env, Wish(rank_table=put_table(root / "t.json", rows)))
    workers = environments(cluster, env, framework)
    for rank, device in rows:
        assert {name: opened(workers[rank], present, name) for name in CARD} == dict.fromkeys(CARD, device)
        assert workers[rank]["RANK"] == workers[rank]["RANK_ID"] == str(rank)
    numbers = sorted(int(worker["LOCAL_RANK"]) for worker in workers.values())
    assert numbers == list(range(len(rows)))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([(3, 0), (2, 1), (0, 2), (1, 3)], {0: "2", 1: "3", 2: "1", 3: "0"}),
        ([(0, 5), (1, 6), (2, 7), (3, 0)], {0: "1", 1: "2", 2: "3", 3: "0"}),
        ([(0, 4), (1, 7)], {0: "0", 1: "1"}),
    ],
)
async def test_where_no_device_files_can_be_seen(
    tmp_path: Path, rows: list[tuple[int, int]], wanted: dict[int, str]
) -> None:
    """Then the rows count as all, and each rank gets the place of its own."""
    cluster = await located(make_root(tmp_path), {}, Wish(rank_table=put_table(tmp_path / "t.json", rows)))
    workers = environments(cluster, {}, "auto")
    for name in CARD:
        assert {rank: worker[name] for rank, worker in workers.items()} == wanted
    assert cluster.visible_devices is None


@pytest.mark.parametrize(
    ("mask", "narrowed"),
    [("4,7", None), ("0,1", None), ("4,5,6,7", (4, 7)), ("0,1,2,3,4,5,6,7", (4, 7))],
)
async def test_a_mask_where_no_device_files_can_be_seen(
    tmp_path: Path, mask: str, narrowed: tuple[int, ...] | None
) -> None:
    """A mask may count the node's devices from 0 or be a bare host's numbers; it has to show all rows."""
    path = put_table(tmp_path / "t.json", [(0, 4), (1, 7)])
    cluster = await located(make_root(tmp_path), {MASK: mask}, Wish(rank_table=path))
    assert cluster.visible_devices == narrowed
    assert [device.local_rank for device in cluster.node.devices] == [0, 1]
    with pytest.raises(RankTableError, match="hides from the workers"):
        await located(tmp_path, {MASK: "2,3"}, Wish(rank_table=path))


async def test_narrowing_is_said(tmp_path: Path) -> None:
    """One line says what is in sight, what the table gives, and what follows."""
    root = make_root(tmp_path, range(8))
    path = put_table(root / "t.json", [(0, 4), (1, 7)])
    told: list[str] = []
    cluster = await locate(Wish(rank_table=path), {"ASCEND_HOME_PATH": "/x"}, notify=told.append, root=root)
    assert told == [
        (
            f"this node has NPUs 0-7 in sight, and rank table {path} gives it NPUs 4, 7: "
            "ASCEND_RT_VISIBLE_DEVICES of the workers is narrowed to these"
        )
    ]
    assert environments(cluster, {}, "auto")[1][MASK] == "4,7"


@pytest.mark.parametrize(
    ("present", "mask", "found"),
    [
        (
            range(8),
            "2,3",
            "found devices 0-1, 4-7 for this node (192.0.2.100), which the environment variable",
        ),
        (range(8), "", "found devices 0-7 for this node (192.0.2.100), which the environment variable"),
        (range(7), None, "found device 7 for this node (192.0.2.100), which has NPUs 0-6"),
        (range(8, 16), None, "found devices 0-7 for this node (192.0.2.100), which has NPUs 8-15"),
    ],
)
async def test_a_table_with_devices_that_are_not_in_sight(
    tmp_path: Path, present: Sequence[int], mask: str | None, found: str
) -> None:
    """A row without a card is an error that names the devices; no worker starts without its own."""
    root = make_root(tmp_path, present)
    path = put_table(root / "t.json", [(n, n) for n in range(8)])
    with pytest.raises(RankTableError) as caught:
        await located(root, {} if mask is None else {MASK: mask}, Wish(rank_table=path))
    assert str(caught.value).startswith(f"rank table {path}: {found}")


async def test_device_files_that_are_numbered_anew(tmp_path: Path) -> None:
    """Where the user says so, the table counts: its rows are taken for all devices, in their order."""
    root = make_root(tmp_path, range(2))
    path = put_table(root / "t.json", [(0, 4), (1, 7)])
    with pytest.raises(RankTableError, match="with --ignore-platform"):
        await located(root, {}, Wish(rank_table=path))
    cluster = await located(root, {}, Wish(rank_table=path, ignore_platform=True))
    assert [device.local_rank for device in cluster.node.devices] == [0, 1]
    assert cluster.visible_devices is None


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ("2,1", "entry 2 is not larger than the one before it"),
        ("1,1", "entry 2 is not larger than the one before it"),
        ("0, 1", "entry 2 is not a number"),
        ("-1", "entry 1 is not a number"),
        ("0,1,", "entry 3 is not a number"),
        ("secret", "entry 1 is not a number"),
        ("0,4", "out of range (4)"),
    ],
)
@pytest.mark.parametrize("wish", [Wish(), Wish(nproc_per_node=2)])
async def test_a_mask_that_cann_would_cut(tmp_path: Path, mask: str, found: str, wish: Wish) -> None:
    """A mask that CANN reads in part only is an error that shows where; its text stays out of it."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path, range(4)), {MASK: mask}, wish)
    assert found in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mask", ["", " ", "NoDevFiles"])
async def test_npus_hidden_on_purpose(tmp_path: Path, caplog: pytest.LogCaptureFixture, mask: str) -> None:
    """An empty mask, and Ray's word for it, hide all NPUs: workers run without, and it is said."""
    cluster = await located(make_root(tmp_path, range(8)), {MASK: mask}, Wish(nproc_per_node=2))
    assert not cluster.npus
    assert caplog.messages == [
        "ASCEND_RT_VISIBLE_DEVICES is empty and hides the NPUs 0-7 of this node: the workers run without"
    ]


async def test_fewer_workers_than_cards(tmp_path: Path) -> None:
    """Without a table the first cards in sight are taken, and the mask stays as it is."""
    cluster = await located(make_root(tmp_path, [4, 5, 6, 7]), {}, Wish(nproc_per_node=2))
    workers = environments(cluster, {}, "auto")
    assert [opened(workers[rank], [4, 5, 6, 7], "LOCAL_RANK") for rank in range(2)] == [4, 5]
    assert MASK not in workers[0]


async def test_a_table_of_the_job_outside(tmp_path: Path) -> None:
    """A worker's own job without a table does not hand on that of the job outside."""
    cluster = await located(make_root(tmp_path), {}, Wish(nproc_per_node=1))
    outer = {"DAVINCIRUN_JOB": "x", "RANK_TABLE_FILE": "/t.json"}
    assert "RANK_TABLE_FILE" not in environments(cluster, outer, "auto")[0]
    users = environments(cluster, {"RANK_TABLE_FILE": "/t.json"}, "auto")[0]
    assert users["RANK_TABLE_FILE"] == "/t.json"


async def test_the_old_driver_counts_otherwise(tmp_path: Path) -> None:
    """With the one driver whose DEVICE_ID is physical, LOCAL_RANK still is the place."""
    root = make_root(tmp_path, range(8))
    version = root / "usr/local/Ascend/driver/version.info"
    version.parent.mkdir(parents=True)
    version.write_text("Version=20.1.0\n")
    cluster = await located(root, {}, Wish(rank_table=put_table(root / "t.json", [(1, 4), (0, 7)])))
    worker = environments(cluster, {}, "auto")[0]
    assert (worker["DEVICE_ID"], worker["LOCAL_RANK"], worker.get("ASCEND_DEVICE_ID")) == ("7", "1", None)


async def test_order_of_ranks_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that are not in device order get one warning: scripts compute a card as rank % n."""
    path = put_table(tmp_path / "t.json", [(3, 0), (2, 1), (0, 2), (1, 3)])
    await located(make_root(tmp_path), {}, Wish(rank_table=path))
    assert caplog.messages == [
        (
            f'rank table {path}: server_list[0].device: found the ranks of server "192.0.2.100" on '
            "devices 2, 3, 1, 0, in this order; expected increasing device_id; each rank gets the device of "
            "its row, but a script that takes rank % 4 for its card opens another's"
        )
    ]


def test_span() -> None:
    """Runs of numbers are drawn together."""
    assert span([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize("present", [[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]])
async def test_chosen_devices(tmp_path: Path, present: list[int]) -> None:
    """With --devices the workers see those alone, on a bare host and in a container."""
    root = make_root(tmp_path, present)
    cluster = await located(root, {}, Wish(devices="5,7"))
    workers = environments(cluster, {}, "auto")
    for name in CARD:
        assert [opened(workers[rank], present, name) for rank in range(2)] == [5, 7]
    assert cluster.device_files


@pytest.mark.parametrize(
    ("wish", "env", "found"),
    [
        (Wish(devices="4-9"), {}, "expected NPUs 8-9 as well, asked for with --devices"),
        (Wish(devices="0,2"), {MASK: "0,1"}, "found NPU 2, asked for with --devices (devices), hidden by"),
        (Wish(devices="0-3", nproc_per_node=2), {}, "found 4 NPUs asked for with --devices"),
    ],
)
async def test_a_choice_that_cannot_be(tmp_path: Path, wish: Wish, env: dict[str, str], found: str) -> None:
    """A device that is not here or hidden, and another count, are errors with the numbers."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path, range(8)), env, wish)
    assert found in str(caught.value)


async def test_a_choice_and_a_table(tmp_path: Path) -> None:
    """The choice must be what the table gives this node."""
    root = make_root(tmp_path, range(8))
    path = put_table(root / "t.json", [(0, 4), (1, 7)])
    assert (await located(root, {}, Wish(rank_table=path, devices="4,7"))).visible_devices == (4, 7)
    with pytest.raises(RankTableError, match="but --devices \\(devices\\) asks for NPUs 4-5"):
        await located(root, {}, Wish(rank_table=path, devices="4-5"))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(host=hosts())
async def test_one_card_each(
    tmp_path_factory: pytest.TempPathFactory,
    host: tuple[list[int], list[int] | None, list[tuple[int, int]]],
) -> None:
    """With --visible one each worker opens the device of its row, and sees no other, as number 0."""
    present, mask, rows = host
    root = make_root(tmp_path_factory.mktemp("host"), present)
    env = {} if mask is None else {MASK: ",".join(str(place) for place in mask)}
    wish = Wish(rank_table=put_table(root / "t.json", rows), visible="one")
    cluster = await located(root, env, wish)
    workers = environments(cluster, env, "auto")
    for rank, device in rows:
        assert {workers[rank][name] for name in CARD} == {"0"}
        assert "," not in workers[rank][MASK]
        assert opened(workers[rank], present, "LOCAL_RANK") == device
        assert workers[rank]["LOCAL_WORLD_SIZE"] == str(len(rows))
    # Names of files and the report keep the place on the node.
    assert sorted(cluster.worker_device_id(device) for device in cluster.node.devices) == list(
        range(len(rows))
    )


async def test_one_card_each_without_a_table(tmp_path: Path) -> None:
    """Without a table, with Ray's mask, and without NPUs."""
    root = make_root(tmp_path, range(8))
    env = {MASK: "2,5"}
    workers = environments(await located(root, env, Wish(visible="one")), env, "torch")
    assert [workers[rank][MASK] for rank in range(2)] == ["2", "5"]
    slots = await located(make_root(tmp_path / "none"), {}, Wish(visible="one", nproc_per_node=2))
    bare = environments(slots, {}, "torch")
    assert [(bare[rank]["LOCAL_RANK"], bare[rank].get(MASK)) for rank in range(2)] == [("0", None)] * 2
