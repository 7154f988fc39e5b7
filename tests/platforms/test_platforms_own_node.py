"""Which node of a table this host is: each signal, their order, and the refusal to guess."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rank_table_samples import device, table, two_servers

from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.platforms import own_node
from davincirunsdk.platforms.site import Site
from davincirunsdk.rank_table import RankTable, parse

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that no table knows, unless the test says so."""
    monkeypatch.setattr(addresses, "host_name", lambda: "unknown.example.org")
    monkeypatch.setattr(addresses, "own", lambda: frozenset({"203.0.113.9"}))


def find(
    rank_table: RankTable,
    env: Mapping[str, str] | None = None,
    *,
    site: Site | None = None,
    wanted: int | None = None,
) -> int:
    """Find the own node with these signals only."""
    nodes = rank_table.nodes()
    agreeing = (site,) if site is not None and site.nnodes == len(nodes) else ()
    return own_node.find(nodes, env=env or {}, sites=agreeing, wanted=wanted, path="hccl.json")


def with_server(**fields: str) -> RankTable:
    """The two servers, the second with further fields."""
    document = two_servers()
    servers = document["server_list"]
    assert isinstance(servers, list)
    assert isinstance(servers[1], dict)
    servers[1].update(fields)
    return parse(json.dumps(document))


def test_single_server() -> None:
    """A table of one node is this node's, whatever it is called."""
    assert find(table("v0_1_one_pod_any_name")) == 0


@pytest.mark.parametrize("variable", ["BATCH_TASK_CURRENT_INSTANCE", "MA_CURRENT_INSTANCE_NAME", "HOSTNAME"])
def test_pod_name(variable: str) -> None:
    """The pod's name is looked for among the pods."""
    assert find(table("v0_1_two_hosts"), {variable: "job-7f-trainjob-1"}) == 1


def test_host_name_as_pod_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a pod the addresses's name is the pod's."""
    monkeypatch.setattr(addresses, "host_name", lambda: "job-7f-trainjob-1")
    assert find(table("v0_1_two_hosts")) == 1


@pytest.mark.parametrize("variable", ["MA_CURRENT_HOST_IP", "XDL_IP", "HOST_IP", "POD_IP", "MA_CURRENT_IP"])
@pytest.mark.parametrize("field", ["server_id", "host_ip", "container_ip", "server_ip", "pod_ip"])
def test_given_address(variable: str, field: str) -> None:
    """An address that the environment gives is looked for in every field that holds one."""
    assert find(with_server(**{field: "192.0.2.77"}), {variable: "192.0.2.77"}) == 1


def test_server_id_that_is_a_name() -> None:
    """What an earlier init_rank_table() set may be a name."""
    assert find(table("v1_0_names_and_ports"), {"MA_CURRENT_HOST_IP": "node_1"}) == 1


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses's own addresses are looked for."""
    monkeypatch.setattr(addresses, "own", lambda: frozenset({"198.51.100.1", "192.0.2.12"}))
    assert find(table("v0_1_two_hosts")) == 1


@pytest.mark.parametrize("name", ["node_1", "node_1.example.org"])
def test_host_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The machine's name is looked for among the server ids, with or without its domain."""
    monkeypatch.setattr(addresses, "host_name", lambda: name)
    assert find(table("v1_0_names_and_ports")) == 1


def test_task_index_comes_last() -> None:
    """The platform's count settles it if nothing else does, and only for as many nodes."""
    parsed = table("v1_0_two_hosts")
    assert find(parsed, site=Site(node_rank=1, nnodes=2)) == 1
    assert find(parsed, {"XDL_IP": "192.0.2.11"}, site=Site(node_rank=1, nnodes=2)) == 0
    with pytest.raises(PlatformError):
        find(parsed, site=Site(node_rank=1, nnodes=3))


