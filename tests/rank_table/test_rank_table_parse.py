"""Reading every form, the order of ranks, and writing v1.x."""

from __future__ import annotations

import json

import pytest
from rank_table_samples import SAMPLES, device, ranks, sample, table, two_pods, two_servers

from davincirunsdk.errors import RankTableError
from davincirunsdk.rank_table import dump, inspect, parse
from davincirunsdk.rank_table.decoding import PIECE

USABLE = sorted(
    path.stem for path in SAMPLES.glob("*.json") if path.stem.startswith(("v0", "lab", "v1")) and path.stem
)


@pytest.mark.parametrize(
    ("name", "form", "nodes", "devices"),
    [
        ("v0_1_two_hosts", "v0.1", 2, 4),
        ("v0_1_two_groups", "v0.1", 2, 2),
        ("v0_1_two_pods_one_host", "v0.1", 3, 6),
        ("lab_two_hosts", "lab", 2, 4),
        ("v1_0_one_host", "v1.0", 1, 8),
        ("v1_0_two_hosts", "v1.0", 2, 16),
        ("v1_0_bom_crlf", "v1.0", 1, 2),
        ("v1_1_number_only", "v1.0", 1, 2),
        ("v1_2_super_pods", "v1.2", 4, 8),
        ("v2_0_two_hosts", "v2.0", 2, 4),
        ("v2_0_one_rack", "v2.0", 1, 4),
    ],
)
def test_forms(name: str, form: str, nodes: int, devices: int) -> None:
    """Every form is told by what it holds, whatever it calls itself."""
    parsed = table(name)
    assert (parsed.form, len(parsed.nodes()), parsed.world_size) == (form, nodes, devices)


@pytest.mark.parametrize("name", USABLE)
def test_written_table_reads_the_same(name: str) -> None:
    """What is written for HCCL is v1.x as it stands, with the same ranks, devices and addresses."""
    parsed = table(name)
    written = parse(dump(parsed))
    assert written.as_is
    assert ranks(written) == ranks(parsed)
    assert [[row.device_ip for row in s.rows] for s in written.servers] == [
        [row.device_ip for row in s.rows] for s in parsed.servers
    ]
    assert dump(written) == dump(parsed)


def test_conversion() -> None:
    """A v0.1 table becomes the v1.0 text that ModelArts' own tool writes: these keys, all strings."""
    document = two_pods()
    assert json.loads(dump(parse(json.dumps(document)))) == {
        "status": "completed",
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": f"192.0.2.{11 + pod}",
                "device": [
                    {"device_id": str(i), "device_ip": f"29.{pod}.0.{i + 1}", "rank_id": str(2 * pod + i)}
                    for i in range(2)
                ],
            }
            for pod in range(2)
        ],
    }


def test_devices_keep_their_numbers() -> None:
    """Devices 4 to 7 stay so, while ranks count from 0."""
    written = json.loads(dump(table("v0_1_devices_4_to_7")))
    assert [(d["rank_id"], d["device_id"]) for d in written["server_list"][0]["device"]] == [
        ("0", "4"),
        ("1", "5"),
        ("2", "6"),
        ("3", "7"),
    ]


def test_pods_by_number() -> None:
    """Pods are ranked by the number that ends their name, not by arrival or as text; oddities are told."""
    parsed = table("v0_1_orders_disagree")
    assert ranks(parsed) == {"192.0.2.9": [(0, 0), (1, 1)], "192.0.2.10": [(2, 0), (3, 1)]}
    assert [str(warning) for warning in parsed.warnings] == [
        (
            'group_list: found server "192.0.2.10" ranked after server "192.0.2.9"; expected ranks '
            "in the text order "
            "of server_id, which MindSpore counts on with several servers (and HCCL in v0.1); the "
            "order of the "
            "table is kept"
        )
    ]


def test_one_pod_of_any_name() -> None:
    """A single pod needs no number in its name."""
    assert ranks(table("v0_1_one_pod_any_name")) == {"127.0.0.1": [(0, 0), (1, 1), (2, 2), (3, 3)]}
    assert table("v0_1_one_pod_any_name").warnings == ()


def test_pods_without_number() -> None:
    """Several pods without numbers are ranked as HCCL would, by server and device, and it is said."""
    parsed = table("v0_1_pods_without_number")
    assert ranks(parsed) == {"node_0": [(0, 0), (1, 1)], "node_1": [(2, 0), (3, 1)]}
    assert [str(warning) for warning in parsed.warnings] == [
        (
            'group_list[0].instance_list[0].pod_name: found "worker-xk2p"; expected a number after '
            "the last '-'; "
            "without it the instances of group_list[0] are ranked in HCCL's own order, by server_id "
            "as text and "
            "then by device_id"
        )
    ]


