"""Typed and bounded messages over a byte stream: a length, then MessagePack of a declared kind."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from functools import reduce
from operator import or_
from typing import IO, TYPE_CHECKING

import anyio
import msgspec

from davincirunsdk import errors
from davincirunsdk.diagnosis import parcel

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 64 << 20
"""Size of a message between a driver and its agents: a rank table of thousands of rows, or much output."""

_LENGTH = struct.Struct("!I")

_ERRORS = (
    errors.WorkerSpawnError,
    errors.RankTableTimeoutError,
    errors.RankTableError,
    errors.PlatformError,
)


READ_LIMIT = 1 << 20
"""Bytes that a stream holds before its sender has to wait."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """What goes over the wire; each channel accepts the kinds that it was made for."""


class Beat(Message, frozen=True):
    """I am still there."""


class LinkEnded(Exception):
    """No further message will come; the text says why."""


class Channel:
    """Both directions of one link. All methods belong to the loop's thread.

    Args:
        reader: Where messages come from.
        writer: Where they go to; closed by `close`.
        accepts: Kinds of messages that may come, besides beats.
        most_bytes: Size of a message that may come.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        accepts: Sequence[type[Message]],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._most_bytes = most_bytes
        kinds = reduce(or_, accepts, Beat)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds, dec_hook=_decode)

    def allow(self, most_bytes: int) -> None:
        """Change the size of a message that may come: the other side is known now."""
        self._most_bytes = most_bytes

    async def receive(self, silence: float) -> Message:
        """Wait for the next message that is not a beat.

        Args:
            silence: Seconds without a sign of the other side after which it counts as gone.

        Raises:
            LinkEnded: The other side is gone, or sent something else than messages.
        """
        while True:
            # Not wait_for, which before Python 3.12 may lose a cancellation.
            message: Message | None = None
            with anyio.move_on_after(silence):
                message = await self._read()
            if message is None:
                raise LinkEnded(f"no sign of it for {silence:g} s")
            if not isinstance(message, Beat):
                return message

    def send(self, message: Message) -> None:
        """Send a message; what the link cannot take at once is kept.

        Text that is not Unicode, such as the names of odd files, is sent with escapes.
        """
        self._write(encode(message))

    def send_exactly(self, message: Message) -> None:
        """Send a message, or nothing.

        Raises:
            PlatformError: It holds text that is not Unicode and must not be changed.
        """
        try:
            data = _ENCODER.encode(message)
        except UnicodeEncodeError:
            raise errors.PlatformError(
                "found bytes that are not UTF-8 in the command, a variable or a folder; expected text that "
                "can be sent to other nodes: rename them"
            ) from None
        self._write(data)

    async def drain(self) -> None:
        """Wait until the link has taken nearly all that was sent; a link that has ended takes all."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def beat(self, interval: float) -> None:
        """Send a beat every `interval` seconds, until cancelled."""
        while True:
            self.send(Beat())
            await asyncio.sleep(interval)

    def end_sending(self) -> None:
        """Let the other side see the end of the stream, after all that was sent."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            else:
                self._writer.close()

    def close(self) -> None:
        """Close the link; what was sent still goes out."""
        self._writer.close()

    def abort(self) -> None:
        """Close the link at once."""
        if not self._writer.transport.is_closing():
            self._writer.transport.abort()

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def _read(self) -> Message:
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > self._most_bytes:
                raise LinkEnded(f"it sent {size} bytes in one message, more than {self._most_bytes}")
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise LinkEnded("the connection has ended") from None
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            raise LinkEnded(f"it sent something else than the messages of this version: {error}") from None


async def over_pipes(
    source: IO[bytes], target: IO[bytes]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Make streams of two pipes or sockets, which belong to the streams from now on."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(READ_LIMIT, loop=loop)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), source)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), target
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


def encode(message: Message) -> bytes:
    """Turn a message into bytes, text that is not Unicode with escapes."""
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain)
        return _ENCODER.encode(parcel.in_unicode(plain))


class _Error(msgspec.Struct, frozen=True):
    """An error of ours, as far as another node needs it."""

    kind: str
    text: str
    errno: int | None = None
    rank: int | None = None
    path: str | None = None
    where: str = ""


def _plain(value: object) -> object:
    """Give what MessagePack cannot hold a form that it can."""
    if isinstance(value, errors.DavinciRunError):
        kind = next((kind.__name__ for kind in _ERRORS if isinstance(value, kind)), "PlatformError")
        return msgspec.to_builtins(
            _Error(
                kind=kind,
                text=str(value.args[0]) if value.args else "",
                errno=value.errno if isinstance(value, errors.WorkerSpawnError) else None,
                rank=value.rank if isinstance(value, errors.WorkerSpawnError) else None,
                path=value.path if isinstance(value, errors.RankTableError) else None,
                where=value.where if isinstance(value, errors.RankTableError) else "",
            )
        )
    return parcel.encode(value)


def _decode(kind: type, value: object) -> object:
    if issubclass(kind, errors.DavinciRunError):
        return _rebuilt(msgspec.convert(value, _Error))
    return parcel.decode(kind, value)


def _rebuilt(error: _Error) -> errors.DavinciRunError:
    if error.kind == "WorkerSpawnError":
        return errors.WorkerSpawnError(error.text, errno=error.errno, rank=error.rank)
    if error.kind == "RankTableTimeoutError":
        return errors.RankTableTimeoutError(error.text, path=error.path, where=error.where)
    if error.kind == "RankTableError":
        return errors.RankTableError(error.text, path=error.path, where=error.where)
    return errors.PlatformError(error.text)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
