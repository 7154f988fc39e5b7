"""One rank's account: what its exit and its output say, small enough to be sent to another node."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.blocks import Block, Kind, find_blocks, is_error_level, spoken_words
from davincirunsdk.diagnosis.evidence import RankEvidence  # noqa: TC001 # the parcel reads this annotation
from davincirunsdk.diagnosis.exits import signal_behind
from davincirunsdk.diagnosis.findings import Finding, assess, best_known
from davincirunsdk.diagnosis.knowledge import Role, fragments_in
from davincirunsdk.diagnosis.lines import Line, cut_lines, mask
from davincirunsdk.diagnosis.speech import places_named, ranks_named
from davincirunsdk.types import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEPT_LINES = 28
_LAST_LINES = 12
_TAIL_LINES = 60
_ASSESSED = 16
"""Errors at each end of a flood of them that are looked at closely."""
_LOOKED_BACK = 60
"""Lines before an error in which a warning may explain it."""
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL,
                           signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is known of one rank after its output was read.

    Attributes:
        of: Who it is and how it ended; its output is left out.
        finding: The error that explains its end best, None when it says nothing of one.
        passing: An error after which it went on working, or that a thread of it raised.
        late: An error that it wrote after it had been asked to end.
        named: Ranks that its errors name, each with how much that weighs.
        places: Address and device that HCCL's finding in it names.
        last_line: Its last line.
        last_key: The same, masked.
        excerpt: Lines of its output that tell most.
        tail: Its last lines.
        earlier: Its first line at error level, where the finding itself says little.
        earlier_time: When that was.
        by_signal: The signal that ended it and that we did not send, also behind 128 + n.
        ending: Its last words are those of a program that ends, whatever is known of its exit.
    """

    of: RankEvidence
    finding: Finding | None
    passing: Finding | None
    late: Finding | None
    named: tuple[tuple[int, float], ...]
    places: tuple[tuple[str, str], ...]
    last_line: str
    last_key: str
    excerpt: tuple[str, ...]
    tail: tuple[str, ...]
    earlier: str
    earlier_time: float | None
    by_signal: signal.Signals | None
    ending: bool

    @property
    def rank(self) -> int:
        """Place in the job."""
        return self.of.rank

    @property
    def crashed(self) -> bool:
        """Whether a signal ended it that says the program itself is broken, such as SIGSEGV."""
        return self.by_signal is not None and self.by_signal not in _STOP_SIGNALS

    @property
    def ended_from_outside(self) -> bool:
        """Whether a signal ended it that somebody sent, such as SIGKILL, and it was not us."""
        return self.by_signal in _STOP_SIGNALS

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself, or was about to when we asked it to end."""
        of = self.of
        if of.start_error or of.state is WorkerState.FAILED:
            return True
        if of.state is WorkerState.SUCCEEDED:
            return False
        if self.by_signal is not None:
            return True
        if self.finding is None:
            return False
        if of.told is None and of.ended is None:
            # It has raised and still lives: in teardown, or dumping core.
            return (
                self.finding.role is Role.PRIMARY
                and self.finding.kind in (Kind.TRACEBACK, Kind.CODE, Kind.ABORT)
                and not self.finding.thread
            )
        # A library may log an error of waiting and wait on: that is no end.
        known_cause = self.finding.role is Role.PRIMARY and self.finding.sure
        ends = self.ending or self.finding.kind not in (Kind.LOG, Kind.WORDS)
        return (of.exit_code or 0) > 0 or known_cause or ends

    @property
    def running(self) -> bool:
        """Whether it still ran when the job was stopped, and had not failed."""
        return not self.failed and self.of.state is not WorkerState.SUCCEEDED

    @property
    def time(self) -> float | None:
        """When it failed: its first error line, or else its end."""
        if self.finding is not None and self.finding.time is not None and not self._died_later:
            return self.finding.time
        return self.of.ended

    @property
    def _died_later(self) -> bool:
        """A signal's victim failed when it died, whatever it had complained about before."""
        return (
            self.by_signal is not None
            and self.finding is not None
            and self.finding.role is not Role.PRIMARY
            and self.by_signal is not signal.SIGABRT
        )

    @property
    def role(self) -> Role:
        """Whose fault its end is, by its exit and its own words."""
        if self.of.start_error:
            return Role.PRIMARY
        if self.by_signal is not None and self.by_signal is not signal.SIGABRT:
            return Role.PRIMARY
        return self.finding.role if self.finding is not None else Role.PRIMARY


