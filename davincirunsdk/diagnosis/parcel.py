"""What nodes tell each other as MessagePack, above all accounts: typed, for nothing else is believed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.diagnosis.account import Account


def pack(accounts: Sequence[Account]) -> bytes:
    """Turn accounts into bytes; text that is not Unicode is sent with escapes."""
    return msgspec.msgpack.encode([_plain(one) for one in accounts])


def unpack(data: bytes) -> tuple[Account, ...]:
    """Turn bytes into accounts.

    Raises:
        msgspec.MsgspecError: They are no accounts.
    """
    # Here, as the rest of this module serves wires that carry no accounts, in good time.
    from davincirunsdk.diagnosis.account import Account

    return msgspec.msgpack.decode(data, type=tuple[Account, ...], dec_hook=decode) if data else ()


def encode(value: object) -> object:
    """Give what MessagePack cannot hold a form that it can.

    Raises:
        NotImplementedError: There is none.
    """
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def decode(kind: type, value: object) -> object:
    """Undo `encode`.

    Raises:
        NotImplementedError: Nothing is sent as this kind.
        msgspec.ValidationError: The value is not of it.
    """
    if issubclass(kind, Path):
        return Path(msgspec.convert(value, str))
    raise NotImplementedError(f"{kind.__name__} cannot be received")


def in_unicode(value: object) -> object:
    """Put escapes for what is not Unicode in all text of a value of built-in kinds."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {in_unicode(key): in_unicode(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_unicode(one) for one in value]
    return value


def _plain(account: Account) -> object:
    return in_unicode(msgspec.to_builtins(account, builtin_types=(bytes,), enc_hook=encode))
