"""The program that ssh starts on a node: a `NodeAgent` behind standard input and output.

It lives as long as its link: when the driver, its ssh or the cable between is gone, the workers are
stopped with their grace period, and then it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from davincirunsdk import __version__
from davincirunsdk.concurrency import in_thread, resolve
from davincirunsdk.engines.agent import NodeAgent
from davincirunsdk.engines.calls import (
    TO_AGENT,
    Done,
    Failed,
    Found,
    Greeting,
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
from davincirunsdk.engines.wire import Channel, LinkEnded, Message, over_pipes
from davincirunsdk.errors import DavinciRunError, PlatformError
from davincirunsdk.host import addresses, devices
from davincirunsdk.host.holders import holders
from davincirunsdk.leftovers.sub_reaper import become_sub_reaper

if TYPE_CHECKING:
    from davincirunsdk.engines.messages import NodeFacts

_GREETING_PATIENCE = 60.0
"""Seconds for the driver's first message; without one, somebody started this by hand."""

_LAST_WORDS = 0.5
"""Seconds that an agent which has to go stays, for its last report to reach the driver."""

_ROOT = Path("/")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def first_word(nonce: str) -> bytes:
    """What an agent says before anything else; its version follows, to the end of the line."""
    # On a line of its own, after whatever came before, and not what a shell that echoes commands prints.
    return f"\n{nonce} is here: davincirunsdk ".encode()


def beat_interval(lost_after: float) -> float:
    """Seconds between two beats, so that a few may be late before the other side counts as gone."""
    return lost_after / 6


class SshAgent(NodeAgent):
    """A `NodeAgent` that knows where sshd was reached, and to whom nobody has allotted the devices."""

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        """See `NodeAgent.inspect`.

        Raises:
            PlatformError: As there; or another process holds a device that would be used.
        """
        facts = await super().inspect(nproc_per_node)
        await in_thread(_refuse_held, facts.devices)
        return facts

    def address(self) -> str:
        """Tell it, unless it is one that other nodes have no use for."""
        reached = os.environ.get("SSH_CONNECTION", "").split()
        if len(reached) == 4 and addresses.distinctive(reached[2]) and reached[2] in addresses.own():
            return reached[2]
        return super().address()


class _Service:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._agent = SshAgent(inherits_orphans=become_sub_reaper())
        self._signalled: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the driver until its link ends, or a signal ends this agent."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, resolve, self._signalled, number)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._agent.reap_orphans)
        with contextlib.suppress(LinkEnded):
            greeting = await self._channel.receive(_GREETING_PATIENCE)
            assert isinstance(greeting, Greeting)
            if await self._found(greeting):
                await self._serve(greeting.lost_after)
        await self._channel.drain()

    async def _found(self, greeting: Greeting) -> bool:
        os.environ.update(greeting.env)
        try:
            await in_thread(_look_for_folders, greeting.folders)
            facts = await self._agent.inspect(greeting.nproc_per_node)
        except DavinciRunError as error:
            self._channel.send(Refused(error))
            return False
        self._channel.send(Found(facts))
        return True

    async def _serve(self, lost_after: float) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._channel.beat, beat_interval(lost_after))
            listening = asyncio.ensure_future(self._listen(lost_after))
            either: set[asyncio.Future[Any]] = {listening, self._signalled}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                await self._agent.leave(f"the link to its driver has ended: {listening.result()}")
            else:
                await self._agent.leave(f"its agent was ended by {self._signalled.result().name}")
                await asyncio.wait({listening}, timeout=_LAST_WORDS)
                listening.cancel()
            group.cancel_scope.cancel()

    async def _listen(self, lost_after: float) -> str:
        """Do what the driver says; return why its link ended."""
        async with anyio.create_task_group() as group:
            try:
                while True:
                    group.start_soon(self._answer, await self._channel.receive(lost_after))
            except LinkEnded as end:
                group.cancel_scope.cancel()
                return str(end)
        raise AssertionError("not reached: the loop ends by an exception")

    async def _answer(self, call: Message) -> None:
        try:
            answer = await self._do(call)
        except Exception as error:
            # A fault of ours in one call: the driver decides what becomes of the node.
            answer = Failed(getattr(call, "call", 0), f"{type(error).__name__}: {error}")
        self._channel.send(answer)
        await self._channel.drain()

    async def _do(self, call: Message) -> Message:
        if isinstance(call, Start):
            return Started(call.call, await self._agent.start(call.plan, call.table))
        if isinstance(call, Report):
            return Reported(call.call, await self._agent.report())
        if isinstance(call, Stop):
            await self._agent.stop(call.now)
            return Done(call.call)
        if isinstance(call, Signal):
            await self._agent.signal(call.signal)
            return Done(call.call)
        if isinstance(call, RanksEnded):
            await self._agent.ranks_ended()
            return Done(call.call)
        if isinstance(call, SeesFile):
            return Looked(call.call, await self._agent.sees_file(call.path, call.beginning))
        if isinstance(call, ReadLog):
            return LogRead(call.call, await self._agent.read_log(call.rank, call.start, call.size))
        if isinstance(call, SetLogsAside):
            await self._agent.set_logs_aside(call.attempt)
            return Done(call.call)
        raise ValueError(f"{type(call).__name__} is not a call")


def _refuse_held(count: int) -> None:
    wanted = devices.visible(os.environ, devices.npus(_ROOT))[:count]
    found = holders(_ROOT, wanted)
    if found:
        listed = ", ".join(f"/dev/davinci{one.device} by pid {one.pid} ({one.command})" for one in found[:8])
        raise PlatformError(
            f"found devices that another process holds: {listed}; expected them free: wait for it or end it, "
            "or leave them out with ASCEND_RT_VISIBLE_DEVICES"
        )


def _look_for_folders(folders: tuple[str, ...]) -> None:
    for folder in folders:
        if not Path(folder).is_dir():
            raise PlatformError(
                f"found no folder {folder}, which is there where the job was started; expected it on every "
                "host: share it, copy it, or name another with --work-dir (work_dir)"
            )


async def _main(source: int, target: int) -> None:
    reader, writer = await over_pipes(os.fdopen(source, "rb", 0), os.fdopen(target, "wb", 0))
    channel = Channel(reader, writer, accepts=TO_AGENT)
    await _Service(channel).run()


def main(nonce: str) -> None:
    """Be the program; never returns.

    Args:
        nonce: What the driver knows this agent's first word by: a login shell may print before it.
    """
    source, target = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Whatever prints in this process must not do so between messages.
    os.dup2(2, 1)
    os.write(target, first_word(nonce) + f"{__version__}\n".encode())
    asyncio.run(_main(source, target))
    # Threads that hang in a look at a sick driver must not hold the exit.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