def read_rank(evidence: RankEvidence) -> Account:
    """Read one rank's output.

    Args:
        evidence: What is known of it.

    Returns:
        Its account, in which the output itself is left out.
    """
    lines = cut_lines(evidence.output, evidence.times)
    if not evidence.times:
        lines = [_believed(line, evidence) for line in lines]
    if evidence.raised is not None:
        lines += _recorded(evidence)
    blocks = find_blocks(lines)
    written_late = [block for block in blocks if _is_late(lines[block.first], evidence)]
    at_end, resumed = _split(lines, [block for block in blocks if not _is_late(lines[block.first], evidence)])

    def assess_some(some: list[Block]) -> list[tuple[Block, Finding]]:
        return [(block, assess(block, lines, evidence.rank)) for block in _ends(some)]

    final, passed, late = assess_some(at_end), assess_some(resumed), assess_some(written_late)
    assessed = [*passed, *final, *late]
    own_end = evidence.state is WorkerState.FAILED
    if own_end and not any(not one.told for _, one in final):
        final, passed = ([*passed, *final] or late), []
    chosen = _choose(final)
    if chosen is None and own_end and (words := spoken_words(lines)) is not None:
        chosen = words, assess(words, lines, evidence.rank)
    finding = _completed(chosen, assessed, lines) if chosen is not None else None
    named, places = _named(assessed, evidence.rank)
    last = lines[-1].text.strip() if lines else ""
    earlier = _earlier(lines, chosen[0] if chosen is not None else None, finding)
    return Account(
        of=replace(evidence, output=b"", times=(), raised=None),
        finding=finding,
        passing=_last(passed),
        late=_last(
            [pair for pair in late if (chosen is None or pair[1] is not chosen[1]) and not pair[1].told]
        ),
        named=named,
        places=places,
        last_line=last[:400],
        last_key=mask(last[:400]),
        excerpt=_excerpt(lines, chosen[0] if chosen is not None else None),
        tail=tuple(line.text[:2000] for line in lines[-_TAIL_LINES:]),
        earlier=earlier.text.strip()[:600] if earlier is not None else "",
        earlier_time=earlier.time if earlier is not None else None,
        by_signal=_foreign_signal(evidence),
        ending=any(block.kind in (Kind.ABORT, Kind.TRACEBACK) and not block.thread for block in at_end),
    )


def _completed(
    chosen: tuple[Block, Finding], assessed: list[tuple[Block, Finding]], lines: Sequence[Line]
) -> Finding:
    """Add to a finding what stands outside its own block: remarks, names, a warning that explains it."""
    block, finding = chosen
    if not finding.naming:
        finding = replace(finding, naming=next((one.naming for _, one in assessed if one.naming), ""))
    if not finding.reason and finding.role is Role.PRIMARY:
        # An operator's name may stand in the exception, the code before it.
        told = (one.reason for _, one in assessed if one.reason and one.role is not Role.SECONDARY)
        finding = replace(finding, reason=next(told, ""))
    if finding.aside is None:
        after = [line.text for line in lines[max(0, block.first - 10) : block.last + 30]]
        finding = replace(
            finding, aside=next((known for known, _ in fragments_in(after) if known.aside), None)
        )
    if finding.known is None and finding.carrier and finding.role is not Role.SECONDARY:
        # What a warning shortly before says may be all that explains an exception that says nothing.
        for line in lines[max(0, block.first - _LOOKED_BACK) : block.first]:
            if _is_warning(line.text) and (found := best_known([line.text], warnings=True)) is not None:
                if found[0].role is Role.PRIMARY and not found[0].mild:
                    return replace(finding, known=found[0], quotes=(*finding.quotes, line.text.strip()))
    return finding


