"""Where a meeting takes place, and who is expected: in pods, under Slurm, from tables and by hand."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from davincirunsdk.cluster import Cluster, Device, Node
from davincirunsdk.engines.admission import Identity, read_key
from davincirunsdk.engines.convene import convene
from davincirunsdk.engines.meeting_guest import GuestMeeting
from davincirunsdk.engines.meeting_host import HostMeeting
from davincirunsdk.errors import PlatformError
from davincirunsdk.options import JobOptions

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.engines.meeting import Meeting, Terms


def cluster_of(*names: str, node_rank: int = 1, **changes: object) -> Cluster:
    """A job of one rank on each of these nodes."""
    made = Cluster(
        nodes=tuple(
            Node(node_rank=place, name=name, devices=(Device(device_id=0, rank=place, local_rank=0),))
            for place, name in enumerate(names)
        ),
        node_rank=node_rank,
        master_addr="127.0.0.1",
        master_port=29500,
        job_id=socket.gethostname(),
        rank_table=None,
        log_root=None,  # type: ignore[arg-type] # nobody looks
        log_dir=None,
    )
    return replace(made, **changes)  # type: ignore[arg-type] # of any field


async def terms(
    cluster: Cluster, env: dict[str, str] | None = None, **options: object
) -> tuple[Terms | None, list[str]]:
    """What a node would meet by, and what it says."""
    said: list[str] = []
    meeting: Meeting | None = await convene(
        cluster,
        JobOptions.of(["true"], "./", "./log", **options),
        env or {},
        stop=said.append,
        say=said.append,
        workers=lambda: (),
        others_ended=lambda: None,
    )
    if meeting is None:
        return None, said
    assert isinstance(meeting, GuestMeeting if cluster.node_rank else HostMeeting)
    await meeting.close()
    return meeting._terms, said


async def test_by_hand_the_master_names_the_place() -> None:
    """Its address, and the port after its own; a job that nobody named has no name to be told by."""
    found, _ = await terms(cluster_of("node 0", "here"), master_addr="localhost", nnodes=2)
    assert found is not None
    assert (found.places, found.port, found.known) == (("localhost",), 29501, None)
    assert found.identity == Identity(
        job="", node_rank=1, nnodes=2, world_size=2, host=socket.gethostname(), key=b""
    )


@pytest.mark.parametrize(
    ("master", "asked", "port"), [(29500, None, 29501), (65535, None, 65534), (29500, 4000, 4000)]
)
async def test_the_port_is_next_to_the_masters(master: int, asked: int | None, port: int) -> None:
    """All nodes come to the same without being told, or are told."""
    found, _ = await terms(cluster_of("a", "b", master_port=master), meet_port=asked)
    assert found is not None
    assert found.port == port


async def test_a_tables_server_ids_are_the_nodes() -> None:
    """The table names node 0's address and who may come."""
    found, _ = await terms(cluster_of("10.9.0.1", "10.9.0.2"))
    assert found is not None
    assert found.places == ("10.9.0.1", "127.0.0.1")
    assert found.known == frozenset({"10.9.0.1", "10.9.0.2"})


async def test_volcanos_hosts_are_looked_up() -> None:
    """The pods that VC_*_HOSTS names may come; one that cannot be looked up makes them unknown."""
    env = {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "localhost,127.0.0.1"}
    found, _ = await terms(cluster_of("localhost", "127.0.0.1"), env)
    assert found is not None
    assert found.known is not None
    assert "127.0.0.1" in found.known
    env["VC_WORKER_HOSTS"] = "localhost,no-such-host.invalid"
    found, _ = await terms(cluster_of("localhost", "no-such-host.invalid"), env)
    assert found is not None
    assert found.known is None


OPERATOR = {"MINDX_TASK_ID": "uid", "MASTER_ADDR": "10.96.7.7", "RANK": "1", "LOCAL_RANK": "0"}


async def test_an_operators_service_is_no_place_to_meet() -> None:
    """Its virtual address forwards the rendezvous port alone: one line, or an error where it is required."""
    cluster = cluster_of("node 0", "here", master_addr="10.96.7.7")
    found, said = await terms(cluster, OPERATOR)
    assert found is None
    assert len(said) == 1
    assert "Kubernetes service" in said[0]
    with pytest.raises(PlatformError, match="--meet"):
        await terms(cluster, OPERATOR, meet="require")
    found, _ = await terms(cluster_of("10.9.0.1", "10.9.0.2", master_addr="10.96.7.7"), OPERATOR)
    assert found is not None
    assert found.places == ("10.9.0.1",)


async def test_healthy_pods_stay_where_mindcluster_recovers_jobs() -> None:
    """A job whose pods all fail within seconds is finally failed there; elsewhere nobody stays."""
    cluster = cluster_of("10.9.0.1", "10.9.0.2")
    for env, options, expected in (
        ({}, {}, 0.0),
        (OPERATOR, {}, 0.0),
        ({**OPERATOR, "PROCESS_RECOVER": "on"}, {}, 30.0),
        ({**OPERATOR, "PROCESS_RECOVER": "on"}, {"leave_after": 5}, 5.0),
        ({}, {"leave_after": 7}, 7.0),
    ):
        found, _ = await terms(cluster, env, **options)
        assert found is not None
        assert found.leave_after == expected


async def test_nobody_meets_who_need_not() -> None:
    """One node, or --meet off."""
    assert await terms(cluster_of("here", node_rank=0)) == (None, [])
    assert await terms(cluster_of("a", "b"), meet="off") == (None, [])


async def test_a_named_job_is_told_by_its_name() -> None:
    """The platform's, or the user's."""
    found, _ = await terms(cluster_of("a", "b", job_id="modelarts-job-1"))
    assert found is not None
    assert found.identity.job == "modelarts-job-1"


def test_the_key_comes_from_variable_or_file(tmp_path: Path) -> None:
    """The file wins; blanks around it do not count."""
    path = tmp_path / "key"
    path.write_text("from the file\n")
    env = {"DAVINCIRUN_MEET_KEY": " from the variable "}
    assert read_key(env, None) == b"from the variable"
    assert read_key(env, path) == b"from the file"
    assert read_key({}, None) == b""


async def test_a_key_file_that_will_not_do_is_named(tmp_path: Path) -> None:
    """One that cannot be read or is empty; a key is never shown, and with one all addresses may come."""
    path = tmp_path / "key"
    with pytest.raises(PlatformError, match="No such file"):
        await terms(cluster_of("10.9.0.1", "10.9.0.2"), meet_key_file=path)
    path.write_text(" \n")
    with pytest.raises(PlatformError, match="is empty"):
        await terms(cluster_of("10.9.0.1", "10.9.0.2"), meet_key_file=path)
    path.write_text("s3cret")
    found, _ = await terms(cluster_of("10.9.0.1", "10.9.0.2"), meet_key_file=path)
    assert found is not None
    assert found.known is None
    assert "s3cret" not in repr(found)
