"""Launchers that meet: who gets in, what passes, and what becomes of those who do not belong there."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import struct
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import davincirunsdk.engines.admission as admission_module
from davincirunsdk.engines import admission, meeting_guest, meeting_host, wire
from davincirunsdk.engines.admission import Challenge, Declined, Identity, Introduction, Welcome
from davincirunsdk.engines.meeting import Halt, Meeting, Terms, Told, Verdict
from davincirunsdk.engines.meeting_guest import GuestMeeting
from davincirunsdk.engines.meeting_host import HostMeeting
from davincirunsdk.engines.messages import NodeReport
from davincirunsdk.errors import PlatformError
from davincirunsdk.types import JobState, RunResult, WorkerFailure, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Node:
    """One launcher's side of a meeting, and what became of it."""

    def __init__(self, terms: Terms) -> None:
        self.rank = terms.identity.node_rank
        self.stops: list[str] = []
        self.stopped = asyncio.Event()
        self.stopped_at = 0.0
        self.lines: list[str] = []
        kind = GuestMeeting if self.rank else HostMeeting
        self.meeting: Meeting = kind(
            terms,
            stop=self._stop,
            say=self.lines.append,
            workers=lambda: (status(self.rank),),
            others_ended=lambda: self.lines.append("others ended"),
        )

    def _stop(self, reason: str) -> None:
        self.stopped_at = time.monotonic()
        self.stops.append(reason)
        self.stopped.set()

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def terms_of(rank: int, port: int, nnodes: int = 3, **changes: object) -> Terms:
    """The terms of one of three nodes, all on this machine."""
    identity = Identity(
        job="job", node_rank=rank, nnodes=nnodes, world_size=nnodes, host=f"h{rank}", key=b"key"
    )
    own = {name: changes.pop(name) for name in list(changes) if name in Identity.__slots__}
    terms = Terms(
        identity=replace(identity, **own),  # type: ignore[arg-type] # of any field
        places=("127.0.0.1",),
        port=port,
        names=tuple(f"h{node}" for node in range(nnodes)),
        known=None,
        required=False,
        timeout=60.0,
        lost_after=20.0,
        grace_period=1.0,
        leave_after=0.0,
    )
    return replace(terms, **changes)  # type: ignore[arg-type] # of any field


@asynccontextmanager
async def met(*all_terms: Terms) -> AsyncIterator[list[Node]]:
    """Open the meetings, which are closed at the end."""
    nodes = [Node(terms) for terms in all_terms]
    try:
        for node in nodes:
            await node.meeting.open()
        yield nodes
    finally:
        for node in nodes:
            await node.meeting.close()


async def until(condition: object, what: str = "") -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        await asyncio.sleep(0.01)


async def all_in(host: Node, count: int) -> None:
    assert isinstance(host.meeting, HostMeeting)
    parts = host.meeting._parts
    # A node's first word comes after it has learnt that it is in.
    await until(
        lambda: len(parts) == count and all(parts[rank].workers for rank in parts if rank),
        f"{count} nodes are in",
    )


def status(rank: int, state: WorkerState = WorkerState.RUNNING, code: int | None = None) -> WorkerStatus:
    return WorkerStatus(
        rank=rank, local_rank=0, device_id=0, pid=1000 + rank, state=state, exit_code=code, started=1.0,
        ended=None if code is None else 2.0, log_path=Path(f"/log/{rank}.txt"), log_bytes=0,
        last_output=None, last_line="", lost_bytes=0, name=f"rank {rank}",
    )  # fmt: skip


