"""Cards and ports held for a job, and the interface to other nodes."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from platform_host import located, make_root

from davincirunsdk.concurrency import in_thread
from davincirunsdk.environment.worker import worker_environment
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses, claims, interfaces, ports
from davincirunsdk.host.claims import Claims
from davincirunsdk.options import Wish
from davincirunsdk.platforms import locate
from davincirunsdk.platforms.holding import hold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from davincirunsdk.cluster import Cluster

FIRST = 9000 + os.getpid() % 500 * 2
"""Numbers of cards that no other test on this machine has."""


@pytest.fixture
def held() -> Iterator[Claims]:
    """Claims of a first job."""
    first = Claims("first")
    yield first
    first.release()


async def cards(folder: Path, *numbers: int) -> Cluster:
    """Locate on a host with these cards."""
    return await located(make_root(folder, [FIRST + number for number in numbers]), {})


async def test_a_card_is_held_once(tmp_path: Path, held: Claims) -> None:
    """A card of a running job is refused with that job's name, and is free when the job lets it go."""
    cluster = await cards(tmp_path, 0, 1)
    await hold(cluster, held, {}, wait=None, notify=print)
    second = Claims("second")
    with pytest.raises(PlatformError) as caught:
        await hold(cluster, second, {}, wait=None, notify=print)
    assert str(caught.value) == (
        f"found NPU {FIRST} of this node still held by job first (launcher {os.getpid()}); expected it free: "
        "choose others with --devices (devices), wait with --wait-devices (wait_devices), or end that job "
        "(davincirunctl stop)"
    )
    second.release()
    shared = Claims("third")
    await hold(cluster, shared, {"HCCL_NPU_SOCKET_PORT_RANGE": "auto"}, wait=None, notify=print)
    shared.release()
    held.release()
    await hold(cluster, second, {}, wait=None, notify=print)
    second.release()


async def test_waiting_for_a_card(tmp_path: Path, held: Claims) -> None:
    """Who waits is told who holds the card, and goes on when it is let go; or gives up in time."""
    cluster = await cards(tmp_path, 0)
    await hold(cluster, held, {}, wait=None, notify=print)
    lines: list[str] = []
    told = asyncio.Event()

    def notify(text: str) -> None:
        lines.append(text)
        told.set()

    second = Claims("second")
    waiting = asyncio.create_task(hold(cluster, second, {}, wait=30, notify=notify))
    await asyncio.wait_for(told.wait(), 20)
    assert lines == [f"waiting for NPU {FIRST}, held by job first (launcher {os.getpid()}) (up to 30 s)"]
    held.release()
    await asyncio.wait_for(waiting, 20)
    third = Claims("third")
    with pytest.raises(PlatformError, match=r"still held after .* by job second"):
        await hold(cluster, third, {}, wait=0.6, notify=print)
    second.release()
    third.release()


@pytest.fixture
def other_program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that has the first card open, until its standard input ends."""
    make_root(tmp_path, [FIRST])
    source = (
        f"import sys; card = open({str(tmp_path / 'dev' / f'davinci{FIRST}')!r}); print(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        yield program


async def test_waiting_for_another_program(
    tmp_path: Path, held: Claims, other_program: subprocess.Popen[str]
) -> None:
    """A card that a process has open is waited for too, and the process is named."""
    cluster = await located(tmp_path, {})
    who = f"process {other_program.pid} ("
    with pytest.raises(
        PlatformError, match=f"NPU {FIRST} .* still held open after 0.3 s by {re.escape(who)}"
    ):
        await hold(cluster, held, {}, wait=0.3, notify=print, root=tmp_path)
    lines: list[str] = []

    def notify(text: str) -> None:
        lines.append(text)
        assert other_program.stdin is not None
        other_program.stdin.close()

    held.release()
    await asyncio.wait_for(hold(cluster, held, {}, wait=30, notify=notify, root=tmp_path), 20)
    (line,) = lines
    assert line.startswith(f"waiting for NPU {FIRST}, held open by {who}")


async def test_a_holder_that_is_killed(tmp_path: Path) -> None:
    """The kernel takes a claim back when its process ends, however that is; who waits learns of it."""
    program = (
        "import sys, time; from davincirunsdk.host.claims import Claims; c = Claims('gone'); "
        f"print(c.take('npu/{FIRST}'), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert await asyncio.to_thread(other.stdout.readline) == "True\n"
        cluster = await cards(tmp_path, 0)
        lines: list[str] = []
        mine = Claims("mine")
        waiting = asyncio.create_task(hold(cluster, mine, {}, wait=60, notify=lines.append))
        await asyncio.sleep(0)
        other.kill()
        await asyncio.wait_for(waiting, 30)
        mine.release()


async def test_two_jobs_have_ports_of_their_own(tmp_path: Path, held: Claims) -> None:
    """A second job on other cards of a host gets a block of HCCL's ports that nobody has, unless set."""
    first = await hold(await cards(tmp_path / "a", 0), held, {}, wait=None, notify=print)
    second = Claims("second")
    other = await hold(await cards(tmp_path / "b", 1), second, {}, wait=None, notify=print)
    bases = [cluster.hccl_base_port or ports.HCCL_BASE for cluster in (first, other)]
    assert abs(bases[0] - bases[1]) >= ports.HCCL_COUNT
    assert other.hccl_base_port is not None
    assert environment(other, {})["HCCL_IF_BASE_PORT"] == str(other.hccl_base_port)
    assert environment(other, {"HCCL_IF_BASE_PORT": "50000"})["HCCL_IF_BASE_PORT"] == "50000"
    second.release()


