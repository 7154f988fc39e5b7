"""Accounts on their way to the node that judges all: typed MessagePack, for nothing else is believed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from davincirunsdk.diagnosis.account import Account

if TYPE_CHECKING:
    from collections.abc import Sequence


def pack(accounts: Sequence[Account]) -> bytes:
    """Turn accounts into bytes; text that is not Unicode is sent with escapes."""
    return msgspec.msgpack.encode([_plain(one) for one in accounts])


def unpack(data: bytes) -> tuple[Account, ...]:
    """Turn bytes into accounts.

    Raises:
        msgspec.MsgspecError: They are no accounts.
    """
    return msgspec.msgpack.decode(data, type=tuple[Account, ...], dec_hook=_decode) if data else ()


def _plain(account: Account) -> object:
    return _unicode(msgspec.to_builtins(account, builtin_types=(bytes,), enc_hook=_encode))


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _decode(kind: type, value: object) -> object:
    if issubclass(kind, Path):
        return Path(msgspec.convert(value, str))
    raise NotImplementedError(f"{kind.__name__} cannot be received")


def _unicode(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _unicode(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_unicode(one) for one in value]
    return value
