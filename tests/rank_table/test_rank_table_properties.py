"""Tables made up by hypothesis: whole ones agree with themselves, broken ones show where."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk.errors import RankTableError
from davincirunsdk.rank_table import dump, inspect, parse

Document: TypeAlias = dict[str, Any]
Path: TypeAlias = "tuple[str | int, ...]"

NAMES = st.text("abcxyz0189.-_", min_size=1, max_size=20)
EXTRA = st.dictionaries(
    st.sampled_from(["x_note", "x_count", "x_list"]),
    st.none() | st.integers() | st.text() | st.lists(st.booleans()),
)
JUNK: list[Any] = [None, [], {}, "", " ", -1, 3.5, True, "x", [1], {"a": 1}]


@st.composite
def placed_devices(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    """Draw servers by name, each with the numbers of its devices in some order."""
    servers = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    numbers = st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True)
    return [(server, draw(numbers)) for server in servers]


def address(server: int, device: int) -> str:
    """An address that no other device has."""
    return f"29.{server}.0.{device + 1}"


@st.composite
def v1_documents(draw: st.DrawFn) -> Document:
    """Draw a valid v1.0 table, ranks in any order."""
    placed = draw(placed_devices())
    ranks = iter(draw(st.permutations(range(sum(len(numbers) for _, numbers in placed)))))
    servers: list[Any] = [
        {
            "server_id": server,
            "device": [
                {
                    "device_id": str(number),
                    "device_ip": address(place, number),
                    "rank_id": str(next(ranks)),
                    **draw(EXTRA),
                }
                for number in numbers
            ],
            **draw(EXTRA),
        }
        for place, (server, numbers) in enumerate(placed)
    ]
    return {
        "version": "1.0",
        "status": "completed",
        "server_count": str(len(servers)),
        "server_list": servers,
        **draw(EXTRA),
    }


@st.composite
def v0_documents(draw: st.DrawFn) -> Document:
    """Draw a valid v0.1 table, pods with numbers in any order of arrival."""
    placed = draw(placed_devices())
    order = draw(st.permutations(range(len(placed))))
    instances: list[Any] = [
        {
            "pod_name": f"job-{order[place]}",
            "server_id": server,
            "devices": [
                {"device_id": str(n), "device_ip": address(place, n), **draw(EXTRA)} for n in numbers
            ],
        }
        for place, (server, numbers) in enumerate(placed)
    ]
    return {
        "status": "completed",
        "group_count": "1",
        "group_list": [
            {
                "group_name": "job",
                "device_count": str(sum(len(numbers) for _, numbers in placed)),
                "instance_count": str(len(instances)),
                "instance_list": instances,
            }
        ],
    }


@st.composite
def v2_documents(draw: st.DrawFn) -> Document:
    """Draw a valid v2.0 table: some network instances of some ranks each."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ranks: list[Any] = []
    for instance, size in enumerate(sizes):
        for local_id in range(size):
            ranks.append(
                {
                    "rank_id": len(ranks),
                    "local_id": local_id,
                    "device_id": local_id,
                    "level_list": [
                        {
                            "net_layer": 0,
                            "net_instance_id": f"pod{instance}",
                            "net_type": "TOPO_FILE_DESC",
                            "rank_addr_list": [
                                {"addr_type": "EID", "addr": f"df{instance}{local_id}", "ports": ["0/1"]}
                            ],
                        }
                    ],
                    **draw(EXTRA),
                }
            )
    return {"version": "2.0", "rank_count": len(ranks), "rank_list": ranks}


DOCUMENTS = st.one_of(v0_documents(), v1_documents(), v2_documents())


