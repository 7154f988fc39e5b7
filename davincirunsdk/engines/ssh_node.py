"""The way to the agent of one host: a process of ssh, and messages through it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shlex
import subprocess
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from davincirunsdk import __version__
from davincirunsdk.concurrency import in_thread
from davincirunsdk.engines.calls import (
    FROM_AGENT,
    Done,
    Failed,
    Found,
    LogRead,
    Looked,
    RanksEnded,
    ReadLog,
    Refused,
    Report,
    Reported,
    SeesFile,
    SetLogsAside,
    Signal,
    Start,
    Started,
    Stop,
)
from davincirunsdk.engines.messages import NodeStarted
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.engines.ssh_agent import beat_interval, first_word
from davincirunsdk.engines.ssh_trouble import LOGIN, explain
from davincirunsdk.engines.wire import Channel, LinkEnded, Message, over_pipes
from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from davincirunsdk.engines.calls import Greeting
    from davincirunsdk.engines.messages import LogPiece, NodeFacts, NodePlan, NodeReport

M = TypeVar("M", bound=Message)

_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=15",
    # To use a connection that the user keeps open is welcome, to leave a new one behind is not.
    "-oControlMaster=no",
    # A forwarding of the user's configuration may be taken by another connection.
    "-oClearAllForwardings=yes",
)

_ANSWER_PATIENCE = 60.0
"""Seconds for a host to be reached, log us in, start Python and look at its devices."""

CLOSE_PATIENCE = 3.0
"""Seconds for an agent and its ssh to leave once their work is done."""

_NOISE_LINES = 40
"""Lines of what ssh and the remote shell print that are kept, to say why a host cannot be used."""


class SshNode:
    """The way to one agent; see `NodeHandle`."""

    def __init__(self, host: str, greeting: Greeting) -> None:
        self.host = host
        self._greeting = greeting
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._channel: Channel | None = None
        self._facts: NodeFacts | None = None
        self._noise: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._lost = ""

    async def open(self, program: Sequence[str], python: str, environment: Mapping[str, str]) -> None:
        """Start the agent and hear what it found.

        Raises:
            PlatformError: That does not succeed; says why and what to do.
        """
        try:
            with anyio.fail_after(_ANSWER_PATIENCE):
                await self._open(program, python, environment)
        except TimeoutError:
            raise PlatformError(
                f"timed out: no answer within {_ANSWER_PATIENCE:g} s{self._last_noise()}; expected an agent "
                f"there: try `{shlex.join([*program, self.host, 'true'])}`"
            ) from None

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        assert self._facts is not None
        return self._facts

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        try:
            answer = await self._call(Started, Start(call=next(self._numbers), plan=plan, table=table))
        except PlatformError as error:
            return NodeStarted(error=error)
        return answer.started

    async def report(self) -> NodeReport:
        return (await self._call(Reported, Report(next(self._numbers)))).report

    async def stop(self, now: bool) -> None:
        await self._call(Done, Stop(call=next(self._numbers), now=now))

    async def signal(self, number: int) -> None:
        await self._call(Done, Signal(call=next(self._numbers), signal=number))

    async def ranks_ended(self) -> None:
        await self._call(Done, RanksEnded(call=next(self._numbers)))

    async def sees_file(self, path: str, beginning: bytes) -> bool:
        message = SeesFile(call=next(self._numbers), path=path, beginning=beginning)
        return (await self._call(Looked, message)).found

    async def read_log(self, rank: int, start: int, size: int) -> LogPiece:
        message = ReadLog(call=next(self._numbers), rank=rank, start=start, size=size)
        return (await self._call(LogRead, message)).piece

    async def set_logs_aside(self, attempt: int) -> None:
        await self._call(Done, SetLogsAside(call=next(self._numbers), attempt=attempt))

    async def close(self) -> None:
        """End the link, and with it the agent; kills the ssh that does not go by itself."""
        with self._lock:
            self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._channel is not None and not self._lost:
            self._channel.end_sending()
            await self._channel.drain()
        if self._ended is not None and self._process is not None:
            if not self._lost:
                await asyncio.wait({self._ended}, timeout=CLOSE_PATIENCE)
            if not self._ended.done():
                self._process.kill()
            await self._ended
        if self._channel is not None:
            self._channel.close()

    async def _open(self, program: Sequence[str], python: str, environment: Mapping[str, str]) -> None:
        nonce = secrets.token_hex(8)
        # Not in the home folder, whose files Python would take for modules.
        remote = f"cd / && exec {shlex.quote(python)} -m davincirunsdk.engines.ssh_agent {nonce}"
        words = [*program, *_OPTIONS, "--", self.host, remote]
        try:
            await in_thread(self._spawn, words, environment)
        except OSError as error:
            raise PlatformError(
                f"{words[0]} cannot be started here ({error.strerror}); expected OpenSSH's client: install "
                "openssh-client, or name another with --ssh"
            ) from None
        process = self._process
        if process is None:
            raise PlatformError("given up")
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._ended = in_thread(process.wait)
        reader, writer = await over_pipes(process.stdout, process.stdin)
        self._channel = Channel(reader, writer, accepts=FROM_AGENT)
        errors = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(errors), process.stderr)
        self._tasks.append(asyncio.ensure_future(self._read_noise(errors)))
        try:
            await reader.readuntil(first_word(nonce))
            version = (await reader.readline()).decode(errors="replace").strip()
        except asyncio.IncompleteReadError as end:
            self._noise += end.partial.decode(errors="replace").splitlines()[-_NOISE_LINES:]
            raise PlatformError(await self._explain(program, python)) from None
        except (asyncio.LimitOverrunError, ValueError):
            raise PlatformError(
                "found more than a MiB of output before the agent's first word; expected a login shell that "
                "prints little: look at its start-up files there"
            ) from None
        if version != __version__:
            raise PlatformError(
                f"found davincirunsdk {version} there and {__version__} here; expected one version: "
                f"`{python} -m pip install davincirunsdk=={__version__}` there"
            )
        self._channel.send(self._greeting)
        try:
            answer = await self._channel.receive(_ANSWER_PATIENCE)
        except LinkEnded:
            raise PlatformError(await self._explain(program, python)) from None
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Found)
        self._facts = answer.facts
        lost_after = self._greeting.lost_after
        self._tasks.append(asyncio.ensure_future(self._channel.beat(beat_interval(lost_after))))
        self._tasks.append(asyncio.ensure_future(self._listen(self._channel, lost_after)))

    def _spawn(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            # Ctrl-C at the terminal is ours to pass on.
            start_new_session=True,
        )
        with self._lock:
            if not self._closed:
                self._process = process
                return
        process.kill()
        process.communicate()

    async def _listen(self, channel: Channel, lost_after: float) -> None:
        """Hand answers to those who wait for them, until the link ends."""
        try:
            while True:
                message = await channel.receive(lost_after)
                waiting = self._waiting.pop(getattr(message, "call", 0), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except LinkEnded as end:
            self._lost = await self._why(end)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NodeLostError(self._lost))
        self._waiting.clear()

    async def _why(self, end: LinkEnded) -> str:
        assert self._ended is not None
        await asyncio.wait({self._ended}, timeout=0.5)
        if not self._ended.done():
            return str(end)
        code = self._ended.result()
        what = "ssh lost its connection" if code == LOGIN else "the agent there has ended"
        return f"{what} (exit code {code}){self._last_noise()}"

    async def _call(self, kind: type[M], message: Any) -> M:
        if self._lost:
            raise NodeLostError(self._lost)
        assert self._channel is not None
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._channel.send_exactly(message)
        self._waiting[message.call] = answer
        try:
            found = await answer
        finally:
            self._waiting.pop(message.call, None)
        if isinstance(found, Failed):
            raise RuntimeError(found.why)
        assert isinstance(found, kind)
        return found

    async def _read_noise(self, errors: asyncio.StreamReader) -> None:
        """Keep the last lines that ssh and the remote shell print."""
        while block := await errors.read(1 << 14):
            lines = block.decode(errors="replace").splitlines()
            self._noise = [*self._noise, *(line for line in lines if line.strip())][-_NOISE_LINES:]

    def _last_noise(self) -> str:
        return f": {self._noise[-1].strip()[:300]}" if self._noise else ""

    async def _explain(self, program: Sequence[str], python: str) -> str:
        """Say why there is no agent, from what ssh and the remote shell left."""
        assert self._ended is not None
        # The last words come through a pipe of their own.
        noise: asyncio.Future[None] = self._tasks[0]
        await asyncio.wait([noise], timeout=2.0)
        await asyncio.wait([self._ended], timeout=2.0)
        code = self._ended.result() if self._ended.done() else None
        return explain(
            code,
            "\n".join(self._noise),
            told=self._last_noise(),
            host=self.host,
            program=program,
            python=python,
        )