def result(rank: int, code: int | None = 0) -> RunResult:
    """How a node of one rank ended: by itself with a code, or stopped where that is None."""
    state = {0: JobState.SUCCEEDED, None: JobState.STOPPED}.get(code, JobState.FAILED)
    failures: tuple[WorkerFailure, ...] = ()
    if code:
        failures = (
            WorkerFailure(
                rank=rank, local_rank=0, node_rank=rank, node=f"h{rank}", device_id=0, pid=1, exit_code=code,
                ended=2.0, log_path=Path(f"/log/{rank}.txt"), tail=("boom",), reason="bad",
                name=f"rank {rank}",
            ),
        )  # fmt: skip
    own = status(rank, WorkerState(state.value), code if code is not None else -15)
    return RunResult(
        job_id="job", state=state, exit_code=143 if code is None else code, workers=(own,), auxiliaries=(),
        failures=failures, leftovers=(), lost_log_bytes=0, started=1.0, ended=3.0, log_dir=Path("/log"),
    )  # fmt: skip


def words(found: RunResult) -> str:
    """The report as printed."""
    assert found.report is not None
    return found.report.text


async def test_a_failure_anywhere_ends_all_with_one_verdict() -> None:
    """The others are told to stop within the promised time; all get the same report and exit code."""
    port = free_port()
    for failing in (0, 1, 2):
        async with met(*(terms_of(rank, port) for rank in range(3))) as nodes:
            await all_in(nodes[0], 3)
            began = time.monotonic()
            nodes[failing].meeting.note_stop(f"rank {failing} failed")
            others = [node for node in nodes if node.rank != failing]
            for node in others:
                await asyncio.wait_for(node.stopped.wait(), 10)
                assert node.stopped_at - began < 0.5
                assert node.stops == [f"rank {failing} failed on node {failing} (h{failing})"]
            concluded = await asyncio.gather(
                *(
                    node.meeting.conclude(result(node.rank, 7 if node.rank == failing else None))
                    for node in nodes
                )
            )
            assert not nodes[failing].stops
            assert {words(found) for found in concluded} == {words(concluded[0])}
            assert f"rank {failing}" in words(concluded[0])
            for node, found in zip(nodes, concluded, strict=True):
                assert (found.state, found.exit_code) == (JobState.FAILED, 7)
                assert found.failures[0].rank == failing
                assert [worker.rank for worker in found.workers] == [node.rank]


@pytest.mark.parametrize("wishing", [0, 1])
async def test_a_stop_that_somebody_wanted_is_no_failure(wishing: int) -> None:
    """All stop, nobody is blamed, and all end with the code of the wish."""
    port = free_port()
    async with met(*(terms_of(rank, port) for rank in range(3))) as nodes:
        await all_in(nodes[0], 3)
        nodes[wishing].meeting.note_stop("SIGINT", 130)
        for node in nodes:
            if node.rank != wishing:
                await asyncio.wait_for(node.stopped.wait(), 10)
        concluded = await asyncio.gather(*(node.meeting.conclude(result(node.rank, None)) for node in nodes))
        assert {(found.state, found.exit_code) for found in concluded} == {(JobState.STOPPED, 130)}


async def test_workers_that_cannot_be_started_are_their_nodes_fault() -> None:
    """The others stop and name the node; it keeps its own error."""
    port = free_port()
    async with met(*(terms_of(rank, port) for rank in range(3))) as nodes:
        await all_in(nodes[0], 3)
        nodes[1].meeting.note_stop("no such program")
        for node in (nodes[0], nodes[2]):
            await asyncio.wait_for(node.stopped.wait(), 10)
        faulty = nodes[1].meeting.conclude(result(1, None), fault="no such program")
        others = [nodes[rank].meeting.conclude(result(rank, None)) for rank in (0, 2)]
        for found in (await asyncio.gather(faulty, *others))[1:]:
            assert found.state is JobState.FAILED
            assert "no such program" in words(found)
            assert found.report is not None
            assert found.report.root_cause.node_rank == 1