def test_devices_as_listed() -> None:
    """Devices of a pod are ranked as listed, with a warning that HCCL itself would not."""
    document = json.dumps(two_pods()).replace('"device_id": "0"', '"device_id": "7"')
    parsed = parse(document)
    assert ranks(parsed)["192.0.2.11"] == [(0, 7), (1, 1)]
    assert str(parsed.warnings[0]) == (
        'group_list.devices: found the ranks of server "192.0.2.11" on devices 7, 1, in this order, and '
        "likewise 1 times more; expected increasing device_id, by which HCCL itself would rank a v0.1 table; "
        "they are ranked as listed; each rank gets the device of its row, but a script that takes rank % 2 "
        "for its card opens another's"
    )


def test_pods_that_share_a_host() -> None:
    """Two pods on a host are one server with ranks in one run, and two nodes with their own devices."""
    parsed = table("v0_1_two_pods_one_host")
    assert ranks(parsed) == {
        "192.0.2.11": [(0, 0), (1, 1), (2, 2), (3, 3)],
        "192.0.2.12": [(4, 0), (5, 1)],
    }
    nodes = [(set(node.pods), [row.rank for row in node.rows]) for node in parsed.nodes()]
    assert nodes == [({"job-0"}, [0, 1]), ({"job-2"}, [2, 3]), ({"job-1"}, [4, 5])]
    again = parse(dump(parsed))
    assert [[row.rank for row in node.rows] for node in again.nodes()] == [[0, 1], [2, 3], [4, 5]]


def test_lab_mode_keeps_its_ranks() -> None:
    """Lab mode writes ranks itself; they are kept, also where servers are not in text order."""
    parsed = table("lab_two_hosts")
    assert ranks(parsed) == {"192.0.2.22": [(0, 0), (1, 1)], "192.0.2.21": [(2, 0), (3, 1)]}
    assert '"192.0.2.21" ranked after server "192.0.2.22"' in str(parsed.warnings[0])
    assert "deploy_mode" not in dump(parsed)


def test_lab_mode_without_its_mark() -> None:
    """Instances with a rank and no pod are lab mode's, also where the file does not say so."""
    document = json.loads(sample("lab_two_hosts"))
    del document["deploy_mode"]
    parsed = parse(json.dumps(document))
    assert (parsed.form, ranks(parsed)) == ("lab", ranks(table("lab_two_hosts")))


def test_group_without_devices_is_left_out() -> None:
    """A group that declares no devices is skipped, as ModelArts' tool does, with a warning."""
    document = two_pods()
    groups = document["group_list"]
    assert isinstance(groups, list)
    groups.insert(0, {"group_name": "empty", "device_count": "0", "instance_count": "0", "instance_list": []})
    document["group_count"] = "2"
    parsed = parse(json.dumps(document))
    assert parsed.world_size == 4
    assert str(parsed.warnings[0]) == (
        "group_list[0]: found a group without devices; expected devices in every group; this one is left out"
    )


def test_numbers_become_strings() -> None:
    """JSON numbers are read like strings, and written as strings, the only form HCCL takes."""
    for name in ("v1_0_numbers", "v0_1_numbers"):
        parsed = table(name)
        assert not parsed.as_is
        assert ranks(parsed) == {"192.0.2.11": [(0, 0), (1, 1)]}
    written = json.loads(dump(table("v1_0_numbers")))
    assert written["server_list"][0]["device"][1] == {
        "device_id": "1",
        "device_ip": "29.1.0.2",
        "rank_id": "1",
        "device_port": "16666",
    }


def test_unknown_fields_are_kept() -> None:
    """Fields that we do not know come out as they went in, at every level."""
    written = json.loads(dump(table("v1_0_unknown_fields")))
    assert written["cluster_list"] == [{"cluster_id": "0"}]
    assert written["IsMindIEEPJob"] is True
    assert written["server_list"][0]["rack"] == "r7"
    document = json.dumps(two_pods()).replace('"device_id": "0"', '"device_id": "0", "numa_id": 3')
    assert json.loads(dump(parse(document)))["server_list"][0]["device"][0]["numa_id"] == 3


def test_v2_comes_out_as_it_went_in() -> None:
    """A v2.0 table is written back with its numbers as numbers and all network levels."""
    assert json.loads(dump(table("v2_0_two_hosts"))) == json.loads(sample("v2_0_two_hosts"))


