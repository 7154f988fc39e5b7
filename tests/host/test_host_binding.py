"""CPUs near the NPUs, from prepared sysfs trees; and real affinities of real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk.errors import PlatformError
from davincirunsdk.host.binding import Topology, bound_to, nodes_of_npus, parse_cpus, plan, read_topology

if TYPE_CHECKING:
    from pathlib import Path

NODES = 4
"""As on a host with eight NPUs: two of them on each node."""


def machine(root: Path, *, threads: int = 2, per_node: int = 8) -> Path:
    """Make the sysfs of a machine: hyperthread siblings are half the machine apart, as on x86."""
    count = NODES * per_node
    cores = count // threads
    for cpu in range(count):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        siblings = sorted(range(cpu % cores, count, cores))
        (folder / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    for node in range(NODES):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        size = cores // NODES
        spans = [
            f"{part * cores + node * size}-{part * cores + (node + 1) * size - 1}" for part in range(threads)
        ]
        (folder / "cpulist").write_text(",".join(spans) + "\n")
    return root


def npu_smi(root: Path, script: str) -> None:
    """Put an npu-smi there that answers so."""
    tool = root / "usr/local/sbin/npu-smi"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def by_bus(root: Path, *nodes: int) -> None:
    """NPU n is at bus n, whose node sysfs knows."""
    npu_smi(root, '[ "$3" = board ] && echo "        PCIe Bus Info      : 0000:C$5:00.0"')
    for number, node in enumerate(nodes):
        folder = root / f"sys/bus/pci/devices/0000:c{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


def everything(root: Path) -> Topology:
    """All CPUs of the machine may be used."""
    return read_topology(root, frozenset(range(NODES * 8)))


def test_topology(tmp_path: Path) -> None:
    """Nodes hold what we were given of them, and hyperthreads share a core."""
    topology = read_topology(machine(tmp_path), frozenset({0, 1, 16, 4, 20}))
    assert topology.nodes == {0: {0, 1, 16}, 1: {4, 20}}
    assert topology.cores == {0: 0, 16: 0, 1: 1, 4: 4, 20: 4}
    assert read_topology(tmp_path / "none", frozenset({3, 5})).nodes == {0: {3, 5}}


def test_near_the_npu(tmp_path: Path) -> None:
    """Each worker gets the node that its NPU's bus is on; `auto` does so where there is room."""
    by_bus(machine(tmp_path), 3, 3, 2, 2, 1, 1, 0, 0)
    topology = everything(tmp_path)
    near = nodes_of_npus(range(8), range(8), topology, tmp_path, None)
    assert near == {0: 3, 1: 3, 2: 2, 3: 2, 4: 1, 5: 1, 6: 0, 7: 0}
    for mode in ("node", "auto"):
        bound, why = plan(mode, range(8), near, topology)
        assert not why
        assert [one.cpus for one in bound] == [topology.nodes[near[number]] for number in range(8)]
        assert {one.threads for one in bound} == {4}


def test_shares(tmp_path: Path) -> None:
    """`exclusive` gives whole cores, no CPU twice, and the first workers what is left over."""
    by_bus(machine(tmp_path), 0, 0, 0, 1)
    topology = everything(tmp_path)
    near = nodes_of_npus(range(4), range(4), topology, tmp_path, None)
    bound, _ = plan("exclusive", range(4), near, topology)
    assert [sorted(one.cpus) for one in bound] == [
        [0, 1, 16, 17],
        [2, 18],
        [3, 19],
        [4, 5, 6, 7, 20, 21, 22, 23],
    ]
    assert [one.threads for one in bound] == [4, 2, 2, 8]


def test_by_the_table_of_npu_smi(tmp_path: Path) -> None:
    """Where no bus is told, npu-smi's table with its column of CPUs is believed."""
    table = (
        "           NPU0       NPU1       CPU Affinity\\n"
        "NPU0       X          HCCS       0-3,16-19\\n"
        "NPU1       HCCS       X          8-11,24-27\\n\\nLegend:\\n  X = Self\\n"
    )
    npu_smi(machine(tmp_path), f'[ "$3" = topo ] && printf "{table}"')
    topology = everything(tmp_path)
    assert nodes_of_npus([0, 1], [0, 1], topology, tmp_path, None) == {0: 0, 1: 2}


