"""Which CPUs a worker runs on: those near its NPU, shared or split among the workers of a node.

CPUs only. Where memory comes from follows by itself, as a page is taken from the node of the CPU that
touches it first; a policy would have to be set by code in every process, and a node that is full would
kill instead of slowing down.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.errors import PlatformError
from davincirunsdk.host.devices import span
from davincirunsdk.host.tools import ask, chips_of, find_tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MODES = ("none", "auto", "node", "exclusive")

AFFINITY = "CPU_AFFINITY_CONF"
"""torch_npu's own binding; it leaves a process alone that is bound already."""

LEAST = 2
"""CPUs that a worker must have for `auto` to bind it: one would make its data loaders wait for it."""

_AT_ONCE = 8
_BUS = re.compile(r"PCIe Bus Info\s*:\s*(\S+)", re.IGNORECASE)
_TOPO_ROW = re.compile(r"^\s*NPU(\d+)\s.*?\s(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\s*$", re.MULTILINE)
_NODE = re.compile(r"node(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Where one worker runs.

    Attributes:
        cpus: Numbers of its CPUs.
        threads: How many of them are its share, for OMP_NUM_THREADS.
        why: For people.
    """

    cpus: frozenset[int]
    threads: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The CPUs of a machine that we may use.

    Attributes:
        allowed: CPUs that we were given: by cgroup, taskset, a batch system.
        cores: Each allowed CPU to the lowest CPU of its core; hyperthreads share one.
        nodes: NUMA nodes to their allowed CPUs; those without any are left out.
    """

    allowed: frozenset[int]
    cores: Mapping[int, int]
    nodes: Mapping[int, frozenset[int]]


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list of CPUs as the kernel writes it.

    Args:
        text: Such as `0-3,8-11`.

    Raises:
        ValueError: It is something else.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"{part!r} in {text!r} is not a CPU: expected none, auto, node, exclusive, or for example "
                "0-31"
            )
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def read_topology(root: Path, allowed: frozenset[int] | None = None) -> Topology:
    """Read the machine's CPUs from sysfs; blocks shortly.

    Args:
        root: Folder that stands for `/`.
        allowed: CPUs that we may use; by default those of this process.
    """
    usable = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    cores = {}
    for cpu in usable:
        text = _line(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores[cpu] = min(_cpus(text) or {cpu})
    nodes = {}
    folder = root / "sys/devices/system/node"
    for entry in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if match := _NODE.fullmatch(entry):
            cpus = _cpus(_line(folder / entry / "cpulist")) & usable
            if cpus:
                nodes[int(match[1])] = cpus
    return Topology(allowed=usable, cores=cores, nodes=nodes or {0: usable})


def nodes_of_npus(
    numbers: Sequence[int], present: Sequence[int], topology: Topology, root: Path, search_path: str | None
) -> dict[int, int]:
    """Find the NUMA nodes of NPUs; blocks for some seconds where npu-smi is asked.

    The bus address that npu-smi tells of a board leads to its node in sysfs; else npu-smi's own
    table of what is near to what has a column of CPUs.

    Args:
        numbers: Physical numbers of the NPUs to look for.
        present: Those of all NPUs here, increasing.
        topology: The CPUs.
        root: Folder that stands for `/`.
        search_path: Where else to look for npu-smi, as in PATH.

    Returns:
        NPU to node, for those that are known.
    """
    if len(topology.nodes) == 1:
        return dict.fromkeys(numbers, next(iter(topology.nodes)))
    smi = find_tool("npu-smi", root, search_path)
    if smi is None:
        return {}
    chips = chips_of(ask([smi, "info", "-m"]), present)

    def by_bus(number: int) -> int | None:
        npu, chip = chips.get(number, (str(number), ""))
        for words in ((["-c", chip],) if chip else ()) + ([],):
            match = _BUS.search(ask([smi, "info", "-t", "board", "-i", npu, *words]))
            if match:
                text = _line(root / "sys/bus/pci/devices" / match[1].lower() / "numa_node")
                if text.lstrip("-").isdigit():
                    return int(text)
        return None

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = dict(zip(numbers, threads.map(by_bus, numbers), strict=True))
    known = {number: node for number, node in found.items() if node is not None and node in topology.nodes}
    if len(known) == len(numbers):
        return known
    for match in _TOPO_ROW.finditer(ask([smi, "info", "-t", "topo"])):
        number, cpus = int(match[1]), _cpus(match[2])
        node = next((node for node, here in topology.nodes.items() if cpus & here), None)
        if number in numbers and node is not None:
            known.setdefault(number, node)
    return known


def plan(
    mode: str, numbers: Sequence[int], near: Mapping[int, int] | None, topology: Topology
) -> tuple[tuple[Bound, ...], str]:
    """Choose the CPUs of each worker.

    Args:
        mode: One of `MODES` but `none`, or a list of CPUs.
        numbers: Device numbers of the workers, in the order of their places.
        near: NPU to NUMA node, for those that are known; None where there are no NPUs.
        topology: The CPUs that we may use.

    Returns:
        One per worker; none at all where `auto` does not bind. And why not, "" where it binds.

    Raises:
        PlatformError: The mode cannot be had here.
    """
    if mode not in MODES:
        return _split_list(parse_cpus(mode), len(numbers), topology), ""
    if near is None:
        if mode == "auto":
            return (), "there are no NPUs to be near to"
        # Slots: neighbours stay together.
        order = sorted(topology.nodes)
        near = {number: order[i * len(order) // len(numbers)] for i, number in enumerate(numbers)}
    unknown = [number for number in numbers if number not in near]
    if unknown and mode == "exclusive":
        return _split_list(topology.allowed, len(numbers), topology), ""
    if unknown:
        why = f"the NUMA node of NPU {span(sorted(unknown))} is not known (npu-smi does not tell)"
        if mode == "auto":
            return (), why
        raise PlatformError(
            f"found no way to bind by node: {why}; expected it for all: use --bind exclusive "
            "(bind='exclusive'), or a list of CPUs"
        )
    together: dict[int, list[int]] = {}
    for number in numbers:
        together.setdefault(near[number], []).append(number)
    if mode == "auto":
        for node, members in together.items():
            if len(topology.nodes[node]) < LEAST * len(members):
                return (), f"node {node} has fewer than {LEAST} CPUs for each of its {len(members)} workers"
    chosen: dict[int, Bound] = {}
    for node, members in together.items():
        cpus = topology.nodes[node]
        if mode == "exclusive":
            shares = _shares(cpus, len(members), topology)
            for number, share in zip(members, shares, strict=True):
                chosen[number] = Bound(cpus=share, threads=len(share), why=f"its share of NUMA node {node}")
        else:
            for number in members:
                threads = max(1, len(cpus) // len(members))
                chosen[number] = Bound(cpus=cpus, threads=threads, why=f"NUMA node {node}")
    return tuple(chosen[number] for number in numbers), ""


@contextmanager
def bound_to(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run this thread, and what it starts meanwhile, on these CPUs; on those of before afterwards.

    A CPU that has gone since is no error: the worker then runs where the system puts it.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _split_list(cpus: frozenset[int], count: int, topology: Topology) -> tuple[Bound, ...]:
    if outside := sorted(cpus - topology.allowed):
        raise PlatformError(
            f"found CPUs {span(outside)} asked for with --bind (bind), which this process may not use; "
            f"expected some of {span(sorted(topology.allowed))}"
        )
    shares = _shares(cpus, count, topology)
    return tuple(
        Bound(cpus=share, threads=len(share), why=f"of CPUs {span(sorted(cpus))}") for share in shares
    )


def _shares(cpus: frozenset[int], count: int, topology: Topology) -> list[frozenset[int]]:
    """Split CPUs evenly: whole cores, the first get what is left over; hyperthreads where cores do not do."""
    cores: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(topology.cores.get(cpu, cpu), []).append(cpu)
    units = [cores[first] for first in sorted(cores)]
    if len(units) < count:
        units = [[cpu] for cpu in sorted(cpus)]
    if len(units) < count:
        raise PlatformError(
            f"found {len(units)} CPUs ({span(sorted(cpus))}) for {count} workers; expected one for each at "
            "least: use fewer workers, or another --bind (bind)"
        )
    each, more = divmod(len(units), count)
    shares, at = [], 0
    for place in range(count):
        size = each + (place < more)
        shares.append(frozenset(cpu for unit in units[at : at + size] for cpu in unit))
        at += size
    return shares


def _cpus(text: str) -> frozenset[int]:
    try:
        return parse_cpus(text) if text else frozenset()
    except ValueError:
        return frozenset()


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
