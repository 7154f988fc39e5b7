"""A node of an engine's job takes its NPUs' addresses from the platform's table where it has no others."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from davincirunsdk.engines.own_entry import own_entry
from davincirunsdk.errors import DavinciRunError
from davincirunsdk.rank_table import dump

if TYPE_CHECKING:
    from pathlib import Path


def platform_table(folder: Path, version: str = "1.0") -> dict[str, str]:
    """Three hosts of four NPUs, two of them in one super pod; the environment that names the table."""
    hosts = ["10.9.0.7", "10.9.0.10", "10.9.0.9"]
    table: dict[str, object] = {"status": "completed", "version": version, "server_count": "3"}
    table["server_list"] = [
        {
            "server_id": host,
            "device": [
                {
                    "device_id": str(number),
                    "rank_id": str(4 * place + number),
                    "device_ip": f"29.{place}.0.{number + 1}",
                    **({"super_device_id": str(100 * place + number)} if version == "1.2" else {}),
                }
                for number in range(4)
            ],
        }
        for place, host in enumerate(hosts)
    ]
    if version == "1.2":
        table["super_pod_list"] = [
            {"super_pod_id": "0", "server_list": [{"server_id": hosts[0]}, {"server_id": hosts[1]}]},
            {"super_pod_id": "1", "server_list": [{"server_id": hosts[2]}]},
        ]
    path = folder / "hccl.json"
    path.write_text(json.dumps(table))
    return {"RANK_TABLE_FILE": str(path), "MA_CURRENT_HOST_IP": hosts[1]}


@pytest.mark.parametrize("version", ["1.0", "1.2"])
async def test_the_entry_is_this_node_s_alone(version: str, tmp_path: Path) -> None:
    """The NPUs that were chosen, with the addresses and super pod that the platform wrote, ranks from 0."""
    entry = await own_entry((1, 3), platform_table(tmp_path, version), tmp_path)
    assert entry is not None
    made = json.loads(dump(entry))
    (server,) = made["server_list"]
    assert (made["version"], server["server_id"]) == (version, "10.9.0.10")
    assert [
        (row["rank_id"], row["device_id"], row["device_ip"], row.get("super_device_id"))
        for row in server["device"]
    ] == [
        ("0", "1", "29.1.0.2", "101" if version == "1.2" else None),
        ("1", "3", "29.1.0.4", "103" if version == "1.2" else None),
    ]
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": "10.9.0.10"}]}]
    assert made.get("super_pod_list") == (pods if version == "1.2" else None)


async def test_a_table_that_is_not_complete_yet_is_waited_for(tmp_path: Path) -> None:
    """As on one node: what is waited for is told, and what the platform writes then is taken."""
    env = platform_table(tmp_path)
    path = tmp_path / "hccl.json"
    text = path.read_text()
    path.write_text('{"status": "initializing"}')
    told: list[str] = []

    def note(line: str) -> None:
        told.append(line)
        threading.Thread(target=path.write_text, args=(text,)).start()

    entry = await own_entry((2,), env, tmp_path, limit=None, notify=note)
    assert entry is not None
    assert [row.device_ip for row in entry.servers[0].rows] == ["29.1.0.3"]
    assert "initializing" in told[0]


async def test_without_a_table_there_is_no_entry(tmp_path: Path) -> None:
    """No variable and no file at a known place: nothing is found, and that is no error."""
    assert await own_entry((0,), {}, tmp_path) is None


@pytest.mark.parametrize(
    ("chosen", "changes", "said"),
    [
        ((0, 5), {}, "no device 5"),
        ((0,), {"MA_CURRENT_HOST_IP": ""}, "to be this host"),
        ((0,), {"RANK_TABLE_FILE": "/no/such.json"}, "/no/such.json .* its folder /no does not exist"),
    ],
    ids=["another device", "another host", "no file"],
)
async def test_an_entry_that_is_not_there_is_told(
    chosen: tuple[int, ...], changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    """The message says what is missing, and in which table."""
    with pytest.raises(DavinciRunError, match=said):
        await own_entry(chosen, {**platform_table(tmp_path), **changes}, tmp_path)