def places(document: Any, path: Path = ()) -> list[Path]:
    """List every place in a document."""
    found = [path] if path else []
    if isinstance(document, dict):
        for key, value in document.items():
            found += places(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            found += places(value, (*path, index))
    return found


def at(document: Any, path: Path) -> Any:
    """Take the value at a place."""
    for step in path:
        document = document[step]
    return document


def put(document: Any, path: Path, value: Any) -> None:
    """Set the value at a place."""
    # A copy: what is drawn next may change it, and the next example must find it as it was.
    at(document, path[:-1])[path[-1]] = copy.deepcopy(value)


def remove(document: Any, path: Path) -> None:
    """Take a place away."""
    del at(document, path[:-1])[path[-1]]


def word(path: Path) -> str:
    """Write a place the way faults do."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


NEEDED = {
    *("server_list", "server_id", "device", "device_id", "rank_id", "group_list", "instance_list"),
    *("pod_name", "devices", "rank_list", "rank_count", "local_id", "level_list", "net_layer"),
    *("net_instance_id", "net_type", "rank_addr_list", "addr_type", "addr", "ports"),
    *("device_count", "instance_count", "group_count"),
}
FREE = {"server_id", "pod_name", "net_instance_id"}  # names of any form, a number's too
NOT_MISSED = {"device_count", "instance_count", "group_count"}  # their lack is a warning


@settings(deadline=None)
@given(v0_documents() | v1_documents())
def test_conversion_keeps_every_device(document: Document) -> None:
    """What is written for HCCL has the devices of the source, ranks 0 to n-1, and reads the same again."""
    parsed = parse(json.dumps(document))
    text = dump(parsed)
    written = parse(text)
    assert written.as_is
    assert dump(written) == text
    rows = [(s.server_id, r.device_id, r.device_ip, r.rank) for s in written.servers for r in s.rows]
    assert sorted(r[3] for r in rows) == list(range(len(rows)))
    assert rows == [(s.server_id, r.device_id, r.device_ip, r.rank) for s in parsed.servers for r in s.rows]
    listed = document.get("server_list") or document["group_list"][0]["instance_list"]
    source = [
        (block["server_id"], int(device["device_id"]), device["device_ip"])
        for block in listed
        for device in block.get("device") or block["devices"]
    ]
    assert sorted(source) == sorted(row[:3] for row in rows)


@settings(deadline=None)
@given(v0_documents())
def test_pods_are_ranked_by_number(document: Document) -> None:
    """Ranks follow the pods' numbers, then the devices as listed."""
    instances = document["group_list"][0]["instance_list"]
    expected = [
        (instance["server_id"], int(device["device_id"]))
        for instance in sorted(instances, key=lambda instance: int(instance["pod_name"].split("-")[1]))
        for device in instance["devices"]
    ]
    parsed = parse(json.dumps(document))
    by_rank = sorted(
        (row.rank, server.server_id, row.device_id) for server in parsed.servers for row in server.rows
    )
    assert [entry[1:] for entry in by_rank] == expected


@settings(deadline=None)
@given(v1_documents() | v2_documents())
def test_nothing_is_lost(document: Document) -> None:
    """A v1.0 or v2.0 table is written back with every field and value it came with."""
    written = json.loads(dump(parse(json.dumps(document))))
    if "rank_list" not in document:
        assert written == document
        return
    key = "rank_list"
    assert sorted(written.pop(key), key=str) == sorted(document[key], key=str)
    assert written == {name: value for name, value in document.items() if name != key}


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.data())
def test_junk_is_found_where_it_is(document: Document, data: st.DataObject) -> None:
    """Junk in place of any needed value is a fault with the path of just that value."""
    path = data.draw(st.sampled_from([p for p in places(document) if p[-1] in NEEDED]))
    value = at(document, path)
    fitting: list[Any] = JUNK
    if path[-1] in FREE or (isinstance(value, str) and not value.isdigit()):
        fitting = [None, [], {}, 3.5, True]  # other texts may be as good a name
    broken = copy.deepcopy(document)
    put(broken, path, data.draw(st.sampled_from(fitting)))
    if path[-1] in ("rank_addr_list", "ports") and at(broken, path) == []:
        return  # no addresses at all are allowed
    found = [finding.where for finding in inspect(json.dumps(broken)) if finding.fatal]
    assert any(where == word(path) or where.startswith(f"{word(path)}[") for where in found), found


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.data())
def test_a_missing_key_is_found_where_it_is_not(document: Document, data: st.DataObject) -> None:
    """A needed key taken away is a fault with the path it should have; a top list makes it no table."""
    path = data.draw(
        st.sampled_from([p for p in places(document) if p[-1] in NEEDED - NOT_MISSED and len(p) > 1])
    )
    broken = copy.deepcopy(document)
    remove(broken, path)
    found = [finding.where for finding in inspect(json.dumps(broken)) if finding.fatal]
    assert word(path) in found, found


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.data())
def test_no_bare_error_whatever_breaks(document: Document, data: st.DataObject) -> None:
    """Any two values replaced by anything: the table is read, or the error is ours and names a place."""
    for _ in range(2):
        path = data.draw(st.sampled_from(places(document)))
        put(document, path, data.draw(st.sampled_from(JUNK) | st.integers() | st.text()))
    text = json.dumps(document)
    with contextlib.suppress(RankTableError):
        parsed = parse(text)
        assert parse(dump(parsed)).world_size == parsed.world_size
    assert all(finding.expected for finding in inspect(text))


@settings(deadline=None)
@given(v0_documents() | v1_documents(), st.data())
def test_a_cut_text_is_never_a_table(document: Document, data: st.DataObject) -> None:
    """Any beginning of a table, short of its end, is told to end early."""
    text = json.dumps(document).encode()
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    (finding,) = inspect(cut)
    assert "empty text" in finding.found or "text that ends early" in finding.found


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes(data: bytes | str) -> None:
    """Any bytes are read without a bare error."""
    assert all(finding.expected for finding in inspect(data))
