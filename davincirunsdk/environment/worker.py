"""The variables a worker gets: pure functions from the cluster to a mapping, one per framework."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from davincirunsdk.cluster import file_name
from davincirunsdk.environment.stale import CHIEF, STALE, TABLES
from davincirunsdk.host.devices import MASK
from davincirunsdk.leftovers.mark import JOB_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.cluster import Cluster, Device

RESTART_COUNT = "DAVINCIRUN_RESTART_COUNT"
"""The variable with the number of this start of the workers, from 0."""

SOCKET_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
HCCL_NAMES = ("HCCL_SOCKET_IFNAME", "HCCL_IF_IP")

FRAMEWORKS = ("auto", "mindspore", "torch", "none")


def worker_environment(
    *,
    cluster: Cluster,
    device: Device,
    master_port: int,
    framework: str,
    inherited: Mapping[str, str],
    extra: Mapping[str, str],
    mark: str,
    cores: int,
    job_id: str = "",
    error_file: str = "",
    max_restarts: int = 0,
    attempt: int = 0,
) -> dict[str, str]:
    """Build the whole environment of one worker.

    Args:
        cluster: The job's nodes, and which is this one.
        device: The worker's device, which holds its rank.
        master_port: Port for the rendezvous.
        framework: One of `FRAMEWORKS`.
        inherited: The launcher's environment.
        extra: What the user gave for this job; it wins over everything but rank and device.
        mark: The job's mark.
        cores: Usable cores of this machine.
        job_id: The job's id, by which torch's helpers tell runs apart; by default the platform's.
        error_file: File to which torch's `record` writes an exception, "" for none.
        max_restarts: Restarts that the job may have.
        attempt: Number of this start, from 0.

    Returns:
        The environment. Sources: the documented variables of the 0.1 series, HCCL, MindSpore,
        torch; see README, "What a worker gets".
    """
    base = {name: value for name, value in inherited.items() if not STALE.fullmatch(name)}
    gone = CHIEF if cluster.rank_table is not None else TABLES if JOB_MARK in inherited else ()
    for name in gone:
        base.pop(name, None)
    given = {**base, **extra}
    result = dict(given)
    local_world_size = len(cluster.node.devices)
    for name, value in _defaults(local_world_size, cores).items():
        result.setdefault(name, value)
    if framework != "none":
        for function in _NAMES[framework]:
            result.update(function(cluster, device, master_port))
        log = cluster.log_root / file_name(cluster.job_id)
        for name, value in {
            "HCCL_CONNECT_TIMEOUT": "1800",
            "ASCEND_PROCESS_LOG_PATH": f"{log}/ascend/process_log/rank_{device.rank}",
            **_diagnosis(given, f"{log}", device.rank),
        }.items():
            if cluster.npus or cluster.rank_table is not None:
                result.setdefault(name, value)
        if _prints_slog(given):
            result["SLOG_PRINT_TO_STDOUT"] = "1"
            result["ASCEND_SLOG_PRINT_TO_STDOUT"] = "1"
    if framework != "none":
        result |= _network(cluster, given)
    if cluster.one_each:
        result |= _alone(cluster, device, framework)
    elif cluster.visible_devices is not None:
        result[MASK] = ",".join(str(number) for number in cluster.visible_devices)
    if framework in ("auto", "torch"):
        result |= {
            # With it Lightning takes torch's ranks and not Slurm's.
            "TORCHELASTIC_RUN_ID": job_id or cluster.job_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        }
        if error_file:
            result["TORCHELASTIC_ERROR_FILE"] = error_file
    result[JOB_MARK] = mark
    result[RESTART_COUNT] = str(attempt)
    return result


def scheduler_environment(worker: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Build the environment of MindSpore's scheduler, which runs the same command as the workers.

    Args:
        worker: Environment of a worker of this node.
        world_size: Workers in the job.
    """
    scheduler = {name: value for name, value in worker.items() if not STALE.fullmatch(name)}
    return {
        **scheduler,
        JOB_MARK: worker[JOB_MARK],
        RESTART_COUNT: worker[RESTART_COUNT],
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(world_size),
        "MS_SCHED_HOST": worker["MS_SCHED_HOST"],
        "MS_SCHED_PORT": worker["MS_SCHED_PORT"],
    }


def _network(cluster: Cluster, given: Mapping[str, str]) -> dict[str, str]:
    """Interface and ports for whoever else would choose them; what the user has set stays."""
    names: dict[str, str] = {}
    if cluster.interface is not None:
        names = {name: cluster.interface.name for name in SOCKET_NAMES if not given.get(name)}
        # HCCL_IF_IP beats HCCL_SOCKET_IFNAME: beside one of the user's the other would be a contradiction.
        if not any(given.get(name) for name in HCCL_NAMES):
            names |= dict(zip(HCCL_NAMES, (cluster.interface.name, cluster.interface.address), strict=True))
    if cluster.hccl_base_port is not None and not given.get("HCCL_IF_BASE_PORT"):
        names["HCCL_IF_BASE_PORT"] = str(cluster.hccl_base_port)
    return names


def _alone(cluster: Cluster, device: Device, framework: str) -> dict[str, str]:
    """Let a worker see its own device alone, as number 0."""
    names = {MASK: str(device.visible_id)} if cluster.npus and device.visible_id >= 0 else {}
    if framework != "none":
        names["LOCAL_RANK"] = "0"
        if not cluster.physical_device_id:
            names |= {"DEVICE_ID": "0", "ASCEND_DEVICE_ID": "0"}
    return names