@pytest.mark.parametrize(
    ("name", "as_is"),
    [
        ("v1_0_one_host", True),
        ("v1_2_super_pods", True),
        ("v2_0_two_hosts", True),
        ("v1_0_bom_crlf", False),
        ("v1_0_complete", False),
        ("v1_0_numbers", False),
        ("v1_1_number_only", False),
        ("v0_1_two_hosts", False),
        ("lab_two_hosts", False),
    ],
)
def test_what_hccl_reads_itself(name: str, as_is: bool) -> None:
    """Only what HCCL reads to the letter is passed on as it stands."""
    assert table(name).as_is is as_is


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "initializing",
            'status: found "initializing"; expected "completed"; the table is not finished yet',
        ),
        (
            "pod_fragment",
            (
                "found the entry of one pod, as in a pod's annotation, not a whole table (the keys devices, "
                "pod_name, server_id); expected server_list (v1.x), group_list (v0.1) or rank_list (v2.0)"
            ),
        ),
        (
            "inference",
            (
                "found a prefill/decode table, which is for inference (the keys decode_device_list, "
                "prefill_device_list, server_count, status, version); expected server_list (v1.x), "
                "group_list "
                "(v0.1) or rank_list (v2.0)"
            ),
        ),
        (
            "heterogeneous",
            (
                "found the heterogeneous form 1.1, which is not for training (the keys node_count, "
                "node_list, "
                "status, version); expected server_list (v1.x), group_list (v0.1) or rank_list (v2.0)"
            ),
        ),
        (
            "broken_cut",
            (
                "found invalid JSON: text that ends early: this '[' is not closed at line 7, column 14 "
                "(\"device\": [); expected a ']' for it"
            ),
        ),
        (
            "broken_comma",
            (
                'found invalid JSON: a comma with nothing after it at line 16, column 20 ("rank_id": "1",); '
                "expected no comma after the last one"
            ),
        ),
        (
            "broken_no_json",
            (
                "found invalid JSON: text that is not JSON at line 1, column 1 (The table will be here "
                "soon.); "
                "expected a table that begins with '{'"
            ),
        ),
        (
            "broken_template",
            (
                "found invalid JSON: a placeholder, '{group_count}', that nobody has filled in at line 1, "
                "column 40 "
                '({"status": "completed", "group_count": {group_count}}); expected its value'
            ),
        ),
        (
            "v2_0_draft",
            (
                "rank_list[0].level_list: found the shape of an early draft of version 2.0 (level, "
                "fabric_type, "
                "rank_addrs); expected net_layer, net_type and rank_addr_list of version 2.0; HCCL reads the "
                "draft no longer"
            ),
        ),
    ],
)
def test_what_is_no_table(name: str, message: str) -> None:
    """What cannot be used is named for what it is."""
    with pytest.raises(RankTableError) as caught:
        parse(sample(name), path=f"/data/{name}.json")
    assert str(caught.value) == f"rank table /data/{name}.json: {message}"
    assert caught.value.path == f"/data/{name}.json"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "[]",
        "null",
        "7",
        '"x"',
        "{}",
        "[" * 5000,
        b"\xff\xfe\x00",
        '{"server_list": 3, "status": [1]}',
    ],
)
def test_anything_is_an_error_with_words(text: str | bytes) -> None:
    """Whatever the text, the error is ours and says what was expected."""
    with pytest.raises(RankTableError, match="expected"):
        parse(text)


def test_large_tables_are_read_the_same() -> None:
    """A table of many pieces is read as a small one, and its errors count from the start of the text."""
    document = two_servers()
    document["server_list"] = [
        {
            "server_id": f"node_{s:04d}",
            "device": [device(8 * s + i, i, s % 200, note="x" * 200) for i in range(8)],
        }
        for s in range(100)
    ]
    document["server_count"] = "100"
    for server, entry in enumerate(document["server_list"]):
        for number, row in enumerate(entry["device"]):
            row["device_ip"] = f"29.{server}.1.{number + 1}"
    text = json.dumps(document, indent=1)
    assert len(text) > 2 * PIECE
    parsed = parse(text)
    assert parsed.world_size == 800
    assert json.loads(dump(parsed)) == document
    line = text[: text.index("node_0077")].count("\n") + 1
    with pytest.raises(RankTableError, match=f"a ';' at line {line}, column 16 .*; expected a ':'"):
        parse(text.replace('"server_id": "node_0077"', '"server_id" ; "node_0077"'))
    broken = text.replace("node_0077", "node_\x00").encode()
    with pytest.raises(RankTableError, match=f"at line {line}, column"):
        parse(broken)
    with pytest.raises(RankTableError, match=f"bytes that are not UTF-8 at line {line}, column 23 "):
        parse(text.encode().replace(b"node_0077", b"node_\xff"))


def test_message_cannot_steer_a_terminal() -> None:
    """Control characters of a file do not get into messages."""
    for odd in ("z\\u001b[2J\\u009b1m", "\\u001b[2J\\u009b1m" * 20):
        document = json.dumps(two_pods()).replace("192.0.2.11", odd)
        messages = [str(finding) for finding in inspect(document)]
        assert messages
        assert all(letter.isprintable() for message in messages for letter in message)