async def test_success_is_waited_for_and_shared() -> None:
    """Who is through first waits for the others, and all end well."""
    port = free_port()
    async with met(*(terms_of(rank, port) for rank in range(3))) as nodes:
        await all_in(nodes[0], 3)
        first = asyncio.ensure_future(nodes[0].meeting.conclude(result(0)))
        second = asyncio.ensure_future(nodes[1].meeting.conclude(result(1)))
        done, _ = await asyncio.wait({first, second}, timeout=1.5)
        assert not done
        found = await nodes[2].meeting.conclude(result(2))
        assert (found.state, found.exit_code, found.report) == (JobState.SUCCEEDED, 0, None)
        assert {(await first).state, (await second).state} == {JobState.SUCCEEDED}
        assert not any(node.stops for node in nodes)


async def test_a_late_node_hears_what_happened_before_it_came() -> None:
    """Its first word after the welcome is the stop, and it gets the same verdict."""
    port = free_port()
    async with met(terms_of(0, port), terms_of(1, port)) as nodes:
        await all_in(nodes[0], 2)
        nodes[1].meeting.note_stop("rank 1 failed")
        await asyncio.wait_for(nodes[0].stopped.wait(), 10)
        async with met(terms_of(2, port)) as (late,):
            await asyncio.wait_for(late.stopped.wait(), 10)
            concluded = await asyncio.gather(
                nodes[0].meeting.conclude(result(0, None)),
                nodes[1].meeting.conclude(result(1, 5)),
                late.meeting.conclude(result(2, None)),
            )
            assert {found.exit_code for found in concluded} == {5}


async def test_nodes_that_come_before_node_0_wait_for_it() -> None:
    """Guests try again and again; a failure before they met is told when they do."""
    port = free_port()
    async with met(terms_of(1, port), terms_of(2, port)) as guests:
        guests[0].meeting.note_stop("rank 1 failed")
        await asyncio.sleep(0)
        async with met(terms_of(0, port)) as (host,):
            await asyncio.wait_for(host.stopped.wait(), 20)
            assert host.stops == ["rank 1 failed on node 1 (h1)"]
            await asyncio.wait_for(guests[1].stopped.wait(), 20)


async def test_a_job_that_never_met_ends_as_today() -> None:
    """A node alone gets its own result back, at once; with a failure a line says that it is only its own."""
    port = free_port()
    for rank in (0, 1):
        async with met(terms_of(rank, port)) as (node,):
            own = result(rank, 3)
            assert await node.meeting.conclude(own) is own
            whom = "node 0" if rank else "node 1 (h1), node 2 (h2)"
            assert node.lines[-1].startswith(f"no meeting with {whom}")
            assert node.lines[-1].endswith(": what happened there is not known here")


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_meeting_that_is_required_fails_without(rank: int) -> None:
    """Node 0 names who never came, the others where node 0 was looked for; the workers are stopped."""
    port = free_port()
    async with met(terms_of(rank, port, required=True, timeout=0.7)) as (node,):
        await asyncio.wait_for(node.stopped.wait(), 20)
        with pytest.raises(PlatformError, match="require") as caught:
            await node.meeting.conclude(result(rank, None))
    text = str(caught.value)
    assert ("node 1 (h1), node 2 (h2) never came" if rank == 0 else f"127.0.0.1:{port}") in text