def test_unknown_nodes(tmp_path: Path) -> None:
    """`auto` leaves the workers alone and says why, `node` is an error, `exclusive` shares all out."""
    by_bus(machine(tmp_path), 0, -1)
    topology = everything(tmp_path)
    near = nodes_of_npus([0, 1], [0, 1], topology, tmp_path, None)
    assert near == {0: 0}
    assert plan("auto", [0, 1], near, topology) == (
        (),
        "the NUMA node of NPU 1 is not known (npu-smi does not tell)",
    )
    with pytest.raises(PlatformError, match=r"use --bind exclusive \(bind='exclusive'\), or a list of CPUs"):
        plan("node", [0, 1], near, topology)
    shared, _ = plan("exclusive", [0, 1], near, topology)
    assert [len(one.cpus) for one in shared] == [16, 16]


def test_too_little_room(tmp_path: Path) -> None:
    """Inside a small cpuset `auto` does not bind, and shares below one CPU are an error."""
    machine(tmp_path)
    topology = read_topology(tmp_path, frozenset({0, 4, 5, 6}))
    assert (
        plan("auto", [0, 1], {0: 0, 1: 1}, topology)[1]
        == "node 0 has fewer than 2 CPUs for each of its 1 workers"
    )
    with pytest.raises(PlatformError, match=r"found 1 CPUs \(0\) for 2 workers"):
        plan("exclusive", [0, 1], {0: 0, 1: 0}, topology)


def test_slots(tmp_path: Path) -> None:
    """Without NPUs `auto` has nothing to go by; by node, neighbours stay together."""
    topology = everything(machine(tmp_path))
    assert plan("auto", [0, 1], None, topology) == ((), "there are no NPUs to be near to")
    bound, _ = plan("node", range(8), None, topology)
    assert [min(one.cpus) for one in bound] == [0, 0, 4, 4, 8, 8, 12, 12]


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 16), st.integers(1, 2))
def test_any_list_is_shared_out_fairly(cpus: set[int], count: int, threads: int) -> None:
    """Nobody's CPU is anybody else's, all are used, cores stay whole, and shares differ by one core."""
    topology = Topology(
        allowed=frozenset(cpus),
        cores={cpu: cpu % (64 // threads) for cpu in cpus},
        nodes={0: frozenset(cpus)},
    )
    text = ",".join(map(str, sorted(cpus)))
    if len(cpus) < count:
        with pytest.raises(PlatformError):
            plan(text, range(count), None, topology)
        return
    bound, _ = plan(text, range(count), None, topology)
    assert frozenset().union(*(one.cpus for one in bound)) == cpus
    assert sum(len(one.cpus) for one in bound) == len(cpus)
    cores = [{topology.cores[cpu] for cpu in one.cpus} for one in bound]
    if len(set(topology.cores.values())) >= count:
        assert sum(map(len, cores)) == len(set(topology.cores.values()))
        assert max(map(len, cores)) - min(map(len, cores)) <= 1


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "all"])
def test_what_is_not_a_list(text: str) -> None:
    """A list that cannot be read is an error that names the choices."""
    with pytest.raises(ValueError, match="expected none, auto, node, exclusive"):
        parse_cpus(text)


def test_the_thread_is_as_it_was() -> None:
    """Only what is started meanwhile is bound."""
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    with bound_to(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    with bound_to(frozenset({100000})):
        assert os.sched_getaffinity(0) == before


SHOW = (
    "import json, os; print(json.dumps([os.environ.get('RANK'), sorted(os.sched_getaffinity(0)), "
    "os.environ.get('OMP_NUM_THREADS')]))"
)


@pytest.mark.timeout(60)
def test_real_workers(tmp_path: Path) -> None:
    """Workers really run where they were put, the launcher's own CPUs stay, OMP_NUM_THREADS follows."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.fail("this test needs two CPUs")
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "davincirunsdk", *options, sys.executable, "-c", SHOW],
            cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50,
            check=False,
        )  # fmt: skip

    two = f"{mine[0]},{mine[1]}"
    done = run("--nproc-per-node", "2", "--bind", two, "--verbose")
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line.split("] ", 1)[1]) for line in done.stdout.splitlines())
    assert found == [["0", [mine[0]], "1"], ["1", [mine[1]], "1"]]
    assert f"CPUs of rank 1: {mine[1]}, from --bind {two}: of CPUs " in done.stderr
    auto = run("--nproc-per-node", "1", "--bind", "auto")
    assert "workers are not bound to CPUs: there are no NPUs to be near to" in auto.stderr
    outside = run("--nproc-per-node", "1", "--bind", "4000")
    assert outside.returncode == 3
    assert "found CPUs 4000 asked for with --bind, which this process may not use" in outside.stderr
    assert run("--nproc-per-node", "1", "--bind", "some").returncode == 2
