"""JSON text to plain values, and where the text is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from davincirunsdk.rank_table.table import Json

BOM = b"\xef\xbb\xbf"
NEWLINE = b"\n"

PIECE = 65536
"""Bytes that are decoded in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Why a text is no JSON.

    Attributes:
        words: What is wrong, with the line and column that editors count by.
        cut: True if the text is the beginning of a valid one, so that more of it would mend it.
    """

    words: str
    cut: bool = False


def decode(data: bytes) -> Json | Break:
    """Decode a JSON text of any size, or tell where it is broken."""
    try:
        return _in_pieces(data)
    except (msgspec.DecodeError, ValueError, RecursionError):  # not all versions make them one family
        # A piece counts its bytes from its own start, so the whole is tried for the place.
        return broken(data)


def broken(data: bytes) -> Break:
    """Tell where a text that could not be decoded is broken."""
    try:
        text = data.decode()
        msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        return Break(words=f"bytes that are no UTF-8 {_place(data, error.start)}")
    except RecursionError:
        return Break(words="lists or objects nested far too deep")
    except msgspec.DecodeError as error:
        head, _, tail = str(error).removeprefix("JSON is malformed: ").rpartition(" (byte ")
        if head:
            return Break(words=f"{head} {_place(data, int(tail.rstrip(')')))}")
        if tail == "Input data was truncated":
            return Break(words="the text ends early" if text.strip() else "the text is empty", cut=True)
        return Break(words=tail)
    return Break(words="a value that is out of range")


def _place(data: bytes, offset: int) -> str:
    before = data[:offset]
    return f"at line {before.count(NEWLINE) + 1}, column {offset - before.rfind(NEWLINE)}"


def _in_pieces(data: bytes | msgspec.Raw) -> Json:
    """Decode a large text member by member.

    The decoder holds the interpreter's lock until it is done, which for ten megabytes holds up the
    event loop of the program that we run in, though this is another thread.
    """
    view = memoryview(data)
    opening = bytes(view[:64]).lstrip()[:1] if view.nbytes > PIECE else b""
    if opening == b"{":
        members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return {key: _in_pieces(value) for key, value in members.items()}
    if opening == b"[":
        return [_in_pieces(item) for item in msgspec.json.decode(data, type=list[msgspec.Raw])]
    decoded: Json = msgspec.json.decode(data)
    return decoded
