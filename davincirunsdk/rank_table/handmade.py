"""What people write by hand into a rank table that JSON does not have, named as they would name it."""

from __future__ import annotations

import re
from dataclasses import dataclass

SHOWN = 60
"""Characters of a line that are shown, around the place."""

_BLANK = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])", re.ASCII)
_WORD = re.compile(r"[^\W\d]\w*")
_PLACEHOLDER = re.compile(r"\{\{\s*[\w.-]+\s*\}\}|\$?\{\s*[\w.-]+\s*\}|<[\w .-]+>|\$\w+")
_COMMENT = re.compile(r"//|/\*|#|<!--|--")
_DOTS = re.compile(r"\.{2,}|\u2026")
_CLOSERS = {"{": "}", "[": "]"}
_QUOTES = "'`\u2018\u2019\u201c\u201d\u201e\u201a\uff02\uff07\u300c\u300d\u00ab\u00bb"
_WIDE = {
    "\uff1a": ":", "\uff0c": ",", "\u3001": ",", "\uff5b": "{", "\uff5d": "}", "\uff3b": "[", "\uff3d": "]",
    "\u3010": "[", "\u3011": "]",
}  # fmt: skip
_MEANT = {";": ",", "=": ":", "(": "[", ")": "]"}
_PYTHON = {"True": "true", "False": "false", "None": "null", "TRUE": "true", "FALSE": "false", "NULL": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """The first thing in a text that JSON does not have.

    Attributes:
        found: What it is, and what else helps to find it.
        expected: What should stand there.
        at: Its place in the text, in characters.
        ended: True if it is the end of the text, so that more of it would mend it.
    """

    found: str
    expected: str
    at: int
    ended: bool = False


def find_slip(text: str) -> Slip | None:
    """Read a text as JSON as far as it is; None if all of it is."""
    return _Reader(text).read()


def place(text: str, at: int) -> str:
    """Word a place as editors count, with the line that is there."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : end if end >= 0 else len(text)].rstrip()
    column = at - start
    first = max(0, min(column - SHOWN // 2, len(line) - SHOWN))
    part = "".join(letter if letter.isprintable() else " " for letter in line[first : first + SHOWN]).strip()
    before, after = "... " if first else "", " ..." if first + SHOWN < len(line) else ""
    number = text.count("\n", 0, at) + 1
    return f"at line {number}, column {column + 1} ({before}{part}{after})"


class _Reader:
    """Walks over a text once, token by token; `_expects` says what may come next."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._open: list[int] = []  # places of the brackets that are not closed yet
        self._comma = -1  # place of the last token if it was a comma
        self._last = 0  # end of the last token

    def read(self) -> Slip | None:
        expects = "value"
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                return self._end(expects)
            slip = self._foreign(expects)
            if slip is not None:
                return slip
            step = self._step(expects)
            if isinstance(step, Slip):
                return step
            expects = step

    def _skip_blanks(self) -> None:
        match = _BLANK.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _end(self, expects: str) -> Slip | None:
        if not self._text.strip():
            return Slip(found="empty text", expected="a JSON object", at=0, ended=True)
        if not self._open:
            return None if expects == "nothing" else self._slip("the end of the text", "more", ended=True)
        opened = self._open[-1]
        letter = self._text[opened]
        return Slip(
            found=f"text that ends early: this {letter!r} is not closed",
            expected=f"a {_CLOSERS[letter]!r} for it",
            at=opened,
            ended=True,
        )

    def _slip(self, found: str, expected: str, at: int | None = None, *, ended: bool = False) -> Slip:
        return Slip(found=found, expected=expected, at=self._at if at is None else at, ended=ended)

    def _foreign(self, expects: str) -> Slip | None:
        """Name what JSON has nowhere."""
        text, at = self._text, self._at
        letter = text[at]
        if _COMMENT.match(text, at):
            return self._slip("a comment", "none, for JSON has no comments: leave it out")
        if _DOTS.match(text, at):
            return self._slip("dots that stand for something left out", "all of the table written out")
        match = _PLACEHOLDER.match(text, at)
        if match and (letter != "{" or _WORD.match(match[0].strip("{} "))):
            return self._slip(f"a placeholder, {match[0]!r}, that nobody has filled in", "its value")
        if letter in _QUOTES:
            return self._slip(f"the quotation mark {letter!r}", 'straight double quotes (")')
        if letter in _WIDE:
            return self._slip(f"a full-width {letter!r}", f"a plain {_WIDE[letter]!r}")
        if letter in _MEANT:
            meant = ":" if expects == "colon" else _MEANT[letter]
            return self._slip(f"a {letter!r}", f"a {meant!r}")
        if letter.isspace() or not letter.isprintable():
            return self._slip(
                f"an invisible character (U+{ord(letter):04X})", "spaces, tabs and line ends only: remove it"
            )
        match = _WORD.match(text, at)
        if match and match[0] in _PYTHON:
            return self._slip(f"the word {match[0]!r}", f"{_PYTHON[match[0]]!r}, as JSON spells it")
        if match and match[0] not in ("true", "false", "null"):
            if not self._open and expects == "value":
                return self._slip("text that is not JSON", "a table that begins with '{'")
            what = "key" if expects in ("key", "key or end") else "text"
            return self._slip(
                f"a {what} without quotes, {match[0]!r}", f'double quotes around it ("{match[0]}")'
            )
        return None

    def _step(self, expects: str) -> str | Slip:
        letter = self._text[self._at]
        if expects == "nothing":
            if letter in "}]":
                return self._slip(f"a {letter!r} too many", "the end of the text")
            return self._slip("more text after the end of the table", "the end of the text")
        if letter in "}]":
            return self._close(letter, expects)
        if letter == ",":
            if expects == "colon":
                return self._slip("no colon after a key", "a colon and a value", at=self._last - 1)
            if expects != "comma or end":
                return self._slip("a comma with nothing before it", "a value, or no comma")
            self._comma = self._at
            self._advance(self._at + 1)
            return "key" if self._inside() == "{" else "value"
        if letter == ":":
            return self._colon(expects)
        if expects == "comma or end":
            return Slip(
                found="no comma between two members"
                if self._inside() == "{"
                else "no comma between two values",
                expected="a comma here",
                at=self._last - 1,
            )
        if expects == "colon":
            return self._slip("no colon after a key", "a colon between key and value", at=self._last - 1)
        return self._value(letter, expects)

    def _value(self, letter: str, expects: str) -> str | Slip:
        if expects in ("key", "key or end"):
            if letter != '"':
                return self._slip("something else than a key", "a key in double quotes")
            end = self._string_end()
            if isinstance(end, Slip):
                return end
            self._advance(end)
            return "colon"
        if letter in "{[":
            self._open.append(self._at)
            self._advance(self._at + 1)
            return "key or end" if letter == "{" else "value or end"
        if letter == '"':
            end = self._string_end()
            if isinstance(end, Slip):
                return end
            self._advance(end)
        else:
            match = _NUMBER.match(self._text, self._at) or _WORD.match(self._text, self._at)
            if match is None:
                digit = letter.isdigit() or letter in "+-."
                return self._slip(
                    "a number that JSON cannot read" if digit else f"the character {letter!r}",
                    'digits in double quotes, such as "7"' if digit else "a value",
                )
            self._advance(match.end())
        return "comma or end" if self._open else "nothing"

    def _string_end(self) -> int | Slip:
        match = _STRING.match(self._text, self._at)
        if match:
            return match.end()
        at = self._at + 1
        while at < len(self._text):
            letter = self._text[at]
            if letter == "\n":
                return self._slip("a text that is not closed on its line", 'a closing double quote (")')
            if letter < " ":
                return self._slip(
                    "a tab or another control character in a text", "it left out, or spaces", at=at
                )
            if letter == "\\":
                if not re.match(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})', self._text[at : at + 6]):
                    return self._slip("a single backslash in a text", "two of them, or a slash", at=at)
                at += 1
            at += 1
        return self._slip("text that ends early, inside of this", 'a closing double quote (")', ended=True)

    def _close(self, letter: str, expects: str) -> str | Slip:
        if not self._open:
            return self._slip(f"a {letter!r} that closes nothing", "the beginning of a table")
        opened = self._open[-1]
        if _CLOSERS[self._text[opened]] != letter:
            line = self._text.count("\n", 0, opened) + 1
            return self._slip(
                f"a {letter!r} while the {self._text[opened]!r} of line {line} is still open",
                f"a {_CLOSERS[self._text[opened]]!r} before it",
            )
        if self._comma >= 0 and expects in ("key", "value"):
            return self._slip("a comma with nothing after it", "no comma after the last one", at=self._comma)
        if expects in ("colon", "value"):
            return self._slip("a key without a value", "a colon and a value after it")
        self._open.pop()
        self._advance(self._at + 1)
        return "comma or end" if self._open else "nothing"

    def _colon(self, expects: str) -> str | Slip:
        if expects == "colon":
            self._advance(self._at + 1)
            return "value"
        if self._inside() == "[":
            line = self._text.count("\n", 0, self._open[-1]) + 1
            return self._slip(
                f"a key and a value in a list: the '[' of line {line} is still open", "a ']' before the key"
            )
        return self._slip("a colon in a wrong place", "one colon between key and value")

    def _inside(self) -> str:
        return self._text[self._open[-1]] if self._open else ""

    def _advance(self, end: int) -> None:
        if self._text[self._at] != ",":
            self._comma = -1
        self._at = self._last = end