async def test_without_the_port_the_job_goes_on() -> None:
    """One line says why, the result is the node's own; a job that requires a meeting does not begin."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with met(terms_of(0, port)) as (host,):
            assert len(host.lines) == 1
            assert f"port {port}" in host.lines[0]
            assert not host.stops
            own = result(0)
            assert await host.meeting.conclude(own) is own
        with pytest.raises(PlatformError, match=f"port {port}"):
            async with met(terms_of(0, port, required=True)):
                raise AssertionError


async def test_a_launcher_that_dies_is_lost_at_once() -> None:
    """Its connection ends without a goodbye: the others stop, and the verdict names it."""
    port = free_port()
    async with met(terms_of(0, port, nnodes=2), terms_of(1, port, nnodes=2)) as (host, guest):
        await all_in(host, 2)
        assert isinstance(guest.meeting, GuestMeeting)
        assert guest.meeting._channel is not None
        guest.meeting._channel.abort()
        await asyncio.wait_for(host.stopped.wait(), 5)
        assert host.stops == ["node 1 (h1) was lost"]
        found = await host.meeting.conclude(result(0, None))
        assert (found.state, found.exit_code) == (JobState.FAILED, 1)
        assert found.report is not None
        assert found.report.root_cause.node_rank == 1
        assert "node 1" in words(found)


async def test_the_node_that_was_lost_first_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that stands first in the job; the report names the others, and whom else to suspect."""
    monkeypatch.setattr(meeting_host, "_SLACK", 0.5)
    port = free_port()
    async with met(*(terms_of(rank, port) for rank in range(3))) as (host, _, second):
        await all_in(host, 3)
        assert isinstance(second.meeting, GuestMeeting)
        assert second.meeting._channel is not None
        second.meeting._channel.abort()
        await asyncio.wait_for(host.stopped.wait(), 5)
        found = await host.meeting.conclude(result(0, None))
    assert found.report is not None
    assert found.report.root_cause.node_rank == 2
    assert "node 2 (h2) with rank 2 was lost: the connection has ended; then node 1 (h1)" in " ".join(
        words(found).split()
    )
    assert "the network of the one that hears them no more" in " ".join(words(found).split())


async def test_without_node_0_the_others_stop_and_say_so() -> None:
    """Each judges for itself and names node 0."""
    port = free_port()
    async with met(terms_of(0, port), terms_of(1, port), terms_of(2, port)) as (host, *guests):
        await all_in(host, 3)
        await host.meeting.close()
        for guest in guests:
            await asyncio.wait_for(guest.stopped.wait(), 5)
            assert guest.stops == ["node 0 (h0) was lost"]
            found = await guest.meeting.conclude(result(guest.rank, None))
            assert found.state is JobState.FAILED
            assert found.report is not None
            assert found.report.root_cause.node_rank == 0
            assert "node 0 (h0) was lost: the connection has ended" in words(found)


async def test_a_silent_node_is_lost_after_its_time() -> None:
    """A node that says nothing any more, though its connection stands."""
    port = free_port()
    async with met(terms_of(0, port, nnodes=2, lost_after=1.5)) as (host,):
        async with knocking(port) as channel:
            await enter(channel, terms_of(1, port, nnodes=2).identity)
            await asyncio.wait_for(host.stopped.wait(), 10)
            assert host.said("node 1 (h1) was lost: no sign of it for 1.5 s")


async def test_a_node_that_does_not_end_is_given_up() -> None:
    """After the grace period and some more it is named, and the verdict does not wait for it."""
    port = free_port()
    patience = meeting_host._SLACK
    meeting_host._SLACK = 0.5
    try:
        async with met(terms_of(0, port, nnodes=2), terms_of(1, port, nnodes=2)) as (host, guest):
            await all_in(host, 2)
            host.meeting.note_stop("rank 0 failed")
            await asyncio.wait_for(guest.stopped.wait(), 5)
            found = await asyncio.wait_for(host.meeting.conclude(result(0, 9)), 10)
            assert found.exit_code == 9
            assert host.said("did not say in time")
    finally:
        meeting_host._SLACK = patience


