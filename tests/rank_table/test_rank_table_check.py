"""One case per rule: the whole message, which names the place, what was found and what was expected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rank_table_samples import device, four_ranks, sample, two_pods, two_servers

from davincirunsdk.errors import RankTableError
from davincirunsdk.rank_table import inspect, parse

if TYPE_CHECKING:
    from davincirunsdk.rank_table.table import Json

GONE = object()
"""As a new value: take the key away."""

PATH_TO_DEVICE = ("server_list", 1, "device", 1)
INSTANCE = ("group_list", 0, "instance_list", 1)
LEVEL = ("rank_list", 2, "level_list", 1)


def change(document: Json, path: tuple[str | int, ...], value: object) -> str:
    """Set one place of a document, or take it away; return the text."""
    place: object = document
    for step in path[:-1]:
        assert isinstance(place, (dict, list))
        place = place[step]  # type: ignore[index] # the step fits the container
    last = path[-1]
    if value is GONE:
        assert isinstance(place, dict)
        del place[last]
    else:
        place[last] = value  # type: ignore[index] # as above
    return json.dumps(document)


def faults(text: str) -> list[str]:
    """Word the faults of a text."""
    return [str(finding) for finding in inspect(text) if finding.fatal]


def warnings(text: str) -> list[str]:
    """Word the oddities of a text; there must be no fault."""
    assert faults(text) == []
    return [str(finding) for finding in inspect(text)]


DECIMAL = "a whole number in decimal digits, as a string"
ADDRESS = "an IPv4 or IPv6 address, or several of one family with commas between"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("status",), GONE, 'status: found nothing (the key is missing); expected "completed"'),
        (("status",), "initializing", 'status: found "initializing"; expected "completed"'),
        (("status",), 1, 'status: found 1; expected "completed"'),
        (
            ("server_count",),
            "3",
            'server_count: found "3"; expected "2", the number of servers in server_list',
        ),
        (("server_count",), "two", f'server_count: found "two"; expected {DECIMAL}'),
        (("server_list",), [], "server_list: found an empty list; expected a list of servers, at least one"),
        (
            ("server_list",),
            {},
            "server_list: found an empty object; expected a list of servers, at least one",
        ),
        (
            ("server_list", 1, "server_id"),
            GONE,
            (
                "server_list[1].server_id: found nothing (the key is missing); expected the name or "
                "address of "
                "the server"
            ),
        ),
        (
            ("server_list", 1, "server_id"),
            " ",
            'server_list[1].server_id: found " "; expected the name or address of the server',
        ),
        (
            ("server_list", 1, "server_id"),
            "n" * 65,
            "server_list[1].server_id: found a text of 65 characters; expected at most 64 characters",
        ),
        (
            ("server_list", 1, "server_id"),
            "192.0.2.11",
            (
                'server_list[1].server_id: found "192.0.2.11" again (first at '
                "server_list[0].server_id); expected "
                "a different server_id for each server"
            ),
        ),
        (
            ("server_list", 1, "host_ip"),
            "192.0.2.300",
            'server_list[1].host_ip: found "192.0.2.300"; expected an IPv4 or IPv6 address',
        ),
        (
            ("server_list", 1, "device"),
            GONE,
            (
                "server_list[1].device: found nothing (the key is missing); expected a list of devices, "
                "at least one"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "rank_id"),
            GONE,
            f"server_list[1].device[1].rank_id: found nothing (the key is missing); expected {DECIMAL}",
        ),
        (
            (*PATH_TO_DEVICE, "rank_id"),
            "2",
            (
                'server_list[1].device[1].rank_id: found "2" again; expected every rank from 0 to 3 '
                "once, for "
                "there are 4 devices; no row has 3"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "rank_id"),
            "4",
            (
                'server_list[1].device[1].rank_id: found "4"; expected every rank from 0 to 3 once, '
                "for there are "
                "4 devices; no row has 3"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "rank_id"),
            "-1",
            f'server_list[1].device[1].rank_id: found "-1"; expected {DECIMAL}',
        ),
        (
            (*PATH_TO_DEVICE, "rank_id"),
            "9" * 5000,
            f'server_list[1].device[1].rank_id: found "{"9" * 59}... (5002 characters); expected {DECIMAL}',
        ),
        (
            (*PATH_TO_DEVICE, "device_id"),
            "0",
            (
                'server_list[1].device[1].device_id: found "0" again (first at '
                "server_list[1].device[0].device_id)"
                "; expected each device of a server once"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "device_id"),
            True,
            f"server_list[1].device[1].device_id: found true; expected {DECIMAL}",
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            GONE,
            (
                "server_list[1].device[1].device_ip: found nothing; expected the address of the "
                "device's network "
                "port, for there are several servers"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            "",
            (
                'server_list[1].device[1].device_ip: found ""; expected the address of the device\'s network '
                "port, for there are several servers"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            "29.1.0.1",
            (
                'server_list[1].device[1].device_ip: found "29.1.0.1" again (first at '
                "server_list[0].device[0].device_ip); expected a different address for each device of the job"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            "29.1.*.1",
            f'server_list[1].device[1].device_ip: found "29.1.*.1"; expected {ADDRESS}',
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            "29.1.0.9\0",
            f'server_list[1].device[1].device_ip: found "29.1.0.9\\u0000"; expected {ADDRESS}',
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            29,
            "server_list[1].device[1].device_ip: found 29; expected an IP address as a string",
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            "fd00::1",
            (
                'server_list[1].device[1].device_ip: found 1 IPv6 address ("fd00::1"); expected 1 '
                "IPv4 address, "
                "as at server_list[0].device[0].device_ip"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "device_ip"),
            "29.2.0.2,29.2.1.2",
            (
                'server_list[1].device[1].device_ip: found 2 IPv4 addresses ("29.2.0.2,29.2.1.2"); '
                "expected 1 IPv4 "
                "address, as at server_list[0].device[0].device_ip"
            ),
        ),
        (
            (*PATH_TO_DEVICE, "device_port"),
            "0",
            'server_list[1].device[1].device_port: found "0"; expected a port from "1" to "65535"',
        ),
        (
            (*PATH_TO_DEVICE, "host_port"),
            "65536",
            'server_list[1].device[1].host_port: found "65536"; expected a port from "1" to "65535"',
        ),
        (
            (*PATH_TO_DEVICE, "backup_device_ip"),
            "29.2.0",
            (
                'server_list[1].device[1].backup_device_ip: found "29.2.0"; expected an IPv4 or IPv6 '
                "address, or "
                "several with commas between"
            ),
        ),
        (PATH_TO_DEVICE, "1", 'server_list[1].device[1]: found "1"; expected an object: one device'),
        (("server_list", 1), None, "server_list[1]: found null; expected an object: one of the servers"),
    ],
)
def test_v1_rules(path: tuple[str | int, ...], value: object, message: str) -> None:
    """Every rule of v1.0 names what breaks it."""
    assert faults(change(two_servers(), path, value))[0] == message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("status",), GONE, 'status: found nothing (the key is missing); expected "completed"'),
        (("group_count",), "2", 'group_count: found "2"; expected "1", the number of groups in group_list'),
        (("group_list",), [], "group_list: found an empty list; expected a list of groups, at least one"),
        (
            ("group_list", 0, "group_name"),
            "g" * 128,
            "group_list[0].group_name: found a text of 128 characters; expected at most 127 characters",
        ),
        (
            ("group_list", 0, "device_count"),
            "8",
            (
                'group_list[0].device_count: found "8"; expected "4", the number of devices in all '
                "instances of "
                "the group"
            ),
        ),
        (
            ("group_list", 0, "instance_count"),
            "1",
            'group_list[0].instance_count: found "1"; expected "2", the number of instances in instance_list',
        ),
        (
            ("group_list", 0, "instance_list"),
            [],
            "group_list[0].instance_list: found an empty list; expected a list of instances, at least one",
        ),
        (
            (*INSTANCE, "pod_name"),
            GONE,
            (
                "group_list[0].instance_list[1].pod_name: found nothing (the key is missing); "
                "expected the name "
                "of the pod"
            ),
        ),
        (
            (*INSTANCE, "pod_name"),
            "job-0",
            (
                'group_list[0].instance_list[1].pod_name: found "job-0" again (first at '
                "group_list[0].instance_list[0].pod_name); expected a different pod_name for each"
            ),
        ),
        (
            (*INSTANCE, "server_id"),
            None,
            (
                "group_list[0].instance_list[1].server_id: found null; expected the name or address of "
                "the server"
            ),
        ),
        (
            (*INSTANCE, "server_id"),
            "192.0.2.11",
            (
                'group_list[0].instance_list[1].devices[0].device_id: found "0" again (first at '
                "group_list[0].instance_list[0].devices[0].device_id); expected each device of a server once"
            ),
        ),
        (
            (*INSTANCE, "devices"),
            [],
            (
                "group_list[0].instance_list[1].devices: found an empty list; expected a list of devices, at "
                "least one"
            ),
        ),
        (
            (*INSTANCE, "devices", 0, "device_id"),
            "",
            f'group_list[0].instance_list[1].devices[0].device_id: found ""; expected {DECIMAL}',
        ),
        (
            (*INSTANCE, "devices", 0, "device_ip"),
            GONE,
            (
                "group_list[0].instance_list[1].devices[0].device_ip: found nothing; expected the "
                "address of the "
                "device's network port, for there are several servers"
            ),
        ),
    ],
)
def test_v0_rules(path: tuple[str | int, ...], value: object, message: str) -> None:
    """Every rule of v0.1 names what breaks it, by the path in the v0.1 text."""
    assert faults(change(two_pods(), path, value))[0] == message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("rank_count",), 5, 'rank_count: found "5"; expected "4", the number of ranks in rank_list'),
        (("rank_list",), [], "rank_list: found an empty list; expected a list of ranks, at least one"),
        (
            ("rank_list", 2, "rank_id"),
            0,
            (
                'rank_list[2].rank_id: found "0" again; expected every rank from 0 to 3 once, for '
                "there are 4 "
                "devices; no row has 2"
            ),
        ),
        (
            ("rank_list", 2, "local_id"),
            GONE,
            "rank_list[2].local_id: found nothing (the key is missing); expected a whole number",
        ),
        (
            ("rank_list", 2, "device_id"),
            65,
            "rank_list[2].device_id: found 65; expected a device from 0 to 64",
        ),
        (
            ("rank_list", 2, "device_port"),
            0,
            "rank_list[2].device_port: found 0; expected a port from 1 to 65535",
        ),
        (
            ("rank_list", 2, "level_list"),
            [],
            "rank_list[2].level_list: found an empty list; expected a list of network levels, at least one",
        ),
        (
            (*LEVEL, "net_layer"),
            0,
            "rank_list[2].level_list[1].net_layer: found 0; expected layers from 0 to 7, increasing",
        ),
        (
            (*LEVEL, "net_layer"),
            8,
            "rank_list[2].level_list[1].net_layer: found 8; expected layers from 0 to 7, increasing",
        ),
        (
            (*LEVEL, "net_instance_id"),
            "",
            'rank_list[2].level_list[1].net_instance_id: found ""; expected a name of 1 to 1024 characters',
        ),
        (
            (*LEVEL, "net_type"),
            "RING",
            'rank_list[2].level_list[1].net_type: found "RING"; expected TOPO_FILE_DESC or CLOS',
        ),
        (
            ("rank_list", 2, "level_list", 0, "net_type"),
            "CLOS",
            'rank_list[2].level_list[0].net_type: found "CLOS"; expected TOPO_FILE_DESC',
        ),
        (
            (*LEVEL, "rank_addr_list"),
            [{}] * 25,
            (
                "rank_list[2].level_list[1].rank_addr_list: found a list of 25; expected a list of "
                "at most 24 "
                "addresses"
            ),
        ),
        (
            (*LEVEL, "rank_addr_list", 0, "addr_type"),
            "MAC",
            (
                'rank_list[2].level_list[1].rank_addr_list[0].addr_type: found "MAC"; expected EID or '
                "IPV4 or IPV6"
            ),
        ),
        (
            ("rank_list", 2, "level_list", 0, "rank_addr_list", 0, "addr"),
            "198.51.100",
            (
                'rank_list[2].level_list[0].rank_addr_list[0].addr: found "198.51.100"; expected an '
                "IPv4 or IPv6 "
                "address"
            ),
        ),
        (
            (*LEVEL, "rank_addr_list", 0, "ports"),
            ["0/1"] * 17,
            (
                "rank_list[2].level_list[1].rank_addr_list[0].ports: found a list of 17; expected a "
                "list of at "
                "most 16 port names"
            ),
        ),
        (("status",), "initializing", 'status: found "initializing"; expected "completed"'),
    ],
)
def test_v2_rules(path: tuple[str | int, ...], value: object, message: str) -> None:
    """Every rule of v2.0 names what breaks it."""
    assert faults(change(four_ranks(), path, value))[0] == message


def test_v2_device_once_per_server() -> None:
    """Two ranks of a v2.0 server may not have one device."""
    assert faults(change(four_ranks(), ("rank_list", 3, "device_id"), 0)) == [
        "rank_list: found device_id 0 again on pod1 (rank 3); expected each device of a server once"
    ]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("super_pod_list",),
            [],
            "super_pod_list: found an empty list; expected a list of super pods, at least one",
        ),
        (
            ("super_pod_list", 1, "super_pod_id"),
            "0",
            (
                'super_pod_list[1].super_pod_id: found "0" again (first at super_pod_list[0].super_pod_id); '
                "expected a different name for each super pod"
            ),
        ),
        (
            ("super_pod_list", 1, "super_pod_id"),
            "",
            'super_pod_list[1].super_pod_id: found ""; expected the name of the super pod, not empty',
        ),
        (
            ("super_pod_list", 1, "server_list", 0, "server_id"),
            "node_9",
            (
                'super_pod_list[1].server_list[0].server_id: found "node_9"; expected the server_id '
                "of a server in "
                "the top server_list"
            ),
        ),
        (
            ("super_pod_list", 1, "server_list", 0, "server_id"),
            "node_0",
            (
                'super_pod_list[1].server_list[0].server_id: found "node_0" again (first at '
                "super_pod_list[0].server_list[0].server_id); expected each server once"
            ),
        ),
        (
            ("super_pod_list", 1, "server_list"),
            [{"server_id": "node_3"}],
            (
                'server_list[2].server_id: found "node_2"; expected every server in one super pod of '
                "super_pod_list"
            ),
        ),
        (
            ("server_list", 1, "device", 0, "super_device_id"),
            "0",
            (
                'server_list[1].device[0].super_device_id: found "0" again (first at '
                "server_list[0].device[0].super_device_id); expected a different super_device_id for "
                "each device "
                "of a super pod"
            ),
        ),
        (
            ("server_list", 1, "device", 0, "super_device_id"),
            "x",
            (
                'server_list[1].device[0].super_device_id: found "x"; expected the SDID in decimal '
                "digits, as a "
                "string"
            ),
        ),
    ],
)
def test_super_pod_rules(path: tuple[str | int, ...], value: object, message: str) -> None:
    """Every rule of super pods names what breaks it."""
    assert faults(change(json.loads(sample("v1_2_super_pods")), path, value))[0] == message


def test_inside_one_super_pod_no_addresses_are_needed() -> None:
    """Several servers need device addresses, but not inside a single super pod."""
    document = json.loads(sample("v1_2_super_pods"))
    document["super_pod_list"] = [
        {"super_pod_id": "0", "server_list": [{"server_id": f"node_{i}"} for i in range(4)]}
    ]
    rows = [row for server in document["server_list"] for row in server["device"]]
    for sdid, row in enumerate(rows):
        del row["device_ip"]
        row["super_device_id"] = str(sdid)
    assert faults(json.dumps(document)) == []
    del rows[0]["super_device_id"]
    assert len(faults(json.dumps(document))) == 8


def test_lab_rules() -> None:
    """Lab mode has one device and one rank per instance, and counts of its own."""
    document = json.loads(sample("lab_two_hosts"))
    group = document["group_list"][0]
    group["device_num"] = "8"
    group["server_num"] = "1"
    group["instance_list"][3]["rank_id"] = "0"
    group["instance_list"][2]["devices"].append({"device_id": "7", "device_ip": "29.2.0.8"})
    assert faults(json.dumps(document)) == [
        (
            "group_list[0].instance_list[2].devices: found a list of 2; expected one device, for the "
            "instance has "
            "one rank_id"
        ),
        (
            'group_list[0].device_num: found "8"; expected "5", the number of devices in all instances '
            "of the group"
        ),
        'group_list[0].server_num: found "1"; expected "2", the number of different servers in the group',
        (
            'group_list[0].instance_list[2].devices[1].rank_id: found "2" again; expected every rank '
            "from 0 to 4 "
            "once, for there are 5 devices; no row has 3, 4"
        ),
        (
            'group_list[0].instance_list[3].devices[0].rank_id: found "0" again; expected every rank '
            "from 0 to 4 "
            "once, for there are 5 devices; no row has 3, 4"
        ),
    ]


def test_all_faults_in_one_error() -> None:
    """One error lists every fault of the file, and carries the path of the first."""
    document = two_servers()
    document["status"] = "initializing"
    servers = document["server_list"]
    assert isinstance(servers, list)
    servers[1] = {"server_id": "192.0.2.11", "device": [device(2, 0), {"rank_id": "3"}]}
    with pytest.raises(RankTableError) as caught:
        parse(json.dumps(document), path="hccl.json")
    assert str(caught.value) == (
        "rank table hccl.json has 5 faults:\n"
        f"  server_list[1].device[1].device_id: found nothing (the key is missing); expected {DECIMAL}\n"
        '  status: found "initializing"; expected "completed"\n'
        '  server_list[1].server_id: found "192.0.2.11" again (first at server_list[0].server_id); '
        "expected a "
        "different server_id for each server\n"
        '  server_list[1].device[0].device_ip: found "29.1.0.1" again (first at '
        "server_list[0].device[0].device_ip); expected a different address for each device of the job\n"
        "  server_list[1].device[1].device_ip: found nothing; expected the address of the device's network "
        "port, for there are several servers"
    )
    assert (caught.value.path, caught.value.where) == ("hccl.json", "server_list[1].device[1].device_id")


def test_a_flood_of_faults_stays_readable() -> None:
    """A rule broken by every device of a large table gives a short message, and soon."""
    document = two_servers()
    document["server_list"] = [
        {"server_id": f"node_{s}", "device": [device(0, i) for i in range(8)]} for s in range(2000)
    ]
    document["server_count"] = "2000"
    with pytest.raises(RankTableError) as caught:
        parse(json.dumps(document))
    lines = str(caught.value).splitlines()
    assert len(lines) == 52
    assert lines[-1] == "  ... and 950 more"


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        (
            "v1_1_number_only",
            [
                (
                    'version: found "1.1"; expected "1.0", for the content is that of v1.0; HCCL '
                    "gets a corrected "
                    "copy"
                )
            ],
        ),
        (
            "v1_0_devices_0_and_4",
            [
                (
                    "server_list[0].device: found devices 0, 4; expected all in 0-3 or all in 4-7 if "
                    "this is a 910A "
                    "board, whose two rings a job of 2 must not cross; other boards have no such rule"
                )
            ],
        ),
        ("v1_0_no_addresses", []),
        ("v1_0_two_hosts", []),
        ("v1_2_super_pods", []),
        ("v2_0_two_hosts", []),
    ],
)
def test_oddities(name: str, messages: list[str]) -> None:
    """What is odd but can be used is a warning; what is usual gives none."""
    assert warnings(sample(name).decode("utf-8-sig")) == messages


def test_uneven_and_interleaved_servers() -> None:
    """Servers of different size, and ranks of one server with others' between, are told."""
    document = two_servers()
    servers = document["server_list"]
    assert isinstance(servers, list)
    servers[0] = {"server_id": "192.0.2.11", "device": [device(0, 0), device(2, 1), device(4, 2)]}
    servers[1] = {"server_id": "192.0.2.12", "device": [device(1, 0, 2), device(3, 1, 2)]}
    assert warnings(json.dumps(document)) == [
        (
            'server_list[0].device: found ranks from 0 to 4 on 3 devices of server "192.0.2.11"; '
            "expected the "
            "ranks of a server without a gap"
        ),
        (
            'server_list[1].device: found ranks from 1 to 3 on 2 devices of server "192.0.2.12"; '
            "expected the "
            "ranks of a server without a gap"
        ),
        (
            "server_list[0]: found from 2 to 3 devices per server; expected equally many on each; "
            "HCCL refuses "
            "others on all chips but 910B and 910_93"
        ),
    ]


