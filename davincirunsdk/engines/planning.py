"""What each node of a job is told to start: who is which node, how many workers, where they meet."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from davincirunsdk import __version__
from davincirunsdk.concurrency import in_thread
from davincirunsdk.engines.joint import table_of
from davincirunsdk.engines.messages import NodePlan
from davincirunsdk.engines.node import Member, NodeLostError
from davincirunsdk.errors import PlatformError
from davincirunsdk.options import Display
from davincirunsdk.phrases import some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import NodeFacts
    from davincirunsdk.engines.node import NodeHandle
    from davincirunsdk.options import JobOptions

_OUTPUT_BYTES = 64 << 20
"""Output of all nodes together that may be under way to the driver, shared evenly among them."""

_LEAST_OUTPUT = 64 << 10
_MOST_OUTPUT = 1 << 20

_OTHERS = 2.0
"""Seconds for the answers of all nodes when one of them is lost before the start."""


async def plan_nodes(
    handles: Sequence[NodeHandle],
    options: JobOptions,
    *,
    given: GivenTable | None,
    wanted_ranks: frozenset[int] | None,
    notify: Callable[[str], None],
) -> tuple[list[Member], str]:
    """Ask all nodes what they have, and settle who is which node and where they meet.

    Args:
        handles: The way to each node's agent, in any order, or that of the rank table.
        options: Of the whole job.
        given: Rank table that the user gave.
        wanted_ranks: Whose output the nodes have to send, None for all.
        notify: Takes a line on what the job has to do without.

    Returns:
        The nodes in node rank order, each with its plan; and the job's rank table, "" without one.

    Raises:
        PlatformError: Nodes are lost, do not fit together, or have not what was asked for.
        RankTableError: The nodes' tables contradict each other, or the given one is not theirs.
    """
    # A table may name any of a node's devices.
    facts = await _inspect(handles, options.nproc_per_node if given is None else None)
    _refuse_other_versions(facts)
    if given is not None:
        await in_thread(given.check_devices, facts)
        table, order = given.text, tuple(range(len(facts)))
        ranks = [tuple(row.rank for row in node.rows) for node in given.nodes]
    else:
        table, order = await in_thread(table_of, facts)
        count = _workers_per_node([facts[place] for place in order], options.nproc_per_node)
        ranks = [tuple(range(place * count, (place + 1) * count)) for place in range(len(facts))]
    members = [
        Member(handle=handles[place], facts=facts[place], ranks=own)
        for place, own in zip(order, ranks, strict=True)
    ]
    held = min(_MOST_OUTPUT, max(_LEAST_OUTPUT, _OUTPUT_BYTES // len(members)))
    for node_rank, member in enumerate(members):
        member.node_rank = node_rank
        member.plan = NodePlan(
            options=replace(
                options,
                nproc_per_node=len(member.ranks),
                rank_table=None,
                nnodes=len(members),
                node_rank=node_rank,
                master_addr=members[0].facts.address,
                master_port=options.master_port or members[0].facts.port,
                # The engine counts its nodes by itself, whatever started it counts otherwise.
                ignore_platform=True,
                display=Display(),
                report=None,
                html=None,
                metrics=None,
                on_end=None,
                sample_usage=options.html is not None,
                timeout=None,
                driven_attempt=0,
            ),
            wanted_ranks=wanted_ranks,
            held_bytes=held,
        )
    if any(member.facts.devices for member in members) and not table and len(members) > 1:
        notify("no addresses of NPUs were found: without a rank table workers meet at node 0's address")
    return members, table


def plan_anew(members: Sequence[Member], options: JobOptions, attempt: int) -> None:
    """Plan another attempt on the same nodes.

    Args:
        members: In node rank order.
        options: Of the whole job.
        attempt: Its number, from 1.
    """
    # The port of the attempt before may still be held.
    facts = members[0].facts
    ports = (facts.port, *facts.more_ports)
    port = options.master_port or ports[attempt % len(ports)]
    for member in members:
        assert member.plan is not None
        own = replace(member.plan.options, master_port=port, driven_attempt=attempt)
        member.begin_anew(replace(member.plan, options=own))


async def _inspect(handles: Sequence[NodeHandle], nproc_per_node: int | None) -> list[NodeFacts]:
    """Ask all nodes what they have.

    Raises:
        PlatformError: Some are lost, or have not what was asked for; says which.
    """
    calls = [asyncio.ensure_future(one.inspect(nproc_per_node)) for one in handles]
    try:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if any(call.done() and call.exception() is not None for call in calls):
            # What is wrong with one node is often wrong with others.
            await asyncio.wait(calls, timeout=_OTHERS)
        errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
        lost = [error for error in errors if isinstance(error, NodeLostError)]
        if lost and len(lost) == len(errors):
            listed = "; ".join(dict.fromkeys(map(str, lost)))
            raise PlatformError(f"{len(lost)} of {len(calls)} nodes cannot take part: {listed}")
        if errors:
            raise next(error for error in errors if error not in lost)
        return [call.result() for call in calls]
    finally:
        for call in calls:
            call.cancel()


def _refuse_other_versions(facts: Sequence[NodeFacts]) -> None:
    hosts: dict[str, list[str]] = {}
    for fact in facts:
        if fact.version != __version__:
            hosts.setdefault(fact.version, []).append(fact.host)
    if hosts:
        found = "; ".join(f"{version} on {some_of(names)}" for version, names in sorted(hosts.items()))
        raise PlatformError(
            f"found davincirunsdk {found}, and {__version__} here; expected one version on all nodes: "
            f"pip install davincirunsdk=={__version__} there"
        )


def _workers_per_node(facts: Sequence[NodeFacts], wanted: int | None) -> int:
    """Settle the number of workers per node, and refuse nodes that do not fit together."""
    counts = {fact.devices for fact in facts}
    if len(counts) > 1:
        listed = ", ".join(f"{fact.devices} on {fact.host}" for fact in facts[:8])
        raise PlatformError(f"found different numbers of NPUs: {listed}; expected the same on all nodes")
    count = wanted or counts.pop()
    if not count:
        raise PlatformError(
            "found no NPU on any node; expected to learn how many workers to start: give --nproc-per-node "
            "(nproc_per_node), or look why the nodes have no device files such as /dev/davinci0"
        )
    return count