async def test_a_hurry_waits_for_nobody() -> None:
    """A launcher that is to leave at once does, whatever the others do."""
    port = free_port()
    async with met(*(terms_of(rank, port) for rank in range(3))) as nodes:
        await all_in(nodes[0], 3)
        for node in nodes:
            node.meeting.hurry()
            await asyncio.wait_for(node.meeting.conclude(result(node.rank)), 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_rank": 1}, "x1 (127.0.0.1) says that it is node 1, and so does h1"),
        ({"node_rank": 0}, "x1 says that it is node 0, and so does h0"),
        ({"nnodes": 4}, "node 2 (x1) has a job of 4 nodes and 3 workers, node 0 (h0) one of 3 nodes"),
        ({"world_size": 6}, "node 2 (x1) has a job of 3 nodes and 6 workers"),
        ({"job": "other"}, "node 2 (x1) is of job other, node 0 (h0) of job job"),
    ],
)
async def test_who_does_not_fit_ends_with_an_error_that_names_both(
    changes: dict[str, object], said: str
) -> None:
    """Two nodes with one rank, other sizes, another job: the one that came later ends, the others go on."""
    port = free_port()
    async with met(terms_of(0, port), terms_of(1, port)) as nodes:
        await all_in(nodes[0], 2)
        wrong = Node(terms_of(2, port))
        identity = replace(terms_of(2, port).identity, host="x1", **changes)  # type: ignore[arg-type] # of any field
        wrong.meeting = GuestMeeting(
            terms_of(2, port, **{name: getattr(identity, name) for name in Identity.__slots__}),
            stop=wrong._stop,
            say=wrong.lines.append,
            workers=lambda: (status(2),),
            others_ended=lambda: None,
        )
        await wrong.meeting.open()
        try:
            await asyncio.wait_for(wrong.stopped.wait(), 10)
            with pytest.raises(PlatformError, match="does not fit into the job") as caught:
                await wrong.meeting.conclude(result(2, None))
            assert said in str(caught.value)
            assert nodes[0].said(said)
            assert not any(node.stops for node in nodes)
        finally:
            await wrong.meeting.close()


@pytest.mark.parametrize("keys", [(b"a", b"b"), (b"a", b""), (b"", b"b")])
async def test_another_key_does_not_open(keys: tuple[bytes, bytes]) -> None:
    """The node runs on as if there were no meeting, and both sides say why; no key is shown."""
    port = free_port()
    host_terms, guest_terms = (terms_of(rank, port, nnodes=2, key=key) for rank, key in enumerate(keys))
    async with met(host_terms, guest_terms) as (host, guest):
        await until(lambda: guest.lines, "the node has said why")
        assert guest.said("no meeting of the nodes")
        assert guest.said("key")
        assert host.said("key")
        assert not guest.stops
        assert not host.stops
        assert "Identity" not in repr(host_terms.identity)
        assert "key=" not in repr(host_terms)


async def test_a_false_node_0_is_not_believed() -> None:
    """Whoever listens at the port without the key cannot stop a node."""
    port = free_port()
    told: list[object] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = wire.Channel(reader, writer, accepts=(Introduction, Told))
        channel.send(admission.challenge())
        told.append(await channel.receive(10))
        channel.send(Welcome(host="h0", proof=b"x" * 32))
        channel.send(Halt("because"))
        channel.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", port)
    async with met(terms_of(1, port)) as (guest,):
        await until(lambda: guest.lines, "the node has said why")
        assert guest.said("another key")
        assert not guest.stops
    server.close()
    await server.wait_closed()
    assert isinstance(told[0], Introduction)


async def test_without_a_key_known_addresses_get_in_alone() -> None:
    """Strangers are hung up on before a word is said; with nobody known, one line says who gets in."""
    port = free_port()
    async with met(terms_of(0, port, key=b"", known=frozenset({"10.9.9.9"}))) as (host,):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await reader.readexactly(1)
        writer.close()
        assert not host.lines
    async with met(
        terms_of(0, port, key=b"", known=frozenset({"127.0.0.1"})), terms_of(1, port, key=b"")
    ) as nodes:
        await all_in(nodes[0], 2)
        assert not nodes[0].lines
    async with met(terms_of(0, port, key=b""), terms_of(1, port, key=b"")) as nodes:
        await all_in(nodes[0], 2)
        assert nodes[0].said("takes the first 2 launchers that say they are of this job")


