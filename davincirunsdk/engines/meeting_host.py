"""Node 0 of a meeting: lets the other nodes in, stops all when one has to stop, and judges for all."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING

import anyio

from davincirunsdk import __version__
from davincirunsdk.concurrency import resolve
from davincirunsdk.engines import admission
from davincirunsdk.engines.admission import Challenge, Declined, Introduction
from davincirunsdk.engines.meeting import (
    BEAT,
    MOST_BYTES,
    NOT_MET,
    REMINDER,
    Again,
    Halt,
    Meeting,
    Part,
    Told,
    Verdict,
    part,
    preferred,
    resolved,
)
from davincirunsdk.engines.wire import Channel, LinkEnded
from davincirunsdk.host import addresses
from davincirunsdk.host.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.engines.messages import NodeReport
    from davincirunsdk.types import RunResult

_STRANGERS = 4
"""Connections besides those of the nodes; with one more, the oldest that is on its way in gives way.

With those that the loop has accepted or closed, but not got round to, there are eight at most.
"""

_QUEUE = 1024
"""Connections that wait in the kernel until they are accepted."""

_TURNS = 5
"""Turns of the loop within which a connection that it has accepted comes to us, and is closed."""

_LINES = 8
"""Lines about those who were not let in."""

_SLACK = 15.0
"""Seconds after the grace period in which a node has to say that its workers are gone."""

_LAST_WORD = 2.0
"""Seconds for the verdict to get out."""


class HostMeeting(Meeting):
    """See `Meeting`."""

    _server: asyncio.Server | None = None
    _closed = False

    async def open(self) -> None:
        """Listen; see `Meeting.open`."""
        self._parts: dict[int, Part] = {0: self._own}
        self._links: dict[Part, Channel] = {}
        self._coming: dict[asyncio.Task[None], Channel] = {}
        self._troubled: list[Part] = []
        self._halted = ""
        self._stop_code: int | None = None
        self._joint: RunResult | None = None
        self._attempts = 0
        self._returning = False
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines = 0
        terms = self._terms
        try:
            self._server = await asyncio.start_server(
                # asyncio accepts so many in one go.
                self._on_connection,
                await self._bindable(),
                terms.port,
                limit=1 << 16,
                backlog=1,
            )
            for listener in self._server.sockets:
                with socket.socket(fileno=os.dup(listener.fileno())) as own:
                    own.listen(_QUEUE)
        except OSError as error:
            self._do_without(
                f"port {terms.port} of this host cannot be had ({error.strerror}): give another on all nodes "
                "with --meet-port (meet_port)"
            )
            if self._error is not None:
                raise self._error from None
            return
        if not terms.identity.key and terms.known is None:
            self._say(
                f"the meeting at port {terms.port} takes the first {terms.identity.nnodes - 1} launchers "
                f"that say they are of this job: set {admission.KEY_VARIABLE} on all nodes to be sure"
            )
        self._begin(asyncio.ensure_future(self._await_all()))

    def note_started(self) -> None:
        """See `Meeting.note_started`; node 0 knows its own workers."""

    def note_stop(self, reason: str, exit_code: int | None = None) -> None:
        """See `Meeting.note_stop`."""
        self._trouble(self._own, reason, exit_code)

    def note_wish(self, reason: str, exit_code: int) -> None:
        """See `Meeting.note_wish`."""
        resolve(self._wished, None)
        self._trouble(self._own, reason, exit_code)
        self._wake()

    async def close(self) -> None:
        """Listen no more; see `Meeting.close`."""
        self._closed = True
        if self._server is not None:
            # What asyncio is just accepting when its server closes stays open.
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._server.close()
        # A task that is cancelled before its first step closes nothing.
        for channel in tuple(self._coming.values()):
            channel.abort()
        await super().close()
        for channel in self._links.values():
            channel.close()
        await asyncio.sleep(0)

    async def _end_attempt(self, decide: Callable[[RunResult, str], float | None]) -> Again | None:
        joint = await self._settle()
        if self._error is not None or self._hurry.done():
            return None
        assert self._result is not None
        pause = decide(self._result if joint is None else joint, NOT_MET if self._absent() else "")
        if pause is None or not await self._are_all_back():
            return None
        self._attempts += 1
        again = Again(number=self._attempts, pause=pause, port=0 if self._terms.keeps_port else free_port())
        for channel in self._links.values():
            channel.send(again)
        self._joint, self._troubled, self._halted, self._stop_code = None, [], "", None
        for one in self._parts.values():
            one.result = None
        return again

    async def _are_all_back(self) -> bool:
        """Wait until lost nodes have come back, as a pod does that is replaced; False if they do not."""
        lost = ", ".join(one.name for one in self._parts.values() if one.lost)
        if not lost:
            return True
        timeout = self._terms.timeout
        self._say(f"waiting for {lost} to come back, for at most {timeout:g} s (--meet-timeout)")
        end = time.monotonic() + timeout
        self._returning = True
        try:
            while any(one.lost or not one.ended for one in self._parts.values()):
                left = end - time.monotonic()
                if left <= 0:
                    self._say(f"no restart: {lost} did not come back within {timeout:g} s")
                if left <= 0 or self._wished.done() or self._hurry.done():
                    return False
                await self._within(left, self._change)
        finally:
            self._returning = False
        return True

    async def _conclude(self) -> RunResult | None:
        if self._terms.required and self._error is None and self._absent():
            # Those who have not come by now would have been named at the time limit.
            self._do_without(f"{self._absent()} had not come when the workers of node 0 had ended")
        joint = await self._settle()
        if absent := self._absent():
            self._note_unknown(absent, joint or self._result)
        if joint is None:
            return None
        links = list(self._links.values())
        for channel in links:
            channel.send(Verdict(joint))
            channel.end_sending()
        with anyio.move_on_after(_LAST_WORD):
            await asyncio.gather(*(link.drain() for link in links))
        return joint

    async def _settle(self) -> RunResult | None:
        """Wait until all nodes that have come have ended, and judge them; None when none has come."""
        if self._joint is not None:
            return self._joint
        if self._own.lost:
            self._trouble(self._own, self._own.lost)
        elif self._own.result is not None and self._own.result.failures:
            self._note_failure(self._own)
        while (going := self._going()) and not self._hurry.done():
            if self._error is not None:
                self._halt(str(self._error))
            late = self._deadline - time.monotonic() if self._halted else None
            if late is not None and late <= 0:
                for one in going:
                    self._lose(one, "it did not say in time that its workers are gone")
                break
            await asyncio.wait({self._change, self._hurry}, timeout=late, return_when=asyncio.FIRST_COMPLETED)
        if len(self._parts) == 1:
            return None
        parts = [self._parts[node_rank] for node_rank in sorted(self._parts)]
        self._joint = await self._judge(parts, self._troubled, self._stop_code)
        return self._joint

    def _going(self) -> list[Part]:
        return [one for one in self._parts.values() if not one.ended]

    async def _bindable(self) -> str | None:
        """Give this host's own address that the others use, None for all where that is not known."""
        place = self._terms.places[0]
        found = await resolved([place])
        own = {one for one in found if one in addresses.own()}
        if own:
            return preferred(own)
        return "127.0.0.1" if place in ("127.0.0.1", "localhost") else None

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        channel = Channel(reader, writer, accepts=(Introduction, Told), most_bytes=admission.MOST_BYTES)
        known = self._terms.known
        is_stranger = not self._terms.identity.key and known is not None and peer not in known
        if is_stranger or self._closed:
            channel.abort()
            return
        while len(self._coming) + len(self._links) >= self._terms.identity.nnodes - 1 + _STRANGERS:
            oldest = next(iter(self._coming))
            self._coming.pop(oldest).abort()
            oldest.cancel()
        task = asyncio.ensure_future(self._receive(channel, peer))
        self._coming[task] = channel
        self._begin(task)
        task.add_done_callback(lambda task: self._coming.pop(task, None))

    async def _receive(self, channel: Channel, peer: str) -> None:
        """See a connection through, from its first word to its end."""
        guest: Part | None = None
        try:
            guest = await self._admit(channel, peer)
            if guest is None:
                return
            task = asyncio.current_task()
            assert task is not None
            self._coming.pop(task, None)
            channel.allow(MOST_BYTES)
            beating = asyncio.ensure_future(channel.beat(BEAT))
            try:
                while True:
                    message = await channel.receive(self._terms.lost_after)
                    if isinstance(message, Told):
                        self._take(guest, message.report)
            finally:
                beating.cancel()
        except LinkEnded as end:
            if guest is not None:
                self._lose(guest, str(end))
        finally:
            channel.close()

    async def _admit(self, channel: Channel, peer: str) -> Part | None:
        """Let a node in, None if it is not.

        Raises:
            LinkEnded: It has gone, or said something else.
        """
        own = self._terms.identity
        asked: Challenge = admission.challenge()
        channel.send(asked)
        guest = await channel.receive(admission.PATIENCE)
        if not isinstance(guest, Introduction):
            return None
        declined = self._objection(asked, guest, peer)
        if declined is not None:
            channel.send(declined)
            with anyio.move_on_after(admission.PATIENCE):
                await channel.drain()
            return None
        new = part(guest.node_rank, guest.host)
        self._parts[guest.node_rank] = new
        self._links[new] = channel
        channel.send(admission.welcome(own, guest))
        if self._halted:
            channel.send(Halt(self._halted))
        self._wake()
        return new

    def _objection(self, asked: Challenge, guest: Introduction, peer: str) -> Declined | None:
        own = self._terms.identity
        there = f"node {guest.node_rank} ({guest.host}, {peer})"
        if guest.version != __version__:
            return self._refuse(
                f"{there} has davincirunsdk {guest.version}, {own.name} {__version__}: install one version"
            )
        if not admission.is_genuine(own, asked, guest):
            return self._refuse(
                f"{there} has another key than {own.name}, or one of them has none: set "
                f"{admission.KEY_VARIABLE} or --meet-key-file (meet_key_file) alike on all nodes"
            )
        if why := admission.contradiction(own, guest):
            return self._refuse(why, clash=True)
        known = self._parts.get(guest.node_rank)
        if known is not None and known.lost and self._returning:
            return None
        if known is not None and known.lost:
            return Declined(why=f"{known.name} was lost to this job, which is ending", later=True)
        if known is not None:
            return self._refuse(
                f"{guest.host} ({peer}) says that it is node {guest.node_rank}, and so does "
                f"{known.facts.host}: give each node a rank of its own with --node-rank (node_rank)",
                clash=True,
            )
        return None

    def _refuse(self, why: str, *, clash: bool = False) -> Declined:
        self._lines += 1
        if self._lines <= _LINES:
            self._say(f"not let in to the meeting: {why}")
        return Declined(why=why, clash=clash)

    def _take(self, guest: Part, report: NodeReport) -> None:
        if report.workers:
            guest.workers, guest.auxiliaries = report.workers, report.auxiliaries
        for event in report.events:
            if event.kind == "stopping":
                if event.exit_code is not None:
                    resolve(self._wished, None)
                self._trouble(guest, event.detail, event.exit_code)
        if report.departing and not guest.ended:
            guest.lost = report.departing
            self._trouble(guest, report.departing)
        if report.result is not None and not guest.ended:
            guest.result = report.result
            if report.result.failures:
                self._note_failure(guest)
            others = [one for one in self._parts.values() if one is not self._own]
            if not self._absent() and all(one.result is not None for one in others):
                self._others_ended()
        self._wake()

    def _lose(self, guest: Part, why: str) -> None:
        if guest.ended:
            return
        guest.lost = why
        self._links.pop(guest, None)
        self._say(f"{guest.name} was lost: {why}")
        self._troubled.append(guest)
        self._halt(f"{guest.name} was lost", but=guest)
        self._wake()

    def _trouble(self, one: Part, reason: str, exit_code: int | None = None) -> None:
        if one not in self._troubled and exit_code is None:
            self._troubled.append(one)
        if not self._halted:
            self._stop_code = exit_code
        self._halt(f"{reason} on {one.name}", but=one)

    def _note_failure(self, one: Part) -> None:
        if not self._terms.keep_going:
            self._trouble(one, "a worker failed")
        elif one not in self._troubled:
            self._troubled.append(one)

    def _halt(self, reason: str, but: Part | None = None) -> None:
        """Have all nodes stop, once."""
        if self._halted:
            return
        self._halted = reason
        self._deadline = time.monotonic() + self._terms.grace_period + _SLACK
        for guest, channel in self._links.items():
            if guest is not but and not guest.ended:
                channel.send(Halt(reason))
        if but is not self._own:
            self._obey(reason)
        self._wake()

    def _wake(self) -> None:
        if not self._change.done():
            self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()

    def _absent(self) -> str:
        absent = [rank for rank in range(self._terms.identity.nnodes) if rank not in self._parts]
        return ", ".join(f"node {rank} ({self._terms.names[rank]})" for rank in absent)

    async def _await_all(self) -> None:
        """Say each minute who has not come yet, and give them up at last."""
        began = time.monotonic()
        end, reminder = began + self._terms.timeout, began + REMINDER
        while self._absent() and (now := time.monotonic()) < end:
            if now >= reminder:
                self._say(
                    f"no meeting yet with {self._absent()}: expected at port {self._terms.port} of this host"
                )
                reminder = now + REMINDER
            await self._within(min(end, reminder) - now, self._change)
            if self._hurry.done():
                return
        if self._absent():
            self._do_without(f"{self._absent()} never came within {self._terms.timeout:g} s")