def test_odd_number_of_devices() -> None:
    """Three devices on one server are no job for a 910A board."""
    document = two_servers()
    document["server_list"] = [{"server_id": "a", "device": [device(i, i) for i in range(3)]}]
    document["server_count"] = "1"
    assert warnings(json.dumps(document)) == [
        (
            "server_list[0].device: found 3 devices; expected 1, 2, 4 or 8 if this is a 910A board; "
            "other boards "
            "have no such rule"
        )
    ]


def test_super_pods_apart_and_mixed() -> None:
    """Servers of a super pod listed apart, and devices without a super pod number among others, are told."""
    document = json.loads(sample("v1_2_super_pods"))
    document["server_list"][1], document["server_list"][2] = (
        document["server_list"][2],
        document["server_list"][1],
    )
    del document["server_list"][3]["device"][0]["super_device_id"]
    assert warnings(json.dumps(document))[:2] == [
        (
            "server_list[3].device[0].super_device_id: found nothing; expected a super_device_id, as "
            "other devices "
            "have one: on all or on none"
        ),
        'server_list[2].server_id: found "node_1"; expected the servers of super_pod_list[0] listed together',
    ]


def test_counts_that_v0_lacks() -> None:
    """A count or name that the conversion does not need is only missed aloud."""
    document = two_pods()
    groups = document["group_list"]
    assert isinstance(groups, list)
    assert isinstance(groups[0], dict)
    del groups[0]["instance_count"], groups[0]["group_name"], document["group_count"]
    assert warnings(json.dumps(document)) == [
        (
            'group_count: found nothing (the key is missing); expected "1", the number of groups in '
            "group_list; "
            "HCCL itself would refuse the table"
        ),
        (
            "group_list[0].group_name: found nothing (the key is missing); expected a name; HCCL "
            "itself would "
            "refuse the table"
        ),
        (
            'group_list[0].instance_count: found nothing (the key is missing); expected "2", the number of '
            "instances in instance_list; HCCL itself would refuse the table"
        ),
    ]