@asynccontextmanager
async def knocking(port: int) -> AsyncIterator[wire.Channel]:
    """A connection to node 0, as a channel."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    channel = wire.Channel(reader, writer, accepts=(Challenge, Welcome, Declined, Halt, Verdict))
    try:
        yield channel
    finally:
        channel.close()


async def enter(channel: wire.Channel, identity: Identity) -> None:
    """Answer the challenge as a node does."""
    asked = await channel.receive(10)
    assert isinstance(asked, Challenge)
    channel.send(admission.introduce(identity, asked))
    assert isinstance(await channel.receive(10), Welcome)


async def test_a_proof_cannot_be_used_again() -> None:
    """What one connection has proved is worth nothing on another."""
    port = free_port()
    identity = terms_of(1, port).identity
    async with met(terms_of(0, port)) as (host,):
        async with knocking(port) as first, knocking(port) as second:
            asked, other = await first.receive(10), await second.receive(10)
            assert isinstance(asked, Challenge)
            assert isinstance(other, Challenge)
            assert asked.nonce != other.nonce
            second.send(admission.introduce(identity, asked))
            assert isinstance(await second.receive(10), Declined)
        assert host.said("another key")


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-scan\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    struct.pack("!I", 0xFFFFFFFF),
    struct.pack("!I", 4096) + b"x" * 4096,
    struct.pack("!I", 3) + b"abc",
    os.urandom(5000),
    wire.encode(wire.Beat()),
]


@pytest.mark.parametrize("found", [{"203.0.113.5", "2001:db8::1"}, {"10.0.0.1", "fd00::1"}, {"fd00::1"}])
async def test_node_0_listens_where_it_is_looked_for(
    found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several addresses of one name both sides choose the same, whatever their text."""

    async def resolved(_: object) -> frozenset[str]:
        return frozenset(found)

    looked_for: list[str] = []

    async def connect(address: str, *_: object, **__: object) -> None:
        looked_for.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(meeting_host, "resolved", resolved)
    monkeypatch.setattr(meeting_guest, "resolved", resolved)
    monkeypatch.setattr("davincirunsdk.host.addresses.own", lambda: found)
    host, guest = (Node(terms_of(rank, 1)).meeting for rank in range(2))
    assert isinstance(host, HostMeeting)
    assert isinstance(guest, GuestMeeting)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(meeting_guest._NotNow):
        await guest._knock("atlas01")
    assert [await host._bindable()] == looked_for


async def test_garbage_stops_nothing() -> None:
    """Scans, other protocols, messages of another size: the nodes that belong get in, and the job goes on."""
    port = free_port()
    async with met(terms_of(0, port, nnodes=2)) as (host,):
        for data in GARBAGE:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.close()
        async with met(terms_of(1, port, nnodes=2)) as (guest,):
            await all_in(host, 2)
            host.meeting.note_stop("rank 0 failed")
            await asyncio.wait_for(guest.stopped.wait(), 10)


async def test_ten_thousand_connections_cost_little() -> None:
    """A flood, half of it silent: the node that belongs gets in meanwhile, descriptors stay few."""
    port = free_port()
    own = len(os.listdir("/proc/self/fd"))
    most = 0
    async with met(terms_of(0, port, nnodes=2)) as (host,):
        began = resource.getrusage(resource.RUSAGE_SELF)
        flood = asyncio.create_task(_flood(port, 10_000))
        async with met(terms_of(1, port, nnodes=2)) as (guest,):
            await all_in(host, 2)
            while not flood.done():
                most = max(most, len(os.listdir("/proc/self/fd")) - own)
                await asyncio.sleep(0.05)
            host.meeting.note_stop("rank 0 failed")
            await asyncio.wait_for(guest.stopped.wait(), 10)
        await flood
        ended = resource.getrusage(resource.RUSAGE_SELF)
        assert len(host.lines) <= meeting_host._LINES
    # Both ends of the flood are in this process, 64 connections at a time, and the backlog of a socket.
    assert most < 600
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 40


