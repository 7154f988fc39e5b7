"""JSON text to plain values, and where the text is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from davincirunsdk.rank_table.handmade import find_slip, place

if TYPE_CHECKING:
    from davincirunsdk.rank_table.table import Json

MOST_EXPLAINED = 4 << 20
"""Bytes of a text that is walked through for what is wrong; longer ones are not made by hand."""

ENCODINGS = {
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"\x1f\x8b": "a compressed file",
    b"PK\x03\x04": "an archive",
}
"""What a file is that begins so."""

BOM = b"\xef\xbb\xbf"

PIECE = 65536
"""Bytes that are decoded in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Why a text is no JSON.

    Attributes:
        words: What is wrong, with the line, and its number and column as editors count.
        expected: What should be there.
        cut: True if the text is the beginning of a valid one, so that more of it would mend it.
    """

    words: str
    expected: str = "a JSON object"
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
    for beginning, meaning in ENCODINGS.items():
        if data.startswith(beginning):
            return Break(words=meaning, expected="plain text in UTF-8")
    try:
        text = data.decode()
        msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        where = place(data.decode(errors="replace"), len(data[: error.start].decode()))
        return Break(
            words=f"bytes that are not UTF-8 {where}",
            expected="text in UTF-8: save it in that encoding",
            cut=error.end == len(data) and error.reason == "unexpected end of data",
        )
    except RecursionError:
        return Break(words="lists or objects nested far too deep")
    except msgspec.DecodeError as error:
        head, _, tail = str(error).removeprefix("JSON is malformed: ").rpartition(" (byte ")
        cut = not head and tail == "Input data was truncated"
        slip = find_slip(text) if len(data) <= MOST_EXPLAINED else None
        # Cut in the middle of a word, a good text looks like one with a bad word at its end.
        if slip is not None and cut <= slip.ended:
            where = f" {place(text, slip.at)}" if text.strip() else ""
            return Break(words=f"{slip.found}{where}", expected=slip.expected, cut=cut)
        if head:
            at = len(data[: int(tail.rstrip(")"))].decode(errors="replace"))
            return Break(words=f"{head} {place(text, at)}")
        return Break(words="text that ends early" if cut else tail, cut=cut)
    return Break(words="a value that is out of range")


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