async def test_waiting_for_ports(tmp_path: Path, held: Claims) -> None:
    """A block of the user's that is taken is waited for as cards are."""
    base = next(base for base in range(21000, 29000, 40) if ports.block_is_free(base))
    cluster = await cards(tmp_path, 0)
    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("", base + 7))
        taken.listen()
        with pytest.raises(PlatformError, match=r"still taken after 0.6 s"):
            await hold(cluster, held, {"HCCL_IF_BASE_PORT": str(base)}, wait=0.6, notify=print)
    held.release()
    await hold(cluster, held, {"HCCL_IF_BASE_PORT": str(base)}, wait=5, notify=print)


async def test_no_cards_no_claims(held: Claims) -> None:
    """Slots without NPUs are nobody's."""
    cluster = await located_slots()
    assert await hold(cluster, held, {}, wait=None, notify=print) is cluster
    assert await in_thread(claims.holder, "npu/0") == ""


async def located_slots() -> Cluster:
    """Locate on a host without NPUs."""
    from pathlib import Path

    return await located(Path("/nonexistent"), {"TMPDIR": "/tmp"}, Wish(nproc_per_node=2))


def environment(cluster: Cluster, given: Mapping[str, str]) -> dict[str, str]:
    """Environment of the first worker."""
    return worker_environment(
        cluster=cluster,
        device=cluster.node.devices[0],
        master_port=1,
        framework="auto",
        inherited=given,
        extra={},
        mark="m",
        cores=2,
    )


NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "HCCL_IF_IP")


async def test_interface_to_other_nodes(tmp_path: Path) -> None:
    """Only with several nodes; what the user has set stays, and nothing of HCCL's is set beside it."""
    own = sorted(address for address in addresses.own() if ":" not in address)
    if not own:
        pytest.fail("this test needs an interface with an IPv4 address")
    wish = Wish(nproc_per_node=1, nnodes=2, node_rank=0, master_addr=own[0])
    cluster = await located(make_root(tmp_path), {}, wish)
    assert cluster.interface is not None
    assert cluster.interface.address == own[0]
    found = environment(cluster, {})
    assert [found[name] for name in NAMES] == [cluster.interface.name] * 3 + [own[0]]
    mine = environment(cluster, {"HCCL_IF_IP": "192.0.2.9", "GLOO_SOCKET_IFNAME": "mine"})
    assert [mine.get(name) for name in NAMES] == ["mine", cluster.interface.name, None, "192.0.2.9"]
    assert any(str(fact).startswith("network interface: ") for fact in cluster.facts)
    alone = await located(tmp_path, {}, Wish(nproc_per_node=1))
    assert alone.interface is None
    none = Wish(nproc_per_node=1, nnodes=2, node_rank=0, master_addr=own[0], iface="none")
    assert (await located(tmp_path, {}, none)).interface is None


async def test_named_interface(tmp_path: Path) -> None:
    """A name must be one of this machine's; then it counts."""
    with pytest.raises(PlatformError) as caught:
        await located(make_root(tmp_path), {}, Wish(nproc_per_node=1, iface="no0"))
    assert "found interface 'no0' asked for, which is not one of this machine; expected one of " in str(
        caught.value
    )
    cluster = await located(tmp_path, {}, Wish(nproc_per_node=1, iface="lo"))
    assert environment(cluster, {})["GLOO_SOCKET_IFNAME"] == "lo"


def test_no_way() -> None:
    """The loopback leads nowhere, nor does a name that nobody knows."""
    assert interfaces.towards("127.0.0.1") is None
    assert interfaces.towards("no-such-host.invalid") is None


async def test_cann_that_is_not_sourced(tmp_path: Path) -> None:
    """On a node with NPUs and no CANN in the environment one line says what to write."""
    root = make_root(tmp_path, range(2))
    script = root / "usr/local/Ascend/ascend-toolkit/set_env.sh"
    lines: list[str] = []
    await locate(Wish(), {}, notify=lines.append, root=root)
    script.parent.mkdir(parents=True)
    script.touch()
    await locate(Wish(), {}, notify=lines.append, root=root)
    await locate(Wish(), {"ASCEND_HOME_PATH": "/x"}, notify=lines.append, root=root)
    await locate(Wish(nproc_per_node=1), {}, notify=lines.append, root=tmp_path / "none")
    assert len(lines) == 2
    assert "install it, or source its set_env.sh" in lines[0]
    assert "`source /usr/local/Ascend/ascend-toolkit/set_env.sh`" in lines[1]