async def _flood(port: int, count: int) -> None:
    places = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with places:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return
            if number % 2:
                writer.write(GARBAGE[number % len(GARBAGE)])
            else:
                await asyncio.sleep(0.05)
            writer.close()

    await asyncio.gather(*(one(number) for number in range(count)))


async def test_many_nodes_may_come_at_once() -> None:
    """The room for strangers is not theirs: none of the nodes has to try again because of the others."""
    port = free_port()
    began = time.monotonic()
    async with met(*(terms_of(rank, port, nnodes=128) for rank in range(128))) as nodes:
        await all_in(nodes[0], 128)
        assert time.monotonic() - began < 6
        nodes[5].meeting.note_stop("rank 5 failed")
        await until(lambda: all(node.stops for node in nodes if node.rank != 5), "all are told")


async def test_who_has_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line now and then, on both sides, and one when they are given up; the job goes on."""
    for module in (meeting_host, meeting_guest):
        monkeypatch.setattr(module, "REMINDER", 0.4)
    port = free_port()
    async with met(terms_of(0, port, timeout=1.5), terms_of(1, port)) as (host, guest):
        await until(lambda: host.said("never came"), "node 0 has given up")
        assert host.said(f"no meeting yet with node 2 (h2): expected at port {port} of this host")
        assert host.said("no meeting of the nodes: node 2 (h2) never came within 1.5 s")
        assert not host.stops
        assert not guest.lines
    port = free_port()
    async with met(terms_of(1, port, timeout=1.5)) as (guest,):
        await until(lambda: guest.said("no meeting of the nodes"), "node 1 has given up")
        assert guest.said(f"no meeting yet with node 0 at 127.0.0.1:{port}: ")
        assert guest.said(f"node 0 was not reached within 1.5 s at 127.0.0.1:{port}: ")
        assert not guest.stops


async def test_slow_senders_are_given_up() -> None:
    """Who does not answer the challenge in time is hung up on."""
    port = free_port()
    patience = admission.PATIENCE
    admission_module.PATIENCE = 0.5
    try:
        async with met(terms_of(0, port)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
    finally:
        admission_module.PATIENCE = patience


async def test_a_node_that_floods_is_lost() -> None:
    """A node that is in and then sends what is no message counts as lost."""
    port = free_port()
    async with met(terms_of(0, port, nnodes=2)) as (host,):
        async with knocking(port) as channel:
            await enter(channel, terms_of(1, port, nnodes=2).identity)
            channel._writer.write(struct.pack("!I", 0xFFFFFFFF))
            await asyncio.wait_for(host.stopped.wait(), 10)
            assert host.said("node 1 (h1) was lost: it sent")


async def test_a_node_that_was_lost_may_ask_again_later() -> None:
    """A pod that was replaced while the job ends is not told to fail: it waits for the next one."""
    port = free_port()
    identity = terms_of(1, port, nnodes=2).identity
    async with met(terms_of(0, port, nnodes=2)) as (host,):
        async with knocking(port) as channel:
            await enter(channel, identity)
        await asyncio.wait_for(host.stopped.wait(), 10)
        async with knocking(port) as channel:
            asked = await channel.receive(10)
            assert isinstance(asked, Challenge)
            channel.send(admission.introduce(identity, asked))
            answer = await channel.receive(10)
            assert isinstance(answer, Declined)
            assert answer.later


async def test_reports_of_nodes_carry_the_workers() -> None:
    """What a node had running when it was lost is in the verdict."""
    port = free_port()
    async with met(terms_of(0, port, nnodes=2)) as (host,):
        async with knocking(port) as channel:
            await enter(channel, terms_of(1, port, nnodes=2).identity)
            channel.send(Told(NodeReport(workers=(status(1),))))
        await asyncio.wait_for(host.stopped.wait(), 10)
        found = await host.meeting.conclude(result(0, None))
        assert re.search(r"ranks? 1\b", words(found))
