"""What one error block says: whose fault, which known error, in which words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.blocks import Kind, is_advice, is_error_level
from davincirunsdk.diagnosis.knowledge import SAME_ENDS, Known, Role, codes_in, fragments_in
from davincirunsdk.diagnosis.lines import mask
from davincirunsdk.diagnosis.speech import (
    is_about_being_told,
    is_about_communication,
    is_about_waiting,
    is_carrier,
    is_hedged,
    is_in_collective,
    places_named,
    ranks_named,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.diagnosis.blocks import Block
    from davincirunsdk.diagnosis.lines import Line

_SCANNED = 3000
_TOLD_AFTER = 100
"""Characters into a line from which its beginning is left out of the headline."""
_LEAD_IN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An error of one rank.

    Attributes:
        kind: Sort of the block.
        role: Whose fault it is by its own words.
        sure: The role comes from a known error, not from the mere fact that something was raised.
        known: The known error behind it, or None.
        headline: The line that says it.
        quotes: Every line that says it, such as all exceptions of a chain.
        reason: The message's own reason, operator or error text, or "".
        key: The headline with numbers masked: equal for ranks that fail alike.
        exact: The headline as it is, but for the rank's own number.
        time: Wall-clock second of its first line, None when not known.
        place: Index of its first line.
        carrier: Its exception class proves no fault of the rank's own.
        told: It only says that the process was asked to end.
        thread: Raised in a thread: the process lives on.
        aside: A remark that holds beside the known error, or None.
        naming: The line that names other ranks, or "".
        ends: Addresses of both ends of the link that it is about, its own first, None for none.
    """

    kind: Kind
    role: Role
    sure: bool
    known: Known | None
    headline: str
    quotes: tuple[str, ...]
    reason: str
    key: str
    exact: str
    time: float | None
    place: int
    carrier: bool
    told: bool
    thread: bool
    aside: Known | None
    naming: str
    ends: tuple[str, str] | None

    @property
    def code(self) -> str:
        """The known error's code, or ""."""
        return self.known.code if self.known is not None else ""

    @property
    def vague(self) -> bool:
        """Whether its code says little by itself."""
        return self.known is not None and self.known.vague

    @property
    def link(self) -> bool:
        """Whether it is about a connection either end of which may be at fault."""
        return self.known is not None and self.known.link


_REASON = re.compile(
    r"(?:\breason|errorStr|error message|errMsg|原因)\s*[:=：]\s*(?!\(For )"
    r"(?:\[\s*(?P<inside>[^\]]{3,400})\]|(?P<open>.{3,400}?)(?:\[FUNC|\.\s|\.$|$|[;；。]\s?))",
    re.IGNORECASE,
)
_OPERATOR = re.compile(
    r"(?:fault kernel_name|kernel_name|op(?:erator)?[ _]?name|node[ _]name|opname)(?:\s+is\b)?\s*[:=]?\s*[\[\"']?([\w/.:-]{2,160})",
    re.IGNORECASE,
)
_INNER = re.compile(r"Inner Error\b[^:]{0,60}$", re.IGNORECASE)
_BOXED = re.compile(r"- [\w ]{0,40}Error Message:(?: \(For .{0,40}\))?\s*$")
_STEP = re.compile(
    r"\b(?:SeqNum|SequenceNumber|OpType|last enqueued NCCL work|last completed NCCL work)[=:] ?(\w+)"
)
_ADDRESS = r"((?:\d{1,3}\.){3}\d{1,3}|[\da-f]{1,4}(?::[\da-f]{0,4}){2,7})"
_ENDS = re.compile(
    rf"local\w{{0,6}}[ _]?ip\w{{0,8}}\W{{1,4}}{_ADDRESS}.{{0,120}}?remote\w{{0,6}}[ _]?ip\w{{0,8}}\W{{1,4}}{_ADDRESS}|"
    rf"local (?:information|end).{{0,120}}?device ip {_ADDRESS}.{{0,20}}?"
    rf"(?:peer|remote) (?:information|end).{{0,120}}?device ip {_ADDRESS}",
    re.IGNORECASE,
)
_OWN_RANK = re.compile(
    r"\b(?:rank|rankid|rank_id|local_rank|device|deviceid|pid|process)\b[\s:=\[#_]*\d+", re.IGNORECASE
)