def _earlier(lines: Sequence[Line], block: Block | None, finding: Finding | None) -> Line | None:
    """The line that says more than the finding: its first sign, or the first line at error level."""
    if finding is None or finding.vague:
        return next((line for line in lines if is_error_level(line.text)), None)
    known = finding.known
    if block is None or known is None or known.code:
        return None
    for line in lines[max(0, block.first - _LOOKED_BACK) : block.first]:
        if _is_warning(line.text) and (found := best_known([line.text], warnings=True)) is not None:
            if found[0] is known:
                return line
    return None


def _is_warning(text: str) -> bool:
    return is_error_level(text) is False and re.search(r"WARN|\[?W\d", text[:200]) is not None


def _recorded(evidence: RankEvidence) -> list[Line]:
    """The exception that the script recorded itself, as lines after its output."""
    raised = evidence.raised
    assert raised is not None
    text = raised.traceback or raised.message
    last = text.strip().rpartition("\n")[2].encode(errors="replace")
    if last and last in evidence.output:
        # It has printed the same: nothing is to be added.
        return []
    lines = cut_lines(text.encode(errors="replace"))
    moment = raised.time
    if moment is not None and moment.is_integer():
        # torch writes whole seconds, so the truth is up to one later.
        moment = min(moment + 1.0, evidence.ended or moment + 1.0)
    return [replace(line, time=moment) for line in lines]


def _believed(line: Line, evidence: RankEvidence) -> Line:
    """A line without the time that it gives itself, if that is not within the life of its process."""
    if line.time is None:
        return line
    early = evidence.started is not None and line.time < evidence.started - 1
    after = evidence.ended is not None and line.time > evidence.ended + 1
    return replace(line, time=None) if early or after else line


def _is_late(line: Line, evidence: RankEvidence) -> bool:
    """Whether it was written after we had asked the process to end."""
    return evidence.told is not None and line.time is not None and line.time > evidence.told


def _ends(blocks: list[Block]) -> list[Block]:
    """The first and the last blocks of a flood of errors: the rest repeats them."""
    return blocks if len(blocks) <= 2 * _ASSESSED else [*blocks[:_ASSESSED], *blocks[-_ASSESSED:]]


def _split(lines: Sequence[Line], found: list[Block]) -> tuple[list[Block], list[Block]]:
    """Split errors into those of the end and those after which ordinary work went on.

    Work went on when a line of a shape that was usual before the error comes after it again.
    """
    if not found:
        return [], []
    inside = {index for block in found for index in range(block.first, block.last + 1)}
    first = found[0].first
    usual = Counter(
        mask(line.text) for index, line in enumerate(lines) if index < first and index not in inside
    )
    resumed = -1
    for index in range(first, len(lines)):
        if index in inside:
            continue
        key = mask(lines[index].text)
        if key and usual[key] > 0 and any(c.isalpha() for c in key):
            resumed = index
        usual[key] += 1
    # What is usual between two errors may have begun after the first one.
    final = [block for block in found if block.first > resumed]
    return final, [block for block in found if block.first <= resumed]


def _choose(found: list[tuple[Block, Finding]]) -> tuple[Block, Finding] | None:
    """Choose the error that explains the end: a known cause, else the first one."""
    pairs = [pair for pair in found if not pair[1].told] or found
    if not pairs:
        return None
    own = next((pair for pair in pairs if _is_own_exception(pair[1])), None)
    sure = next(
        (
            pair
            for pair in pairs
            if pair[1].role is Role.PRIMARY and pair[1].sure and (own is None or pair[1].kind is not Kind.LOG)
        ),
        None,
    )
    first_effect = next((pair for pair in pairs if pair[1].role is Role.SECONDARY), None)
    if sure is not None:
        return sure if own is None or sure[1].place <= own[1].place or first_effect is not None else own
    if own is not None and (first_effect is None or own[1].place < first_effect[1].place):
        return own
    if first_effect is not None:
        link = next((pair for pair in pairs if pair[1].link), None)
        told = next((pair for pair in pairs if _tells_more(pair[1])), None)
        block, finding = link or told or first_effect
        # What it waited for it may say later, but it began to fail with the first sign.
        return block, replace(finding, time=first_effect[1].time or finding.time)
    strong = [pair for pair in pairs if pair[1].kind is not Kind.LOG] or pairs
    telling = [pair for pair in (*strong, *pairs) if pair[1].known is not None and not pair[1].vague]
    return (telling or [pair for pair in strong if not pair[1].vague] or strong)[0]


