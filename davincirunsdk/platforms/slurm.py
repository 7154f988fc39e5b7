"""Slurm: one davincirun per node, started by `srun --ntasks-per-node=1`."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

from davincirunsdk.errors import PlatformError
from davincirunsdk.host.tools import ask
from davincirunsdk.platforms.site import Site, first_set, shared_port, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NAME = "slurm"

MOST_NODES = 1_000_000
"""Nodes that one list may stand for; a larger range is a mistake that would only fill the memory."""

SCONTROL_TIMEOUT = 10.0
"""Seconds for one answer of scontrol; the controller of a large cluster may be busy."""

ONE_EACH = "srun --ntasks-per-node=1 --kill-on-bad-exit=1 davincirun ..."
"""How one davincirun per node is started."""

STEPS_OF_SLURM = ("4294967290", "4294967291", "4294967292")
"""Numbers of the interactive, batch and extern steps, which Slurm makes by itself on the first node."""

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def is_present(env: Mapping[str, str]) -> bool:
    """Tell by the job's number."""
    return bool(env.get("SLURM_JOB_ID"))


def site(env: Mapping[str, str]) -> Site:
    """Read nodes and own place; those of the step where there is one, as it may use fewer nodes than the job.

    Raises:
        PlatformError: A node list cannot be read.
    """
    stepped = in_step(env)
    listed = first_set(env, *(("SLURM_STEP_NODELIST",) if stepped else ()), "SLURM_JOB_NODELIST")
    hosts = expand(env.get(listed, ""), variable=listed)
    counted = first_set(env, *(("SLURM_STEP_NUM_NODES",) if stepped else ()), "SLURM_NNODES") or listed
    nnodes = (whole(env, counted, least=1) if counted != listed else len(hosts)) or None
    # mpirun makes a step of its own for its daemons, which leaves out the node that it runs on.
    under_mpirun = "OMPI_COMM_WORLD_RANK" in env
    objection = ""
    tasks = whole(env, "SLURM_STEP_NUM_TASKS", least=1) if stepped else None
    if tasks is not None and nnodes is not None and tasks > nnodes and not under_mpirun:
        objection = (
            f"found {tasks} Slurm tasks on {nnodes} node{'s' if nnodes > 1 else ''} (SLURM_STEP_NUM_TASKS); "
            "expected one davincirun per node, which itself starts a worker per device: "
            f"write {ONE_EACH}, or --nnodes 1 (nnodes=1) if each task is to be a job of its own"
        )
    elif not stepped and not under_mpirun and nnodes is not None and nnodes > 1:
        objection = (
            f"found a Slurm job of {nnodes} nodes ({counted}) and no step: srun has not started this, so no "
            f"davincirun runs on the other nodes; expected one on each: write {ONE_EACH}, or --nnodes 1 "
            "(nnodes=1) to use this node alone"
        )
    return Site(
        title="Slurm",
        said_by={
            "nnodes": counted,
            "node_rank": "SLURM_NODEID",
            "master_addr": listed,
            "master_port": "SLURM_JOB_ID",
        },
        hosts=hosts if len(hosts) == nnodes else (),
        nnodes=nnodes,
        node_rank=whole(env, "SLURM_NODEID"),
        master_addr=hosts[0] if hosts else None,
        # The step's number as well: two steps of one job may share a node.
        master_port=shared_port(f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"),
        objection=objection,
        offer=not stepped or under_mpirun,
        reach=address_of,
    )


def in_step(env: Mapping[str, str]) -> bool:
    """Tell whether srun has started us: a batch file itself runs on the first node, outside of any step."""
    step = env.get("SLURM_STEP_ID", "")
    if step in STEPS_OF_SLURM:
        return False
    return bool(step or env.get("SLURM_STEP_NODELIST")) or env.get("SLURM_NODEID", "0") != "0"


def address_of(node: str) -> str:
    """Find where a node is reached; blocks.

    Slurm's names of nodes are those of slurm.conf, which need not be host names: clusters in a cloud
    and several slurmd on one machine have others. Only then is scontrol asked.

    Args:
        node: Its name.

    Returns:
        The name itself if it can be looked up or nobody knows better, else the node's address.
    """
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        answer = ask(["scontrol", "--oneliner", "show", "node", node], timeout=SCONTROL_TIMEOUT)
        match = _ADDRESS.search(answer)
        return match[1] if match else node
    return node


def expand(text: str, *, variable: str = "the node list") -> tuple[str, ...]:
    """Expand Slurm's compressed list of node names.

    Args:
        text: Such as `n[1-3,07-09],m5` or `rack[0-1]n[1-2]`.
        variable: What it comes from, for the message.

    Returns:
        The names in order; leading zeros are kept.

    Raises:
        PlatformError: The list cannot be read.
    """
    result: list[str] = []
    for part in _split(text, variable):
        for name in _names(part, variable):
            if len(result) >= MOST_NODES:
                raise _unreadable(variable, f"more than {MOST_NODES} nodes")
            result.append(name)
    return tuple(result)


def _split(text: str, variable: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    part = ""
    inside = False
    for letter in text:
        if letter in "[]":
            if inside == (letter == "["):
                raise _unreadable(variable, "brackets that do not match")
            inside = letter == "["
        if letter == "," and not inside:
            if part:
                yield part
            part = ""
        else:
            part += letter
    if inside:
        raise _unreadable(variable, "a bracket that is not closed")
    if part:
        yield part


def _names(part: str, variable: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inner, _, tail = rest.partition("]")
    for piece in inner.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or len(piece) > 40:
            raise _unreadable(variable, "a bracket with something else than numbers and ranges")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _unreadable(variable, "a range that runs backwards")
        for number in range(int(first), int(last) + 1):
            for end in _names(tail, variable):
                yield f"{head}{number:0{len(first)}d}{end}"


def _unreadable(variable: str, found: str) -> PlatformError:
    return PlatformError(f"found {found} in {variable}; expected a node list such as n[1-3,07-09],m5")
