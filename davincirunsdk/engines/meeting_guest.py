"""The other nodes of a meeting: each finds node 0, says what happens, and hears what becomes of the job."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import anyio

from davincirunsdk import __version__
from davincirunsdk.engines import admission
from davincirunsdk.engines.admission import Challenge, Declined, Welcome
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
from davincirunsdk.engines.messages import NodeReport
from davincirunsdk.engines.wire import Channel, LinkEnded
from davincirunsdk.errors import PlatformError
from davincirunsdk.types import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.types import RunResult

_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between two tries to reach node 0; the last one again and again."""


class GuestMeeting(Meeting):
    """See `Meeting`."""

    async def open(self) -> None:
        """Begin to look for node 0; see `Meeting.open`."""
        loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._why = ""
        self._host: Part = part(0, self._terms.names[0])
        self._stops: list[Event] = []
        self._halted = False
        self._verdict: Verdict | None = None
        self._again: Again | None = None
        self._word: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        self._begin(asyncio.ensure_future(self._attend()))

    def note_started(self) -> None:
        """See `Meeting.note_started`."""
        self._tell()

    def note_stop(self, reason: str, exit_code: int | None = None) -> None:
        """See `Meeting.note_stop`."""
        if not self._halted and not self._stops:
            self._stops.append(Event(kind="stopping", time=time.time(), detail=reason, exit_code=exit_code))
            self._tell()

    def note_wish(self, reason: str, exit_code: int) -> None:
        """See `Meeting.note_wish`."""
        if not self._wished.done():
            self._wished.set_result(None)
            self._stops.append(Event(kind="stopping", time=time.time(), detail=reason, exit_code=exit_code))
            self._tell()

    def _tell(self) -> None:
        if self._channel is not None:
            self._channel.send(Told(NodeReport(workers=self._workers(), events=tuple(self._stops))))

    async def close(self) -> None:
        """Hang up; see `Meeting.close`."""
        await super().close()
        if self._channel is not None:
            self._channel.close()

    async def _end_attempt(self, decide: Callable[[RunResult, str], float | None]) -> Again | None:
        if self._channel is None:
            assert self._result is not None
            decide(self._result, NOT_MET)
            return None
        await self._await_word()
        again, self._again = self._again, None
        return again

    async def _conclude(self) -> RunResult | None:
        if self._channel is None and not self._host.lost:
            if self._terms.required and self._error is None:
                self._do_without("node 0 had not been reached when the workers of this node had ended")
            self._note_unknown(f"node 0{self._why and ' at '}{self._why}", self._result)
            return None
        await self._await_word()
        if self._verdict is not None:
            return self._verdict.result
        if not self._host.lost:
            return None
        return await self._judge([self._host, self._own], [self._host])

    async def _await_word(self) -> None:
        """Say how the workers here ended, and wait for what node 0 has to say to that."""
        if self._channel is None or self._over.done():
            return
        own = self._own
        self._channel.send(
            Told(
                NodeReport(
                    workers=own.workers,
                    auxiliaries=own.auxiliaries,
                    result=own.result,
                    departing=own.lost,
                )
            )
        )
        await asyncio.wait({self._word, self._over, self._hurry}, return_when=asyncio.FIRST_COMPLETED)

    async def _attend(self) -> None:
        channel = await self._reach()
        if channel is None:
            return
        self._channel = channel
        channel.allow(MOST_BYTES)
        self._tell()
        beating = asyncio.ensure_future(channel.beat(BEAT))
        try:
            while self._verdict is None:
                message = await channel.receive(self._terms.lost_after)
                if isinstance(message, Halt) and not self._halted:
                    self._halted = True
                    self._obey(message.reason)
                elif isinstance(message, Verdict):
                    self._verdict = message
                elif isinstance(message, Again):
                    # A new attempt, of which nothing has been heard yet.
                    self._again, self._stops, self._halted = message, [], False
                    self._own.result = None
                    self._word.set_result(None)
                    self._word = asyncio.get_running_loop().create_future()
        except LinkEnded as end:
            self._host.lost = str(end)
            self._say(f"{self._host.name} was lost: {end}")
            self._halted = True
            self._stop(f"{self._host.name} was lost")
        finally:
            beating.cancel()
            if not self._over.done():
                self._over.set_result(None)

    async def _reach(self) -> Channel | None:
        """Find node 0 and be let in; None when that is given up."""
        began = time.monotonic()
        end, reminder = began + self._terms.timeout, began + REMINDER
        steps = iter(_STEPS)
        while (now := time.monotonic()) < end:
            for place in self._terms.places:
                try:
                    return await self._knock(place)
                except _NotNow as error:
                    self._why = f"{place}:{self._terms.port}: {error}"
                except _Never as error:
                    if error.clash:
                        self._fail(PlatformError(f"this node does not fit into the job: {error}"))
                    else:
                        self._do_without(str(error))
                    return None
            if now >= reminder:
                self._say(f"no meeting yet with node 0 at {self._why}")
                reminder = now + REMINDER
            await self._within(min(next(steps, _STEPS[-1]), max(0.0, end - time.monotonic())))
            if self._hurry.done():
                return None
        self._do_without(f"node 0 was not reached within {self._terms.timeout:g} s at {self._why}")
        return None

    async def _knock(self, place: str) -> Channel:
        """Try once.

        Raises:
            _NotNow: Nobody was there, or not ready.
            _Never: To try again is of no use.
        """
        found = await resolved([place])
        if not found:
            raise _NotNow("its name is not known")
        address = preferred(found)
        try:
            with anyio.fail_after(admission.PATIENCE):
                reader, writer = await asyncio.open_connection(address, self._terms.port, limit=1 << 16)
        except TimeoutError:
            raise _NotNow("timed out") from None
        except OSError as error:
            raise _NotNow(error.strerror or str(error)) from None
        channel = Channel(
            reader,
            writer,
            accepts=(Challenge, Welcome, Declined, Halt, Again, Verdict),
            most_bytes=admission.MOST_BYTES,
        )
        try:
            return await self._enter(channel)
        except LinkEnded as end:
            channel.abort()
            raise _NotNow(str(end)) from None
        except BaseException:
            channel.abort()
            raise

    async def _enter(self, channel: Channel) -> Channel:
        own = self._terms.identity
        asked = await channel.receive(admission.PATIENCE)
        if not isinstance(asked, Challenge):
            raise _NotNow("it is not a davincirun of a job")
        if asked.version != __version__:
            raise _Never(
                f"node 0 has davincirunsdk {asked.version}, this node {__version__}: install one version"
            )
        introduction = admission.introduce(own, asked)
        channel.send(introduction)
        answer = await channel.receive(admission.PATIENCE)
        if isinstance(answer, Declined):
            raise _NotNow(answer.why) if answer.later else _Never(answer.why, clash=answer.clash)
        if not isinstance(answer, Welcome) or not admission.is_welcome_genuine(own, introduction, answer):
            raise _Never(
                f"whoever listens there has another key: set {admission.KEY_VARIABLE} or --meet-key-file "
                "(meet_key_file) alike on all nodes"
            )
        self._host = part(0, answer.host)
        return channel


class _NotNow(Exception):
    """Node 0 cannot be reached yet."""


class _Never(Exception):
    """Node 0 lets this node in never."""

    def __init__(self, why: str, *, clash: bool = False) -> None:
        super().__init__(why)
        self.clash = clash
