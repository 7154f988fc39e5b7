"""Find the known error that explains a worker's last lines best."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.patterns import CODES, FRAGMENTS, TORCH_KINDS, TORCH_PARTS, Pattern, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Level(IntEnum):
    """How seriously a line speaks: an error, plain text, or a warning or advice that only mentions."""

    ERROR = 0
    PLAIN = 1
    MENTION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A known error in a line."""

    pattern: Pattern
    label: str
    level: Level
    index: int
    line: str

    @property
    def names_culprit(self) -> bool:
        """Whether the line says, as a finding and not in passing, which other rank is to blame."""
        return self.pattern.role is Role.ELSEWHERE and self.level is not Level.MENTION

    @property
    def shows_victim(self) -> bool:
        """Whether the line says that this rank failed because of another one."""
        return self.names_culprit or (self.pattern.role is Role.SECONDARY and self.level is Level.ERROR)


_SCANNED = 2000  # characters of one line; a code or message stands near its start
_LEVEL_SCANNED = 200

_PREFIX = re.compile(r"\s*(?:\[(?:rank ?|default)\d+\]:?|\([^()]{0,80}pid=\d+[^()]{0,80}\)) ?")
_CANN = re.compile(r"(E(?<![\w/.-]E)[A-Z0-9]\d{4})(?=[):/])", re.ASCII)
_TORCH = re.compile(r"ERR(?<!\wERR)(\d{2})(\d{3})(?!\w)", re.ASCII)
_ADVICE = re.compile(
    r"\W*(?:possible causes?|solutions?|suggestions?|please (?:refer|check|see)|for (?:details|more)|see)\b",
    re.IGNORECASE,
)
_LEVEL_WORD = re.compile(r"\b(?:(ERROR|CRITICAL|FATAL)|(?:WARN|WARNING|INFO|DEBUG|EVENT|TRACE))\b")
_GLOG = re.compile(r"\[([EFWI])[\d ]")
_SPEAKS_OF_ERROR = re.compile(
    r"(?:\[PID: ?\d+\] .{0,60}?)?[\w-]{0,80}\(?E[A-Z0-9]\d{4}[):/]"  # CANN, both forms
    r"|[A-Za-z_][\w.]{0,100}(?:Error|Exception|Interrupt)(?::|$)"  # the last line of a Python traceback
    r"|what\(\):"  # the same of C++
    r"|[\w./ -]{1,80}: error:",  # argparse
    re.ASCII,
)
_NO_CAUSE = "99999"  # torch_npu prints it for every exception that is not its own


def strip_prefix(line: str) -> str:
    """Take away what another launcher put before a worker's line, such as `[rank3]: `, not its indent."""
    found = _PREFIX.match(line)
    return line[found.end() :] if found else line


def level_of(line: str) -> Level:
    """Tell how seriously a line speaks."""
    text = strip_prefix(line[:_SCANNED]).lstrip()
    if _ADVICE.match(text):
        return Level.MENTION
    if _SPEAKS_OF_ERROR.match(text):
        return Level.ERROR
    if word := _LEVEL_WORD.search(text[:_LEVEL_SCANNED]):
        return Level.ERROR if word[1] else Level.MENTION
    if glog := _GLOG.match(text):
        return Level.ERROR if glog[1] in "EF" else Level.MENTION
    return Level.PLAIN


def find(lines: Sequence[str]) -> Match | None:
    """Find the known error that explains these lines best.

    Lines that speak as an error go before plain ones, mere mentions come last; an error that
    is a cause goes before one that is an effect; one that only wraps others is taken when there
    is nothing else; of equals the first in the log is taken, for later ones follow from it.

    Args:
        lines: Decoded lines of one worker, oldest first.

    Returns:
        The best match, or None when no line holds a known error.
    """
    ranked = [(_rank(match, row), match) for row, match in enumerate(_matches(lines))]
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


def _rank(match: Match, row: int) -> tuple[bool, bool, Level, Role, int, int]:
    pattern = match.pattern
    # HCCL ranks its own findings: a failed transfer tells more than a lost heartbeat, whichever came first.
    finding = FRAGMENTS.index(pattern) if pattern.role is Role.ELSEWHERE else 0
    # It stands in the text that follows an error's first line, so it need not look like an error itself.
    level = Level.ERROR if match.names_culprit else match.level
    return match.level is Level.MENTION, pattern.vague, level, pattern.role, finding, row


def _matches(lines: Sequence[str]) -> Iterator[Match]:
    cut = [line[:_SCANNED] for line in lines]
    lowered = [line.lower() for line in cut]
    # Most tails hold hardly any fragment: one search in the whole keeps the loop over lines short.
    whole = "\n".join(lowered)
    present = [
        (parts, pattern)
        for pattern in FRAGMENTS
        for parts in pattern.fragments
        if all(part in whole for part in parts)
    ]
    for index, line in enumerate(cut):
        known = _by_code(line)
        known += [
            ('"' + " ... ".join(parts) + '"', pattern)
            for parts, pattern in present
            if all(part in lowered[index] for part in parts)
        ]
        if known:
            level = level_of(line)
            for label, pattern in known:
                yield Match(pattern=pattern, label=label, level=level, index=index, line=line)


def _by_code(line: str) -> list[tuple[str, Pattern]]:
    known = [
        (code, CODES.get(code) or _unknown("a CANN error that this program does not know"))
        for code in dict.fromkeys(_CANN.findall(line))
    ]
    for part, kind in dict.fromkeys(_TORCH.findall(line)):
        if part + kind != _NO_CAUSE:
            code = f"ERR{part}{kind}"
            place = f"{TORCH_PARTS.get(part, 'unknown part')}, {TORCH_KINDS.get(kind, 'unknown kind')}"
            known.append((code, CODES.get(code) or _unknown(f"an error of torch_npu ({place})")))
    return known


def _unknown(meaning: str) -> Pattern:
    remedy = "read the message and the lines before it"
    return Pattern(meaning=meaning, role=Role.EITHER, remedy=remedy, vague=True)


def hint(lines: Sequence[str]) -> str:
    """Say what the known Ascend error in a worker's last lines means and what to do.

    Args:
        lines: Decoded lines of one worker, oldest first.

    Returns:
        A few sentences in one line; "" when no known error is there.
    """
    match = find(lines)
    if match is None:
        return ""
    pattern = match.pattern
    said = f"{match.label}: {pattern.meaning}"
    if pattern.names and (named := pattern.names.search(match.line)):
        said += f": {' '.join(named[1].split())}"
    if match.level is Level.MENTION:
        said = f"only mentioned, maybe not the cause: {said}"
    if pattern.role is Role.SECONDARY:
        said += ". Another rank is the likelier cause"
    elif pattern.role is Role.ELSEWHERE:
        said += ". The cause is there, not in this rank"
    elif pattern.role is Role.EITHER and not pattern.vague:
        said += ". Cause, or effect of another rank's end"
    return f"{said}. To do: {pattern.remedy}."
