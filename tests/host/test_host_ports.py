"""Free ports: one range for all, and a block for HCCL."""

from __future__ import annotations

import socket

from davincirunsdk.host.ports import HCCL_BASES, HCCL_COUNT, PORTS, block_is_free, free_port, is_free


def test_a_free_port() -> None:
    """It lies where no outgoing connection and no node port of Kubernetes can be."""
    ports = {free_port() for _ in range(20)}
    assert ports <= set(range(20000, 30000))
    assert len(ports) > 10


def test_a_port_in_use() -> None:
    """A port that somebody listens on is not free, and neither is its block."""
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        assert not is_free(port)
        assert not block_is_free(port - 3)
    assert is_free(port)


def test_blocks_do_not_overlap() -> None:
    """Blocks for HCCL are apart from each other, end at the last port that HCCL takes, and avoid ours."""
    taken = [port for base in HCCL_BASES for port in range(base, base + HCCL_COUNT)]
    assert len(set(taken)) == len(taken)
    assert max(HCCL_BASES) <= 65520
    assert not set(taken) & set(PORTS)