def assess(block: Block, lines: Sequence[Line], rank: int) -> Finding:
    """Say what a block is about.

    Args:
        block: The block.
        lines: The output that it is a part of.
        rank: Whose output it is.
    """
    known, ends = best_known(block.texts), _ends(block.texts)
    if ends is not None and ends[0][0] == ends[0][1]:
        known = SAME_ENDS, ends[1]
    chosen = _chosen(block, known)
    whole = " ".join(text[:_SCANNED].strip() for text in block.said)[: 4 * _SCANNED]
    # That a rank names itself makes no sentence one about others.
    whole = re.sub(rf"\brank\W{{0,3}}{rank}\b", "", whole, flags=re.IGNORECASE)
    role, sure = _role(block, known[0] if known else None, whole)
    return Finding(
        kind=block.kind,
        role=role,
        sure=sure,
        known=known[0] if known else None,
        headline=chosen,
        quotes=_quotes(block, chosen),
        reason=_reason(block),
        key=mask(chosen),
        exact=_exact(chosen),
        time=next((line.time for line in lines[block.first : block.last + 1] if line.time is not None), None),
        place=block.first,
        carrier=is_carrier(block.said[-1]),
        told=is_about_being_told(" ".join(block.said[-2:])),
        thread=block.thread,
        aside=_aside(block),
        naming=_naming(block, rank),
        ends=ends[0] if ends is not None else None,
    )


def _ends(texts: Sequence[str]) -> tuple[tuple[str, str], str] | None:
    """Local and remote address of a link, and the line that gives them."""
    for text in texts[-200:]:
        if (found := _ENDS.search(text[:_SCANNED])) is not None:
            local, remote = (one for one in found.groups() if one is not None)
            return (local, remote), text
    return None


def _exact(headline: str) -> str:
    """The headline without the rank's own number; of a collective operation, which one it was."""
    step = _STEP.findall(headline)
    return " ".join(step) if step else _OWN_RANK.sub("", headline)


def _aside(block: Block) -> Known | None:
    return next((known for known, _ in fragments_in(block.texts) if known.aside), None)


def _naming(block: Block, rank: int) -> str:
    for text in block.texts[:200]:
        named, _ = ranks_named(text[:_SCANNED])
        if any(other != rank for other in named) or places_named(text):
            return text.strip()
    return ""


def _chosen(block: Block, found: tuple[Known, str] | None) -> str:
    """The line that says it: the last exception, unless only another one of the chain explains."""
    known_line = found[1] if found is not None else ""
    if block.kind is Kind.TRACEBACK and known_line in block.said[:-1]:
        return known_line.strip()
    if block.kind in (Kind.TRACEBACK, Kind.EXCEPTION, Kind.ABORT):
        hands_on = block.kind is Kind.ABORT or is_carrier(block.said[-1])
        # An unknown code has nothing but its own line to say what it means.
        tells = found is not None and (not found[0].vague or not found[0].source)
        if found is not None and tells and hands_on and known_line.strip() not in block.said:
            # What a layer below reported stands in the exception's text.
            return _around(known_line.strip(), found[0])
    if block.kind is Kind.TRACEBACK and len(block.said) > 1:
        if is_about_waiting(block.said[0]) or _is_bare(block.said[-1]):
            return block.said[0].strip()
    if block.kind is Kind.LOG and known_line:
        # A log line with what belongs to it: the telling one may stand below the first.
        assert found is not None
        return _around(known_line.strip(), found[0]) if found[0].code else known_line.strip()
    if block.kind is Kind.CODE and _INNER.search(block.said[0]):
        return next(
            (text.strip() for text in (known_line, *block.texts[1:]) if len(text) > 60), block.said[0]
        )
    return (block.said[-1] if block.kind is Kind.TRACEBACK else block.said[0]).strip()


def _around(text: str, known: Known) -> str:
    """The part of a long line that tells: its start may only repeat names."""
    lowered = text.lower()
    fragments = known.fragments or ((known.code.lower(),),)
    at = next((lowered.find(parts[0]) for parts in fragments if all(part in lowered for part in parts)), 0)
    return text if at < _TOLD_AFTER else "... " + text[at - _LEAD_IN :].partition(" ")[2]


def _is_bare(text: str) -> bool:
    return ":" not in text.rstrip(": ")


def _quotes(block: Block, chosen: str) -> tuple[str, ...]:
    said = [text.strip() for text in block.said]
    picked = [said[0], chosen, said[-1]] if block.kind is Kind.TRACEBACK else [chosen, *said[:2]]
    return tuple(dict.fromkeys(picked))


