"""Where a meeting of launchers takes place, and who is expected: from what this node knows of its job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.diagnosis.language import choose_language
from davincirunsdk.engines.admission import Identity, read_key
from davincirunsdk.engines.meeting import Terms, resolved
from davincirunsdk.engines.meeting_guest import GuestMeeting
from davincirunsdk.engines.meeting_host import HostMeeting
from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.platforms import detect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from davincirunsdk.cluster import Cluster
    from davincirunsdk.engines.meeting import Meeting
    from davincirunsdk.options import JobOptions
    from davincirunsdk.types import WorkerStatus

RECOVERY = (
    "PROCESS_RECOVER",
    "HIGH_AVAILABILITY",
    "ELASTIC_PROCESS_RECOVER_ENABLE",
    "ENABLE_RESTART_FAULT_PROCESS",
)
"""What MindCluster sets in the pods of jobs that it recovers. One whose pods all fail within seconds is
finally failed for it."""

_RECOVERY_STAY = 30.0


async def convene(
    cluster: Cluster,
    options: JobOptions,
    env: Mapping[str, str],
    *,
    stop: Callable[[str], None],
    say: Callable[[str], None],
    workers: Callable[[], tuple[WorkerStatus, ...]],
    others_ended: Callable[[], None],
) -> Meeting | None:
    """Begin the meeting of a job on several nodes; nobody is waited for.

    Args:
        cluster: The job's nodes, and which is this one.
        options: What the user asked for.
        env: The environment.
        stop: Called with the reason when the workers here have to stop.
        say: Takes a line for people.
        workers: Gives the workers here as they stand.
        others_ended: Called on node 0 when the workers of all other nodes have ended well.

    Returns:
        The meeting, None where none is wanted or none can be.

    Raises:
        PlatformError: None can be, and it is required; or the key cannot be read.
    """
    if options.meet == "off" or len(cluster.nodes) < 2:
        return None
    key = await in_thread(read_key, env, options.meet_key_file)
    places = _places(cluster, options, env)
    port = options.meet_port or _next_to(cluster.master_port)
    if not places or port is None:
        why = (
            "the address of node 0 is not known, only that of a Kubernetes service: give --master-addr "
            "(master_addr)"
            if port is not None
            else "no port is known to all nodes: give --meet-port (meet_port)"
        )
        if options.meet == "require":
            raise PlatformError(f"no meeting of the nodes, which --meet (meet) requires: {why}")
        say(f"no meeting of the nodes: {why}")
        return None
    terms = Terms(
        identity=Identity(
            # The host's own name stands for the job where nobody named it, and says nothing to others.
            job=cluster.job_id if cluster.job_id != addresses.host_name() else "",
            node_rank=cluster.node_rank,
            nnodes=len(cluster.nodes),
            world_size=cluster.world_size,
            host=addresses.host_name(),
            key=key,
        ),
        places=places,
        port=port,
        names=tuple(node.name for node in cluster.nodes),
        known=None if key else await _known(cluster, env),
        required=options.meet == "require",
        timeout=options.meet_timeout,
        lost_after=options.lost_after,
        grace_period=options.grace_period,
        leave_after=_leave_after(options, env),
        keep_going=options.keep_going,
        keeps_port=options.master_port is not None,
        lang=choose_language(options.lang),
    )
    kind = HostMeeting if cluster.node_rank == 0 else GuestMeeting
    meeting = kind(terms, stop=stop, say=say, workers=workers, others_ended=others_ended)
    try:
        await meeting.open()
    except BaseException:
        await meeting.close()
        raise
    return meeting


def _places(cluster: Cluster, options: JobOptions, env: Mapping[str, str]) -> tuple[str, ...]:
    """List where node 0 may be reached: its own addresses, never that of a service before it."""
    if options.master_addr:
        return (options.master_addr,)
    name = cluster.nodes[0].name
    found = [name] if addresses.is_address(name) and addresses.distinctive(name) else []
    # MindCluster's operator sets MASTER_ADDR to a service that forwards the rendezvous port alone.
    if not (env.get("MINDX_TASK_ID") and cluster.master_addr == env.get("MASTER_ADDR")):
        found.append(cluster.master_addr)
    return tuple(dict.fromkeys(found))


def _next_to(port: int | None) -> int | None:
    """Choose the port after the rendezvous': all nodes know it, and it is as free of firewalls as that."""
    if port is None:
        return None
    return port + 1 if port < 65535 else port - 1


async def _known(cluster: Cluster, env: Mapping[str, str]) -> frozenset[str] | None:
    """Look up the addresses of all nodes, None where table and platform do not name them all."""
    hosts = detect(env).site(env).hosts
    if len(hosts) == len(cluster.nodes):
        found = [await resolved([host]) for host in hosts]
        if all(found):
            return frozenset[str]().union(*found)
    names = [node.name for node in cluster.nodes]
    if all(addresses.is_address(name) and addresses.distinctive(name) for name in names):
        return frozenset(names)
    return None


def _leave_after(options: JobOptions, env: Mapping[str, str]) -> float:
    if options.leave_after is not None:
        return options.leave_after
    recovers = env.get("MINDX_TASK_ID") and any(env.get(name) for name in RECOVERY)
    return _RECOVERY_STAY if recovers else 0.0
