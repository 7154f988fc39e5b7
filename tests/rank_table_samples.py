"""The sample tables in `rank_tables/`, and a small v1.0 table to break."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from davincirunsdk.rank_table import RankTable, parse

Document: TypeAlias = "dict[str, Any]"

SAMPLES = Path(__file__).parent / "rank_tables"


def sample(name: str) -> bytes:
    """Read a sample as it is."""
    return (SAMPLES / f"{name}.json").read_bytes()


def table(name: str) -> RankTable:
    """Parse a sample."""
    return parse(sample(name), path=f"{name}.json")


def ranks(parsed: RankTable) -> dict[str, list[tuple[int, int]]]:
    """List (rank, device) per server, in the order they would be written."""
    return {server.server_id: [(row.rank, row.device_id) for row in server.rows] for server in parsed.servers}


def device(rank: int, device_id: int, server: int = 1, **more: object) -> Document:
    """A v1.x device."""
    return {
        "device_id": str(device_id),
        "device_ip": f"29.{server}.0.{device_id + 1}",
        "rank_id": str(rank),
        **more,
    }


def two_servers() -> Document:
    """A v1.0 table without blemish: two servers of two devices."""
    return {
        "status": "completed",
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {"server_id": "192.0.2.11", "device": [device(0, 0), device(1, 1)]},
            {"server_id": "192.0.2.12", "device": [device(2, 0, 2), device(3, 1, 2)]},
        ],
    }


def two_pods() -> Document:
    """A v0.1 table without blemish: two pods of two devices on two servers."""
    return {
        "status": "completed",
        "group_count": "1",
        "group_list": [
            {
                "group_name": "job-trainjob",
                "device_count": "4",
                "instance_count": "2",
                "instance_list": [
                    {
                        "pod_name": f"job-{pod}",
                        "server_id": f"192.0.2.{11 + pod}",
                        "devices": [
                            {"device_id": str(i), "device_ip": f"29.{pod}.0.{i + 1}"} for i in range(2)
                        ],
                    }
                    for pod in range(2)
                ],
            }
        ],
    }


def four_ranks() -> Document:
    """A v2.0 table without blemish: two network instances of two ranks."""
    return {
        "version": "2.0",
        "status": "completed",
        "rank_count": 4,
        "rank_list": [
            {
                "rank_id": rank,
                "local_id": rank % 2,
                "device_id": rank % 2,
                "device_port": 16666,
                "level_list": [
                    {
                        "net_layer": 0,
                        "net_instance_id": f"pod{rank // 2}",
                        "net_type": "TOPO_FILE_DESC",
                        "rank_addr_list": [
                            {"addr_type": "IPV4", "addr": f"198.51.100.{rank + 1}", "ports": ["1/0"]}
                        ],
                    },
                    {
                        "net_layer": 3,
                        "net_instance_id": "az0",
                        "net_type": "CLOS",
                        "rank_addr_list": [{"addr_type": "EID", "addr": f"df{rank:02d}", "ports": ["d2h"]}],
                    },
                ],
            }
            for rank in range(4)
        ],
    }