def test_wish_comes_first() -> None:
    """What the user asks for counts where nothing speaks against it, or he allows that; and it must exist."""
    parsed = table("v1_0_two_hosts")
    assert find(parsed, wanted=1) == 1
    env = {"XDL_IP": "192.0.2.11"}
    assert find(parsed, env, wanted=0) == 0
    nodes = parsed.nodes()
    assert own_node.find(nodes, env=env, wanted=1, path="hccl.json", ignore=True) == 1
    with pytest.raises(PlatformError) as caught:
        find(parsed, env, wanted=1)
    assert str(caught.value) == (
        "found node rank 1 asked for, but this host is node 0 (192.0.2.11) of rank table hccl.json, by its "
        "given address; expected both to agree: leave --node-rank (node_rank) out, or let it count with "
        "--ignore-platform (ignore_platform)"
    )
    with pytest.raises(PlatformError) as caught:
        find(parsed, wanted=2)
    assert str(caught.value) == (
        "found node rank 2, but rank table hccl.json has 2 nodes; expected a node rank from 0 to 1"
    )


def test_signals_narrow_down() -> None:
    """An address that two pods share leaves both; the count among them settles it."""
    parsed = table("v0_1_two_pods_one_host")
    env = {"HOST_IP": "192.0.2.11"}
    assert find(parsed, env, site=Site(node_rank=1, nnodes=3)) == 1
    with pytest.raises(PlatformError, match="found 2 of the 3 nodes"):
        find(parsed, env)
    with pytest.raises(PlatformError, match="found 2 of the 3 nodes"):
        find(parsed, env, site=Site(node_rank=2, nnodes=3))


def test_loopback_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine is 127.0.0.1 to itself, so that tells nothing."""
    document = two_servers()
    document["server_list"] = [
        {"server_id": "127.0.0.1", "device": [device(0, 0)]},
        {"server_id": "192.0.2.12", "device": [device(1, 0, 2)]},
    ]
    parsed = parse(json.dumps(document))
    monkeypatch.setattr(addresses, "own", lambda: frozenset({"127.0.0.1"}))
    with pytest.raises(PlatformError):
        find(parsed, {"HOST_IP": "127.0.0.1"})


def test_no_guess() -> None:
    """With no match the error lists what this host is known by and what stands in the table."""
    with pytest.raises(PlatformError) as caught:
        find(
            table("v0_1_two_hosts"),
            {"XDL_IP": "198.51.100.7", "POD_NAME": "other-0"},
            site=Site(title="Volcano", nnodes=2, node_rank=5),
        )
    assert str(caught.value) == (
        "found none of the 2 nodes in rank table hccl.json to be this host; expected exactly one.\n"
        "  This host: pod name other-0; host name unknown.example.org; given address 198.51.100.7; "
        "own address "
        "203.0.113.9; Volcano's node rank 5 of 2.\n"
        "  Node 0: 192.0.2.11 (job-7f-trainjob-0), 2 devices\n"
        "  Node 1: 192.0.2.12 (job-7f-trainjob-1), 2 devices\n"
        "  Give --node-rank (node_rank), or set MA_CURRENT_HOST_IP to this host's server id in the table."
    )


def test_many_candidates_stay_readable() -> None:
    """The list of candidates ends somewhere."""
    document = two_servers()
    document["server_list"] = [
        {"server_id": f"node_{place:03d}", "device": [device(place, 0, place)]} for place in range(100)
    ]
    document["server_count"] = "100"
    with pytest.raises(PlatformError) as caught:
        find(parse(json.dumps(document)))
    assert "  ... and 84 more\n" in str(caught.value)


def test_real_machine() -> None:
    """The addresses that the machine tells are such as others can know it by."""
    assert all(addresses.distinctive(address) for address in addresses.own())
    assert not addresses.distinctive("127.0.1.1")
    assert not addresses.distinctive("fe80::1")
    assert not addresses.distinctive("0.0.0.0")
    assert not addresses.distinctive("node_0")
