"""Devices, nodes and the workers on them: where every platform ends and every framework starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.host.binding import Bound
    from davincirunsdk.host.interfaces import Interface


def printable(text: str) -> str:
    """Escape what could steer a terminal: names come from tables, pods and users."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def file_name(text: str) -> str:
    """Turn a name into one that a file or folder can have, and that leads nowhere else."""
    plain = "".join(letter if letter.isprintable() and letter != "/" else "_" for letter in text)
    short = plain.encode(errors="replace")[:100].decode(errors="ignore")
    return f"_{short[1:]}" if short.startswith(".") else short or "_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One place for a worker: an NPU with its rank, or a bare slot on a node without NPUs.

    Attributes:
        device_id: Number of the NPU on its node (physical), or the slot's number.
        rank: Rank of the worker bound to it.
        local_rank: Place of the device among those that the node's workers see, in ascending order:
            the number by which a framework opens it.
        visible_id: Number by which ASCEND_RT_VISIBLE_DEVICES names the device.
        device_ip: Address of the NPU for HCCL, "" when unknown.
    """

    device_id: int
    rank: int
    local_rank: int
    visible_id: int = -1
    device_ip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine or pod.

    Attributes:
        node_rank: Place in the job.
        name: Host name, pod name or server id.
        devices: Its devices in rank order.
    """

    node_rank: int
    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What one source says about size or place of the job.

    Attributes:
        name: Such as `node rank`.
        value: What it says.
        source: Option, rank table or variable that says it.
        believed: True for the source that counts.
        agrees: True if it says the same as that one.
    """

    name: str
    value: str
    source: str
    believed: bool
    agrees: bool = True

    def __str__(self) -> str:
        rest = "" if self.believed else " (as well)" if self.agrees else " (not believed)"
        return f"{self.name}: {self.value}, from {self.source}{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All nodes of a job, and which of them this one is.

    Attributes:
        nodes: In node rank order.
        node_rank: Place of this node in `nodes`.
        master_addr: Host or address of node 0.
        master_port: Port for the rendezvous, None when any free port of this host will do.
        job_id: Name of the job.
        rank_table: v1.x rank table file for the workers, None without one.
        log_root: Folder for the logs that CANN and the frameworks write (`<log>` in the
            documented variables).
        log_dir: Folder of the platform for worker logs, None when it has none.
        visible_devices: What ASCEND_RT_VISIBLE_DEVICES of the workers has to hold so that they see
            the node's devices and no others; None leaves it as it is.
        physical_device_id: True for the one driver release (20.1.0) whose DEVICE_ID is physical
            and which knows no ASCEND_DEVICE_ID.
        npus: True when the devices are NPUs, False for bare slots.
        device_files: True where the NPUs' device files are here, so that cards are real.
        one_each: True if each worker is to see its own device alone.
        interface: Network interface to the other nodes, None where nothing is to be said about it.
        hccl_base_port: First of the host ports for HCCL, None for its usual ones.
        binding: CPUs of each worker of this node, in the order of its devices; () where they are not
            bound.
        scheduler_elsewhere: True where MindSpore's scheduler runs apart from all nodes of the job.
        platform: Name of the platform that told all this.
        facts: Which source gave what, in order of trust.
    """

    nodes: tuple[Node, ...]
    node_rank: int
    master_addr: str
    master_port: int | None
    job_id: str
    rank_table: Path | None
    log_root: Path
    log_dir: Path | None
    visible_devices: tuple[int, ...] | None = None
    physical_device_id: bool = False
    npus: bool = True
    device_files: bool = False
    one_each: bool = False
    interface: Interface | None = None
    hccl_base_port: int | None = None
    binding: tuple[Bound, ...] = ()
    scheduler_elsewhere: bool = False
    platform: str = "host"
    facts: tuple[Fact, ...] = ()

    @property
    def node(self) -> Node:
        """This node."""
        return self.nodes[self.node_rank]

    @property
    def world_size(self) -> int:
        """Number of workers in the job."""
        return sum(len(node.devices) for node in self.nodes)

    def worker_device_id(self, device: Device) -> int:
        """Number by which the worker of a device of this node knows it: its DEVICE_ID."""
        return device.device_id if self.physical_device_id else device.local_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that is needed to start one worker.

    Attributes:
        rank: Place in the job, or -1 for an auxiliary process.
        local_rank: Place on this node.
        device_id: Number of its device as the worker knows it: its DEVICE_ID.
        npu_id: Number of the NPU on the host, as in a rank table, -1 for none.
        cpus: CPUs that it runs on, None for those of the launcher.
        name: `rank 3` or `scheduler`, for people.
        command: Words of the command.
        env: The whole environment.
        work_dir: Folder it runs in.
        log_path: File for its output.
        terminal: It has the user's terminal.
        auxiliary: True for a process that serves the ranks and is none itself.
    """

    rank: int
    local_rank: int
    device_id: int
    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    work_dir: Path
    log_path: Path
    npu_id: int = -1
    cpus: frozenset[int] | None = None
    terminal: bool = False
    auxiliary: bool = False