def _defaults(local_world_size: int, cores: int) -> dict[str, str]:
    """Values that give way to whatever the user has set."""
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if local_world_size > 1:
        # Each rank taking all cores makes four MindSpore ranks on two cores twice as slow.
        defaults["OMP_NUM_THREADS"] = str(max(1, cores // local_world_size))
    return defaults


def _ascend(cluster: Cluster, device: Device, master_port: int) -> dict[str, str]:
    number = str(cluster.worker_device_id(device))
    names = {
        "JOB_ID": cluster.job_id,
        "RANK_ID": str(device.rank),
        "RANK_SIZE": str(cluster.world_size),
        "DEVICE_ID": number,
        "RANK_START": str(cluster.node.devices[0].rank),
    }
    if not cluster.physical_device_id:
        names["ASCEND_DEVICE_ID"] = number
    if cluster.rank_table is not None:
        names["RANK_TABLE_FILE"] = str(cluster.rank_table)
    return names


def _torch(cluster: Cluster, device: Device, master_port: int) -> dict[str, str]:
    return {
        "RANK": str(device.rank),
        "LOCAL_RANK": str(device.local_rank),
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_WORLD_SIZE": str(len(cluster.node.devices)),
        "GROUP_RANK": str(cluster.node_rank),
        "GROUP_WORLD_SIZE": str(len(cluster.nodes)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(device.rank),
        "ROLE_WORLD_SIZE": str(cluster.world_size),
        "MASTER_ADDR": cluster.master_addr,
        "MASTER_PORT": str(master_port),
    }


def _dynamic_cluster(cluster: Cluster, device: Device, master_port: int) -> dict[str, str]:
    """MindSpore's start without a rank table; with one, MindSpore reads that."""
    if cluster.rank_table is not None:
        return {}
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(cluster.world_size),
        "MS_SCHED_HOST": cluster.master_addr,
        "MS_SCHED_PORT": str(master_port),
        "MS_NODE_ID": str(device.rank),
    }


_NAMES: Mapping[str, tuple[Callable[[Cluster, Device, int], dict[str, str]], ...]] = {
    "auto": (_ascend, _torch),
    "torch": (_ascend, _torch),
    "mindspore": (_ascend, _torch, _dynamic_cluster),
}


def _diagnosis(given: Mapping[str, str], log: str, rank: int) -> dict[str, str]:
    """ModelArts' diagnosis switches: the first line that fits, as the 0.1 series had them."""
    mindspore_log = f"{log}/mindspore/log"
    glog = {"GLOG_logtostderr": "0", "GLOG_log_dir": mindspore_log, "MS_OM_PATH": mindspore_log}
    diag, run = given.get("MA_DIAG_MODE_ENV"), given.get("MA_RUN_MODE_ENV")
    if diag == "faults":
        faults = {
            "PRINT_MODEL": "1",
            "DUMP_GE_GRAPH": "2",
            "DUMP_GRAPH_LEVEL": "2",
            "ASCEND_GLOBAL_LOG_LEVEL": "1",
            "ASCEND_HOST_LOG_FILE_NUM": "1000",
            "NPU_COLLECT_PATH": f"{log}/ascend/npu_collect/rank_{rank}",
        }
        if _is_mindspore_1_4(given.get("MA_ENGINE_VERSION", "")):
            faults |= {**glog, "GLOG_v": "1", "MS_RDR_ENABLE": "1", "MS_RDR_PATH": mindspore_log}
        return faults
    if diag in {"accuracy", "profile"}:
        return {"MS_DIAGNOSTIC_DATA_PATH": f"{log}/mindspore/diagnostic_data"}
    if run == "performance":
        return {
            **glog,
            "ASCEND_GLOBAL_LOG_LEVEL": "3",
            "ASCEND_GLOBAL_EVENT_LEVEL": "0",
            "ASCEND_GLOBAL_EVENT_ENABLE": "0",
            "GLOG_v": "3",
        }
    if run == "normal":
        return {**glog, "GLOG_v": "1"}
    return {}


def _is_mindspore_1_4(engine: str) -> bool:
    """Tell whether the engine is MindSpore 1.4 or later, comparing numbers: 1.10 is later than 1.4."""
    found = re.match(r"mindspore_(\d+)\.(\d+)", engine)
    return found is not None and (int(found[1]), int(found[2])) >= (1, 4)


def _prints_slog(given: Mapping[str, str]) -> bool:
    """Tell whether the platform asked for CANN's log on the screen (its development mode)."""
    try:
        operator = json.loads(given.get("MA_ALGORITHM_OPERATOR", ""))
        return bool(operator["obs"]["obs_url"]) and operator["ide_mode"] is True
    except (ValueError, KeyError, TypeError):
        return False


def folders_of(environment: Mapping[str, str]) -> list[str]:
    """Folders that a worker's variables name and that have to exist before it starts."""
    folders = [
        environment[name]
        for name in ("ASCEND_PROCESS_LOG_PATH", "GLOG_log_dir", "MS_DIAGNOSTIC_DATA_PATH", "NPU_COLLECT_PATH")
        if name in environment
    ]
    if "NPU_COLLECT_PATH" in environment:
        folders += [f"{environment['NPU_COLLECT_PATH']}/extra-info/graph"]
    return folders