def _is_own_exception(finding: Finding) -> bool:
    return (
        finding.kind in (Kind.TRACEBACK, Kind.EXCEPTION)
        and finding.role is Role.PRIMARY
        and not finding.carrier
        and not finding.thread
    )


def _tells_more(finding: Finding) -> bool:
    return finding.role is Role.SECONDARY and finding.sure and not finding.vague


def _last(pairs: list[tuple[Block, Finding]]) -> Finding | None:
    findings = [one for _, one in pairs if not one.told and one.kind is not Kind.LOG]
    return findings[-1] if findings else None


def _named(
    found: list[tuple[Block, Finding]], rank: int
) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[str, str], ...]]:
    weights: Counter[int] = Counter()
    places: dict[tuple[str, str], None] = {}
    for block, finding in found:
        if finding.role is Role.PRIMARY and finding.sure:
            continue
        text = " \n ".join(text[:2000] for text in block.texts[:200])
        findings, relays = ranks_named(text)
        for other in dict.fromkeys(findings):
            weights[other] += 4
        for other in dict.fromkeys(relays):
            weights[other] += 1
        places |= dict.fromkeys(places_named(text))
    weights.pop(rank, None)
    return tuple((other, weight / 4) for other, weight in weights.most_common(64)), tuple(places)


def _excerpt(lines: Sequence[Line], block: Block | None) -> tuple[str, ...]:
    texts = _without_ours([line.text for line in lines])
    if block is None or block.kind is Kind.WORDS:
        return tuple(texts[-_LAST_LINES - 8 :])
    cut = _without_ours(block.texts)
    after = _without_ours([line.text for line in lines[block.last + 1 : block.last + 1 + _LAST_LINES]])
    if len(cut) > _KEPT_LINES - 6:
        said = set(block.said)
        ends = [index for index, text in enumerate(cut) if text.strip() in said or text in said]
        head = cut[: 3 if block.kind is not Kind.TRACEBACK else 1]
        keep = _KEPT_LINES - 8
        last = (ends[-1] if ends and block.kind is Kind.TRACEBACK else len(cut) - 1) + 1
        tail = cut[max(len(head), last - keep + len(head)) : last]
        firsts = [cut[index] for index in ends[:1] if index < last - len(tail)]
        left = len(cut) - len(head) - len(tail) - len(firsts)
        cut = [*head, *firsts, *([f"... {left} more lines in the log ..."] if left > 0 else []), *tail]
    room = max(4, _KEPT_LINES - len(cut))
    before = [line.text for line in lines[max(0, block.first - 2) : block.first]]
    return (*before, *cut, *after[: min(room, _LAST_LINES)])


def _without_ours(texts: Sequence[str]) -> list[str]:
    """Leave out frames of this package, which `record` puts into a script's traceback."""
    kept: list[str] = []
    skipping = False
    for text in texts:
        bare = text.lstrip()
        if bare.startswith('File "'):
            skipping = "/davincirunsdk/" in bare
            depth = len(text) - len(bare)
        elif skipping and len(text) - len(bare) <= depth:
            skipping = False
        if not skipping:
            kept.append(text)
    return kept


def _foreign_signal(evidence: RankEvidence) -> signal.Signals | None:
    """The signal that ended it, unless we sent it."""
    number = signal_behind(evidence.exit_code)
    if number is None:
        return None
    if evidence.told is not None:
        if evidence.state is WorkerState.KILLED and number is signal.SIGKILL:
            return None
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return None
        if number is not signal.SIGKILL:
            # A crash on the way out after our SIGTERM.
            return None
    return number
