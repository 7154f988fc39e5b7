"""Typed messages: what goes in comes out, and nothing else does anything."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from davincirunsdk.engines import calls, wire
from davincirunsdk.engines.messages import NodeFacts, NodePlan, NodeReport, NodeStarted
from davincirunsdk.errors import (
    DavinciRunError,
    PlatformError,
    RankTableError,
    RankTableTimeoutError,
    WorkerSpawnError,
)
from davincirunsdk.options import JobOptions
from davincirunsdk.types import (
    AttemptRecord,
    Event,
    JobState,
    LogBlock,
    Progress,
    RunResult,
    WorkerFailure,
    WorkerState,
    WorkerStatus,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KINDS = (*calls.TO_AGENT, *calls.FROM_AGENT)

STATUS = WorkerStatus(
    rank=3, local_rank=1, device_id=1, pid=77, state=WorkerState.FAILED, exit_code=-9, started=1.5, ended=2.5,
    log_path=Path("/log/a-3.txt"), log_bytes=10, last_output=2.0, last_line="ein Wort \u4e2d", lost_bytes=0,
    name="rank 3",
    progress=Progress(step=7, total=None, time=2.0, epoch=1, loss=float("inf"), values=(("lr", 0.5),)),
)  # fmt: skip
FAILURE = WorkerFailure(
    rank=3, local_rank=1, node_rank=1, node="h2", device_id=1, pid=77, exit_code=-9, ended=2.5,
    log_path=Path("/log/a-3.txt"), tail=("one", "two"), reason="killed", name="rank 3",
)  # fmt: skip
RESULT = RunResult(
    job_id="job", state=JobState.FAILED, exit_code=137, workers=(STATUS,), auxiliaries=(),
    failures=(FAILURE,), leftovers=(), lost_log_bytes=0, started=1.0, ended=3.0, log_dir=Path("/log"),
    attempts=(AttemptRecord(number=0, started=1.0, ended=3.0, exit_code=137, reason="killed", step=7),),
)  # fmt: skip
MESSAGES = [
    calls.Greeting(env={"PATH": "/bin"}, folders=("/work",), nproc_per_node=None, lost_after=30.0),
    calls.Found(NodeFacts(host="h", address="10.0.0.1", port=1, devices=2, table="{}", version="1")),
    calls.Start(
        call=1,
        plan=NodePlan(
            options=JobOptions.of(["a", "b"], env={"A": "1"}, name="job", nnodes=2),
            wanted_ranks=frozenset({1, 2}),
            held_bytes=7,
        ),
        table='{"version": "1.0"}',
    ),
    calls.Started(2, NodeStarted(workers=(STATUS,))),
    calls.Report(3),
    calls.Reported(
        3,
        NodeReport(
            workers=(STATUS,),
            events=(Event(kind="exited", time=1.0, rank=3, exit_code=-9),),
            blocks=(LogBlock(rank=3, data=b"\xff\0\n", time=1.0),),
            result=RESULT,
            departing="why",
        ),
    ),
    calls.Stop(call=4, now=True),
    calls.Signal(call=5, signal=10),
    calls.Done(5),
    calls.Failed(6, "no"),
]


@pytest.fixture
async def link() -> AsyncIterator[tuple[wire.Channel, asyncio.StreamWriter, asyncio.StreamReader]]:
    """A channel, and the bare other end of its connection."""
    ends: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *pair: ends.put_nowait(pair), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    other_reader, other_writer = await ends.get()
    yield wire.Channel(reader, writer, accepts=KINDS, most_bytes=1 << 20), other_writer, other_reader
    writer.close()
    other_writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
async def test_messages_come_out_as_they_went_in(
    link: tuple[wire.Channel, asyncio.StreamWriter, asyncio.StreamReader], message: wire.Message
) -> None:
    """All kinds, with paths, bytes, states and times; beats between them are not heard of."""
    channel, writer, _ = link
    data = b"".join(
        struct.pack("!I", len(body)) + body for body in map(wire.encode, (wire.Beat(), message, wire.Beat()))
    )
    for start in range(0, len(data), 7):
        writer.write(data[start : start + 7])
        await writer.drain()
    assert await channel.receive(10) == message


@pytest.mark.parametrize(
    "error",
    [
        WorkerSpawnError("not found", errno=2, rank=4),
        RankTableError("wrong", path="/t.json", where="a[0]"),
        RankTableTimeoutError("late", path="/t.json"),
        PlatformError("none"),
        DavinciRunError("any"),
    ],
)
async def test_errors_keep_kind_text_and_figures(
    link: tuple[wire.Channel, asyncio.StreamWriter, asyncio.StreamReader], error: DavinciRunError
) -> None:
    """What `start` raises on another node can be raised here as it is."""
    channel, writer, _ = link
    body = wire.encode(calls.Started(1, NodeStarted(error=error)))
    writer.write(struct.pack("!I", len(body)) + body)
    answer = await channel.receive(10)
    assert isinstance(answer, calls.Started)
    found = answer.started.error
    expected = PlatformError if type(error) is DavinciRunError else type(error)
    assert type(found) is expected
    assert str(found) == str(error)
    for name in ("errno", "rank", "path", "where"):
        assert getattr(found, name, None) == getattr(error, name, None)


async def test_text_that_is_not_unicode_is_escaped_or_refused(
    link: tuple[wire.Channel, asyncio.StreamWriter, asyncio.StreamReader],
) -> None:
    """Odd file names in a report must not end a job; a command must not be changed on its way."""
    channel, _, reader = link
    for odd, escaped in (("\udcff", b"\\udcff"), ("\ud800", b"\\ud800")):
        channel.send(calls.Failed(1, f"file {odd}"))
        (size,) = struct.unpack("!I", await reader.readexactly(4))
        assert b"file " + escaped in await reader.readexactly(size)
    plan = NodePlan(options=JobOptions.of(["\udcff"]), wanted_ranks=None, held_bytes=1)
    with pytest.raises(PlatformError, match="not UTF-8"):
        channel.send_exactly(calls.Start(call=1, plan=plan, table=""))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("!I", (1 << 20) + 1), "more than"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "more than"),
        (struct.pack("!I", 3) + b"abc", "something else"),
        (struct.pack("!I", 0), "something else"),
        (struct.pack("!I", 9) + b"abc", "ended"),
        (b"", "ended"),
        (struct.pack("!I", 11) + b"\x82\xa4type\xa4Done", "something else"),
        (struct.pack("!I", 13) + b"\x81\xa4type\xa6Nobody", "something else"),
    ],
)
async def test_what_is_no_message_ends_the_link(
    link: tuple[wire.Channel, asyncio.StreamWriter, asyncio.StreamReader], data: bytes, said: str
) -> None:
    """Too long, too short, of another kind, or none at all."""
    channel, writer, _ = link
    writer.write(data)
    writer.write_eof()
    with pytest.raises(wire.LinkEnded, match=said):
        await channel.receive(10)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_bytes_do_anything(data: bytes) -> None:
    """Any bytes are a message of a declared kind, or end the link."""

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("!I", len(data)) + data)
        reader.feed_eof()
        channel = wire.Channel(reader, None, accepts=KINDS)  # type: ignore[arg-type] # nothing is sent
        try:
            message = await channel.receive(10)
        except wire.LinkEnded:
            return
        assert isinstance(message, KINDS)

    asyncio.run(read())


async def test_silence_ends_the_link_and_beats_do_not(
    link: tuple[wire.Channel, asyncio.StreamWriter, asyncio.StreamReader],
) -> None:
    """A side that beats is there; one that says nothing for so long is gone."""
    channel, writer, reader = link
    other = wire.Channel(reader, writer, accepts=KINDS)
    beating = asyncio.create_task(other.beat(0.1))
    receiving = asyncio.create_task(channel.receive(1.0))
    await asyncio.wait({receiving}, timeout=2.0)
    assert not receiving.done()
    beating.cancel()
    with pytest.raises(wire.LinkEnded, match="no sign of it for 1 s"):
        await receiving