def best_known(texts: Sequence[str], *, warnings: bool = False) -> tuple[Known, str] | None:
    """Find the known error that explains these lines best, and the line that names it.

    One that is a cause goes before an effect, one that only wraps others last; of equals the first in
    the text is taken, for later ones follow from it. What stands in advice or as an example is none.

    Args:
        texts: Lines of one block.
        warnings: Believe a warning, too.
    """
    cut = [text[:_SCANNED] for text in texts]
    present = fragments_in(cut)
    found: list[tuple[tuple[bool, int, int, int], Known, str]] = []
    advised = False
    for index, text in enumerate(cut):
        if is_advice(text):
            advised = True
        elif not text.startswith("  "):
            advised = False
        if advised or (is_error_level(text) is False and index == 0 and not warnings):
            continue
        lowered = text.lower()
        for known in codes_in(text):
            if is_hedged(text, text.find(known.code)) and not text.lstrip().startswith(known.code):
                continue
            found.append(((known.vague, _weight(known), index, 0), known, text))
        for row, (known, parts) in enumerate(present):
            at = lowered.find(parts[0])
            if at < 0 or not all(part in lowered for part in parts):
                continue
            if known.aside or (not known.hedged and is_hedged(text, at)):
                continue
            found.append(((known.vague, _weight(known), index, row + 1), known, text))
    if not found:
        return None
    _, known, text = min(found, key=lambda one: one[0])
    return known, text


def _weight(known: Known) -> int:
    if known.overrides:
        return 0
    if known.vague and known.component == "torch_npu":
        # It says which library was called, a code beside it what that said.
        return 7
    if known.role is Role.PRIMARY:
        return 5 if known.mild else 2 if known.broad else 1
    if known.names:
        return 3
    return 4 if known.role is Role.UNKNOWN else 6


def _role(block: Block, known: Known | None, said: str) -> tuple[Role, bool]:
    about_others = is_about_waiting(said)
    if not about_others and is_carrier(block.said[-1].strip()) and is_in_collective(block.texts[-12:]):
        about_others = is_about_waiting(f"{said} in a collective")
    if known is not None:
        if known.mild:
            return (Role.SECONDARY, False) if about_others else (Role.PRIMARY, False)
        if known.role is Role.PRIMARY:
            return Role.PRIMARY, True
        if (known.vague and known.role is not Role.SECONDARY) or known.code == "EH9999":
            whole = (*block.texts[:40], *block.texts[40:][-40:])
            waits = about_others or is_about_waiting(" ".join(text[:300] for text in whole))
            if not waits and "sync" in said.lower() and "stream" in said.lower():
                waits = True
            if waits:
                return Role.SECONDARY, True
            own = block.kind in (Kind.TRACEBACK, Kind.EXCEPTION) and not is_carrier(block.said[-1])
            return (Role.PRIMARY, False) if own else (Role.UNKNOWN, False)
        return known.role, True
    if about_others:
        return Role.SECONDARY, False
    if block.kind is Kind.USAGE:
        return Role.PRIMARY, True
    if is_about_communication(block.said[-1].strip()):
        return Role.UNKNOWN, False
    return Role.PRIMARY, False


def _below(block: Block) -> str:
    """What stands below an exception that ends with a colon and so says nothing itself."""
    if block.kind is not Kind.TRACEBACK or not block.said[-1].rstrip().endswith(":"):
        return ""
    said = block.said[-1].strip()
    last = max(
        (index for index, text in enumerate(block.texts) if text.strip() == said), default=len(block.texts)
    )
    below = [text.strip() for text in block.texts[last + 1 : last + 4] if text.startswith(" ")]
    return " ".join(below)


def _reason(block: Block) -> str:
    told = [text[:_SCANNED] for text in (*block.texts[:120], *block.texts[120:][-60:]) if not is_advice(text)]
    reason = next(
        ((found["inside"] or found["open"]).strip(" .") for text in told if (found := _REASON.search(text))),
        "",
    )
    operator = next((found[1].rstrip(".") for text in told if (found := _OPERATOR.search(text))), "")
    if not reason:
        boxed = (index + 2 for index, text in enumerate(block.texts[:-2]) if _BOXED.match(text.lstrip()))
        reason = next((block.texts[index].strip() for index in boxed), "") or _below(block)
    parts = [reason, f"operator {operator}" if operator and operator not in reason else ""]
    return "; ".join(part for part in parts if part)
