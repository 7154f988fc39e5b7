"""One rank table of what several nodes found."""

from __future__ import annotations

import json

import pytest

from davincirunsdk.engines.joint import table_of
from davincirunsdk.engines.messages import NodeFacts
from davincirunsdk.errors import RankTableError


def facts(host: str, *, pod: str = "", first_sdid: int = 0, addresses: bool = True) -> NodeFacts:
    """A node of two NPUs."""
    devices = [
        {
            "device_id": str(number),
            "rank_id": str(number),
            **({"device_ip": f"29.{ord(host[0])}.0.{number + 1}"} if addresses else {}),
            **({"super_device_id": str(first_sdid + number)} if pod else {}),
        }
        for number in range(2)
    ]
    table = {
        "status": "completed",
        "version": "1.2" if pod else "1.0",
        "server_list": [{"server_id": host, "device": devices}],
        **({"super_pod_list": [{"super_pod_id": pod, "server_list": [{"server_id": host}]}]} if pod else {}),
    }
    return NodeFacts(host=host, address="192.0.2.1", port=1, devices=2, table=json.dumps(table), version="1")


def test_nodes_of_one_super_pod_need_no_addresses() -> None:
    """Inside one super pod HCCL finds the devices by their numbers there."""
    text, order = table_of(
        [facts("b", pod="7", first_sdid=2, addresses=False), facts("a", pod="7", addresses=False)]
    )
    table = json.loads(text)
    assert order == (1, 0)
    assert table["version"] == "1.2"
    assert [server["server_id"] for server in table["server_list"]] == ["a", "b"]
    (pod,) = table["super_pod_list"]
    assert [member["server_id"] for member in pod["server_list"]] == ["a", "b"]
    found = [device["super_device_id"] for server in table["server_list"] for device in server["device"]]
    assert found == ["0", "1", "2", "3"]


def test_nodes_of_a_super_pod_stand_together() -> None:
    """Nodes are ranked super pod by super pod, whose device numbers may be the same."""
    text, order = table_of(
        [
            facts("a", pod="8"),
            facts("b", pod="7"),
            facts("c", pod="8", first_sdid=2),
            facts("d", pod="7", first_sdid=2),
        ]
    )
    table = json.loads(text)
    assert order == (1, 3, 0, 2)
    assert [server["server_id"] for server in table["server_list"]] == ["b", "d", "a", "c"]
    assert [pod["super_pod_id"] for pod in table["super_pod_list"]] == ["7", "8"]


def test_several_super_pods_need_addresses() -> None:
    """Between super pods traffic goes through the devices' network ports."""
    text, _ = table_of([facts("a", pod="7"), facts("b", pod="8", addresses=False)])
    assert text == ""


def test_a_super_pod_on_some_nodes_only() -> None:
    """A node whose super pod is not known is named, instead of a table that HCCL refuses."""
    with pytest.raises(RankTableError, match=r"found no super pod on b, but on other nodes"):
        table_of([facts("a", pod="7"), facts("b")])


def test_plain_nodes() -> None:
    """Without super pods the table is v1.0, in the order of ids; without addresses there is none."""
    text, order = table_of([facts("b"), facts("a")])
    assert (json.loads(text)["version"], order) == ("1.0", (1, 0))
    assert table_of([facts("b"), facts("a", addresses=False)])[0] == ""
