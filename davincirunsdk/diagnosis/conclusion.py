"""From the ranks' accounts to a conclusion: who is to blame, how sure that is, and why."""

from __future__ import annotations

import math
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.evidence import End
from davincirunsdk.diagnosis.knowledge import Role, Words
from davincirunsdk.diagnosis.reasons import reason_in_chinese
from davincirunsdk.phrases import compact, ranks, some_of
from davincirunsdk.types import Verdict, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from davincirunsdk.diagnosis.account import Account
    from davincirunsdk.diagnosis.evidence import Evidence

_TOGETHER = 5.0
"""Seconds within which ranks that leave with one code are taken to leave by agreement."""
_AT_ONCE = 0.2
"""Seconds within which one hand kills all ranks of a job."""
_MOST_SUSPECTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the evidence comes to.

    Attributes:
        verdict: See `Verdict`.
        named: The accounts that the verdict names, surest first.
        why: How sure it is and why, one sentence.
        failed: Accounts of the ranks that ended badly by themselves, in the order in which they did.
    """

    verdict: Verdict
    named: tuple[Account, ...]
    why: Words
    failed: tuple[Account, ...]


def conclude(evidence: Evidence, accounts: Sequence[Account]) -> Conclusion:
    """Judge a job.

    Args:
        evidence: What is known about the job as a whole.
        accounts: One account per worker, auxiliary processes included.

    Returns:
        The conclusion. The same accounts give the same one, in whatever order they come.
    """
    ranks = sorted((one for one in accounts if one.rank >= 0), key=lambda one: one.rank)
    auxiliaries = [one for one in accounts if one.rank < 0]
    ordered = _by_time(evidence)
    failed = tuple(sorted((one for one in ranks if one.failed), key=ordered))
    found = (
        _told_from_above(evidence, ranks)
        or _stopped_from_outside(ranks, failed)
        or _auxiliary(auxiliaries, failed)
        or _node_lost(evidence, failed)
        or _own_fault(failed, ranks, ordered)
        or _alone(failed, ranks)
        or _others_fault(failed, ranks)
    )
    verdict, named, why = found
    return Conclusion(verdict=verdict, named=tuple(named), why=why, failed=failed)


_Found = tuple[Verdict, "Sequence[Account]", Words]


def _by_time(evidence: Evidence) -> Callable[[Account], tuple[int, float, int]]:
    """Order of failures: by time within a node, by the order of the news between nodes."""
    places = {node: place for place, node in enumerate(evidence.node_order)}

    def key(one: Account) -> tuple[int, float, int]:
        moment = one.time
        node = places.get(one.of.node_rank, len(places)) if evidence.nnodes > 1 and places else 0
        return node, math.inf if moment is None else moment, one.rank

    return key


def _told_from_above(evidence: Evidence, ranks: Sequence[Account]) -> _Found | None:
    """What the supervisor itself knows: limits, errors of our own, a stop that somebody asked for."""
    reason = evidence.reason
    in_chinese = reason_in_chinese(reason)
    if evidence.end is End.INTERNAL_ERROR:
        why = Words(
            en=f"An error of the launcher itself ended the job: {reason}",
            zh=f"启动器自身出错{'：' + in_chinese if in_chinese else ''}",
        )
        return Verdict.INTERNAL_ERROR, (), why
    if evidence.end is End.STOPPED:
        said_en = f": {reason}" if reason else ""
        why = Words(
            en=f"Sure: the job was stopped from outside{said_en}",
            zh=f"确定：作业被外部停止{'：' + in_chinese if in_chinese else ''}",
        )
        return Verdict.STOPPED, (), why
    if evidence.end in (End.TIME_LIMIT, End.STALLED):
        running = [one for one in ranks if one.running]
        by_rank = {one.rank: one for one in ranks}
        suspects = [by_rank[rank] for rank in evidence.odd if rank in by_rank]
        if not suspects:
            suspects = _look_at(running, [one for one in ranks if one.finding is not None], ranks)
        stalled = evidence.end is End.STALLED
        en = reason or ("no rank made progress" if stalled else "the time limit was reached")
        zh = in_chinese or ("没有 rank 有进展" if stalled else "达到时间限制")
        if suspects and any(one not in suspects for one in running):
            listed = _list(suspects)
            en, zh = f"{en}; {listed.en} may hold the others up", f"{zh}；可能由 {listed.zh} 引起"
        else:
            suspects = []
        return (Verdict.STALLED if stalled else Verdict.TIME_LIMIT), suspects, Words(en=en, zh=zh)
    if (
        not any(one.failed for one in ranks)
        and ranks
        and all(one.of.state is WorkerState.SUCCEEDED for one in ranks)
    ):
        return Verdict.SUCCEEDED, (), Words(en="all ranks ended well", zh="所有 rank 正常结束")
    return None


def _stopped_from_outside(ranks: Sequence[Account], failed: Sequence[Account]) -> _Found | None:
    """All ended by one signal that we did not send: that points outside the job."""
    outside = [one for one in ranks if one.ended_from_outside]
    if len(outside) < 2:
        return None
    numbers = {one.by_signal for one in outside}
    rest = [one for one in failed if not one.ended_from_outside]
    # Under a scheduler's stop some ranks get to say that they were told, or just leave.
    with_reason = [one for one in rest if one.finding is not None and not one.finding.told]
    first = min((one.of.ended or math.inf for one in outside), default=math.inf)
    if any((one.of.ended or math.inf) < first - 1.0 for one in rest):
        return None
    if with_reason or any(one.running and one.of.told is None for one in ranks):
        return None
    caught: list[Account] = []
    if signal.SIGKILL in numbers:
        # The kernel kills some for memory; whoever kills all is a scheduler, a limit or a user.
        touched = {one.rank for one in (*outside, *rest)}
        untouched = [one for one in ranks if one.rank not in touched]
        caught = [one for one in untouched if _stopped_at_once(one, first)]
        at_once = all((one.of.ended or math.inf) - first < _AT_ONCE for one in outside)
        if len(caught) > (len(outside) if at_once else 0):
            return None
        if any(one.of.state is not WorkerState.SUCCEEDED and one not in caught for one in untouched):
            return None
    names = "/".join(sorted(number.name for number in numbers if number is not None))
    if caught:
        listed = _list(outside)
        return (
            Verdict.STOPPED,
            (),
            Words(
                en=f"Likely: {names}, which this program did not send, ended {listed.en} in one moment, in which our own stop "
                "signal ended the others: a scheduler, a limit or a user stopped the job, or the kernel for memory",
                zh=f"很可能：{listed.zh} 在同一时刻被 {names} 结束，且不是本程序发送，其余在同一时刻被本程序停止："
                "由调度系统、限制、用户，或内核因内存不足停止",
            ),
        )
    count = len(outside)
    why = Words(
        en=f"Sure: {names}, which this program did not send, ended {count} of {len(ranks)} ranks alike: a scheduler, "
        "a limit or a user stopped the job",
        zh=f"确定：{len(ranks)} 个 rank 中有 {count} 个被 {names} 结束，且不是本程序发送：由调度系统、限制或用户停止",
    )
    return Verdict.STOPPED, (), why


def _stopped_at_once(one: Account, moment: float) -> bool:
    """Whether our signal ended it in the moment in which others were killed, so that its own fate is not known."""
    of = one.of
    return (
        of.state is WorkerState.STOPPED and of.told is not None and abs((of.ended or 0.0) - moment) < _AT_ONCE
    )


def _auxiliary(auxiliaries: Sequence[Account], failed: Sequence[Account]) -> _Found | None:
    broken = [one for one in auxiliaries if one.failed]
    if not broken or any(_is_own(one) and not _is_after(one, broken[0]) for one in failed):
        return None
    why = Words(
        en="Sure: MindSpore's scheduler ended while workers ran"
        + (" and they depend on it" if failed else ""),
        zh="确定：MindSpore 的 scheduler 在 worker 运行时退出",
    )
    return Verdict.AUXILIARY, broken[:1], why


def _is_after(one: Account, other: Account) -> bool:
    return one.time is not None and other.time is not None and one.time > other.time


def _node_lost(evidence: Evidence, failed: Sequence[Account]) -> _Found | None:
    if not evidence.lost or any(_is_own(one) for one in failed):
        return None
    lost, *later = evidence.lost
    if lost.node_rank < 0:
        return Verdict.NODE_LOST, (), Words(en=f"Sure: {lost.reason}", zh=f"确定：{lost.reason}")
    there = f" with {ranks(lost.ranks)}" if lost.ranks else ""
    en = f"Sure: node {lost.node_rank} ({lost.node}){there} was lost: {lost.reason}"
    there = f"，rank {compact(lost.ranks)}" if lost.ranks else ""
    zh = f"确定：节点 {lost.node_rank}（{lost.node}{there}）失联：{lost.reason}"
    if later:
        others = some_of([f"node {one.node_rank} ({one.node})" for one in later])
        en += f"; then {others}"
        zh += f"；随后失联：{others}"
    if len(evidence.lost) >= max(2, evidence.nnodes - 1):
        en += ". No other node is heard of: it may be the network of the one that hears them no more"
        zh += "。其他节点全部失联：也可能是本机自己的网络中断"
    return Verdict.NODE_LOST, (), Words(en=en, zh=zh)


def _is_own(one: Account) -> bool:
    """Whether it failed by its own doing, or at least by nobody else's as far as it says."""
    if one.role is Role.PRIMARY:
        return True
    return one.role is Role.UNKNOWN and one.finding is not None and not one.finding.link


def _is_silent(one: Account) -> bool:
    return one.finding is None and one.by_signal is None and not one.of.start_error


def _own_fault(
    failed: Sequence[Account], ranks: Sequence[Account], ordered: Callable[[Account], tuple[int, float, int]]
) -> _Found | None:
    own = [one for one in failed if _is_own(one)]
    if not own:
        return None
    sure = [one for one in own if one.role is Role.PRIMARY]
    lead = own[0]
    if lead.role is Role.UNKNOWN and sure:
        first = sure[0]
        known = first.finding is None or first.finding.sure
        if known or ordered(first) < ordered(lead):
            lead = first
    if _is_silent(lead):
        lead = _with_a_reason(lead, own) or lead
    if lead.finding is not None and lead.finding.told:
        lead = next((one for one in own if one.finding is None or not one.finding.told), lead)
    lead = _relayed(lead, own) or lead
    alike = [one for one in own if _are_alike(lead, one)]
    if len(alike) > 2 and _is_silent(lead) and (odd := _odd_last_line(alike)) is not None:
        return (
            Verdict.ROOT_CAUSE,
            [odd],
            Words(
                en=f"Likely: several ranks ended alike, and only the last words of rank {odd.rank} differ",
                zh=f"很可能：多个 rank 以相同方式结束，只有 rank {odd.rank} 的最后输出不同",
            ),
        )
    alike.sort(key=lambda one: (one is not lead, ordered(one)))
    if len(alike) > 1:
        first_words = _list(alike[:1])
        listed = _list(sorted(alike, key=lambda one: one.rank))
        if lead.by_signal is not None and lead.ended_from_outside:
            name = lead.by_signal.name
            why = Words(
                en=f"Sure: {listed.en} were ended by {name}, which this program did not send, {first_words.en} first",
                zh=f"确定：{listed.zh} 被 {name} 结束，该信号不是本程序发送，{first_words.zh} 最先",
            )
            return Verdict.FAILED_ALIKE, alike, why
        why = Words(
            en=f"Sure: {listed.en} failed alike by themselves, {first_words.en} first",
            zh=f"确定：{listed.zh} 以相同方式自行失败，{first_words.zh} 最先",
        )
        return Verdict.FAILED_ALIKE, alike, why
    return Verdict.ROOT_CAUSE, [lead], _why_root(lead, failed, ranks, ordered)


def _with_a_reason(lead: Account, own: Sequence[Account]) -> Account | None:
    """Ranks that leave together with one code follow the one that had a reason."""
    code = lead.of.exit_code
    leaving = [one for one in own if _is_silent(one) and one.of.exit_code == code]
    reasons = [one for one in own if one.finding is not None and not one.finding.told]
    if len(leaving) < 2 or not reasons:
        return None
    first = reasons[0]
    if lead.time is None or first.time is None or abs(first.time - lead.time) <= _TOGETHER:
        return first
    return None


def _relayed(lead: Account, own: Sequence[Account]) -> Account | None:
    """The rank whose error the lead only passes on: it is named, and its words are quoted."""
    if lead.finding is None:
        return None
    named = {rank for rank, weight in lead.named if weight >= 1}
    for one in own:
        if (
            one.rank in named
            and one.finding is not None
            and one.finding.headline[:200] in lead.finding.headline
        ):
            return one
    return None


def _odd_last_line(alike: Sequence[Account]) -> Account | None:
    """Of ranks that left alike without an error, the one with other last words than the rest."""
    counted = Counter(one.last_key for one in alike)
    usual, count = counted.most_common(1)[0]
    odd = [one for one in alike if one.last_key != usual]
    return odd[0] if len(odd) == 1 and count == len(alike) - 1 else None


def _are_alike(one: Account, other: Account) -> bool:
    if one is other:
        return True
    if one.by_signal is not other.by_signal:
        return False
    if one.ended_from_outside and abs((one.of.ended or 0.0) - (other.of.ended or 0.0)) < _AT_ONCE:
        return True
    if one.finding is None or other.finding is None:
        return (
            one.finding is other.finding
            and one.of.exit_code == other.of.exit_code
            and not one.of.start_error
            and one.of.told is None
            and other.of.told is None
        )
    if one.finding.key == other.finding.key:
        return True
    # The text of one error may name other files, tensors or operations on each rank.
    if one.finding.known is not None and one.finding.known is other.finding.known and not one.finding.vague:
        return True
    return bool(one.finding.code) and one.finding.code == other.finding.code and not one.finding.vague


def _why_root(
    lead: Account,
    failed: Sequence[Account],
    ranks: Sequence[Account],
    ordered: Callable[[Account], tuple[int, float, int]],
) -> Words:
    others = [one for one in failed if one is not lead]
    victims = [one for one in others if not _is_own(one)]
    before = [one for one in others if ordered(one) < ordered(lead)]
    ended_before = [one for one in others if (one.of.ended or math.inf) < (lead.of.ended or math.inf)]
    who = f"rank {lead.rank}"
    if lead.of.start_error:
        return Words(en=f"Sure: {who} could not be started", zh=f"确定：{who} 无法启动")
    if lead.by_signal is not None and lead.ended_from_outside:
        name = lead.by_signal.name
        return Words(
            en=f"Sure: {who} was ended by {name}, which this program did not send; whoever sent it is outside the job",
            zh=f"确定：{who} 被 {name} 结束，该信号不是本程序发送；发送者在作业之外",
        )
    if victims and (before or ended_before):
        seen = victims[0]
        said = seen.finding.code or seen.finding.headline[:60] if seen.finding is not None else ""
        return Words(
            en=f"Likely: rank {seen.rank} ended or complained earlier, but {said!r} says that it waited for another rank, "
            f"while {who} has a fault of its own",
            zh=f"很可能：rank {seen.rank} 更早结束或报错，但 {said!r} 表明它在等待其他 rank，而 {who} 有自身的错误",
        )
    if lead.role is Role.UNKNOWN:
        return Words(
            en=f"Likely: {who} failed first, and no other rank has a better explanation",
            zh=f"很可能：{who} 最先失败，其他 rank 没有更好的解释",
        )
    if _is_silent(lead):
        return Words(
            en=f"Likely: {who} ended first by itself, without a word about why",
            zh=f"很可能：{who} 最先自行结束，但没有说明原因",
        )
    if lead.of.state is not WorkerState.FAILED:
        return Words(
            en=f"Sure: {who} had raised its error before any rank was stopped, and was on its way out",
            zh=f"确定：{who} 在任何 rank 被停止之前已经报错，正在退出",
        )
    if not others:
        return Words(
            en=f"Sure: {who} is the only rank that failed by itself"
            + ("" if len(ranks) == 1 else ", before any other was stopped"),
            zh=f"确定：只有 {who} 自行失败",
        )
    if victims and len(victims) == len(others):
        return Words(
            en=f"Sure: {who} failed first with a fault of its own; the others that failed were waiting for a rank",
            zh=f"确定：{who} 因自身错误最先失败，其他失败的 rank 在等待别的 rank",
        )
    return Words(
        en=f"Likely: {who} failed first; others failed later with other errors",
        zh=f"很可能：{who} 最先失败，其他 rank 之后因别的错误失败",
    )


def _alone(failed: Sequence[Account], ranks: Sequence[Account]) -> _Found | None:
    """The only rank of a job waits for nobody of it, whatever it says."""
    if len(ranks) > 1 or not failed:
        return None
    why = Words(
        en=f"Likely: rank {failed[0].rank} is the only rank: what it waited for is outside the job",
        zh=f"很可能：rank {failed[0].rank} 是唯一的 rank：它等待的对象在作业之外",
    )
    return Verdict.ROOT_CAUSE, failed[:1], why


def _others_fault(failed: Sequence[Account], ranks: Sequence[Account]) -> _Found:
    """Whoever failed was waiting for somebody: who is it?"""
    if not failed:
        return _nobody_failed(ranks)
    by_rank = {one.rank: one for one in ranks}
    votes = _votes(ranks, by_rank)
    link = _link(failed, by_rank)
    if link is not None and _only_ends_say_so(link[1], ranks, votes):
        return link
    return (
        _named_by_others(failed, ranks, votes)
        or link
        or _not_like_the_others(failed, ranks)
        or _last_one_waiting(failed, ranks)
        or _out_of_step(failed)
        or _nothing_tells(failed, ranks)
    )


def _named_by_others(
    failed: Sequence[Account], ranks: Sequence[Account], votes: Counter[int]
) -> _Found | None:
    by_rank = {one.rank: one for one in ranks}
    named = [by_rank[rank] for rank, _ in votes.most_common() if not _is_victim(by_rank[rank])]
    if not named:
        return None
    best = votes[named[0].rank]
    named = [one for one in named if votes[one.rank] * 2 >= best][:_MOST_SUSPECTS]
    sayers = sum(1 for one in ranks if any(other == named[0].rank for other, _ in one.named))
    listed = _list(named)
    how = _state_of(named[0], failed)
    said = (
        f"{sayers} rank{'s' * (sayers != 1)} that waited in vain name{'s' * (sayers == 1)} {_list(named[:1]).en}"
        if sayers
        else f"HCCL's own finding names {_list(named[:1]).en}"
    )
    words = Words(en=f"Likely: {said}; {how.en}", zh=f"很可能：等待超时的 rank 指向 {listed.zh}；{how.zh}")
    return Verdict.SUSPECTS, named, words


def _not_like_the_others(failed: Sequence[Account], ranks: Sequence[Account]) -> _Found | None:
    running = [one for one in ranks if not one.failed]
    suspects = _look_at(running, failed, ranks)
    if not suspects:
        return None
    listed = _list(suspects)
    if len(suspects) > 1:
        words = Words(
            en=f"Not sure: every rank that failed was waiting; {listed.en} did not say so",
            zh=f"不确定：失败的 rank 都在等待；{listed.zh} 没有这样的错误",
        )
        return Verdict.SUSPECTS, suspects, words
    (one,) = suspects
    how = _state_of(one, failed)
    only = all(other is one or other.failed for other in ranks)
    en = "the only rank without such an error" if only else "differs from all others"
    zh = "是唯一没有该错误的 rank" if only else "与其他 rank 不同"
    words = Words(
        en=f"Likely: {listed.en} {'is ' if only else ''}{en}; {how.en}",
        zh=f"很可能：{listed.zh} {zh}；{how.zh}",
    )
    return Verdict.SUSPECTS, suspects, words


def _last_one_waiting(failed: Sequence[Account], ranks: Sequence[Account]) -> _Found | None:
    if len(failed) != 1 or len(ranks) < 2:
        return None
    alone = failed[0]
    if not all(one.of.state is WorkerState.SUCCEEDED for one in ranks if one is not alone):
        return None
    words = Words(
        en=f"Likely: all others had ended well when rank {alone.rank} waited for them alone: it ran more steps, or "
        "they ran fewer",
        zh=f"很可能：其他 rank 都已正常结束，只有 rank {alone.rank} 在等待它们：它的步数更多，或它们的更少",
    )
    return Verdict.SUSPECTS, [alone], words


def _out_of_step(failed: Sequence[Account]) -> _Found | None:
    odd = _odd_ones(failed)
    if not odd:
        return None
    listed = _list(odd)
    was = "was" if len(odd) == 1 else "were"
    words = Words(
        en=f"Likely: all ranks waited in vain, and only {listed.en} {was} at another operation or step: out of step",
        zh=f"很可能：所有 rank 都等待超时，只有 {listed.zh} 处于不同的操作或步数",
    )
    return Verdict.SUSPECTS, odd, words


def _nothing_tells(failed: Sequence[Account], ranks: Sequence[Account]) -> _Found:
    everybody = len(failed) == len(ranks)
    words = Words(
        en=f"Not sure: rank {failed[0].rank} failed first, but it says that it waited for another rank, and "
        + (
            "all ranks say the same: look at the network, the slowest rank, or different data"
            if everybody
            else "nothing tells which one"
        ),
        zh=f"不确定：rank {failed[0].rank} 最先失败，但它在等待其他 rank，"
        + ("且所有 rank 都如此：检查网络、最慢的 rank 或数据差异" if everybody else "没有迹象表明是哪一个"),
    )
    return Verdict.UNCLEAR, (), words


def _nobody_failed(ranks: Sequence[Account]) -> _Found:
    alive = [one for one in ranks if one.of.ended is None and one.of.state is not WorkerState.SUCCEEDED]
    well = [one for one in ranks if one.of.state is WorkerState.SUCCEEDED]
    if len(alive) == 1 and len(well) == len(ranks) - 1 and well:
        one = alive[0]
        return (
            Verdict.SUSPECTS,
            alive,
            Words(
                en=f"Likely: all others ended well, and rank {one.rank} never ends",
                zh=f"很可能：其他 rank 都正常结束，只有 rank {one.rank} 没有结束",
            ),
        )
    # Where nobody saw an end, lines that came after an error do not prove that the rank survived it.
    broken = [
        one
        for one in ranks
        if one.of.state is WorkerState.RUNNING and one.of.ended is not None and one.of.told is None
        if one.passing is not None and one.passing.role is not Role.SECONDARY and not one.passing.told
    ]
    if broken:
        listed = _list(broken)
        return (
            Verdict.SUSPECTS,
            broken[:_MOST_SUSPECTS],
            Words(
                en=f"Not sure: {listed.en} wrote an error, and its log went on after it; how it ended is not known",
                zh=f"不确定：{listed.zh} 写出了错误，之后日志仍有输出；如何结束未知",
            ),
        )
    return (
        Verdict.UNCLEAR,
        (),
        Words(en="Not sure: no rank failed by itself", zh="不确定：没有 rank 自行失败"),
    )


def _is_victim(one: Account) -> bool:
    return one.finding is not None and one.finding.role is not Role.PRIMARY and not one.finding.told


def _votes(ranks: Sequence[Account], by_rank: dict[int, Account]) -> Counter[int]:
    votes: Counter[int] = Counter()
    by_place = {(one.of.address or one.of.node, str(one.of.device_id)): one.rank for one in ranks}
    for one in ranks:
        for other, weight in one.named:
            if other in by_rank:
                votes[other] += max(1, round(4 * weight))
        for address, device in one.places:
            rank = by_place.get((address, device))
            if rank is None:
                same = [other.rank for other in ranks if str(other.of.device_id) == device]
                rank = same[0] if len(same) == 1 else None
            if rank is not None and rank != one.rank:
                votes[rank] += 12
    return votes


def _only_ends_say_so(ends: Sequence[Account], ranks: Sequence[Account], votes: Counter[int]) -> bool:
    """Whether nobody but the end that reports a broken link points at the other one."""
    first = ends[0]
    if first.finding is None or not first.finding.link:
        return False
    own = {one.rank for one in ends}
    others = [one for one in ranks if one.rank not in own]
    return not any(rank == ends[1].rank and weight >= 1 for one in others for rank, weight in one.named) and (
        votes[ends[1].rank] >= max(votes.values(), default=0)
    )


def _link(failed: Sequence[Account], by_rank: dict[int, Account]) -> _Found | None:
    """A connection that failed between two ranks neither of which has a fault of its own."""
    for one in failed:
        others = [other for other in failed if _is_other_end(one, other)]
        others += [by_rank[rank] for rank, weight in one.named if rank in by_rank and weight >= 1]
        if not others:
            continue
        other = others[0]
        circle = any(rank == one.rank for rank, _ in other.named)
        linked = one.finding is not None and one.finding.link
        if linked or (circle and len(failed) <= max(2, len(by_rank) // 2)):
            why = Words(
                en=f"Likely: the connection between rank {one.rank} and rank {other.rank} failed; which end, "
                "or the network between them, their words do not tell",
                zh=f"很可能：rank {one.rank} 与 rank {other.rank} 之间的连接失败；是哪一端还是网络，从日志无法判断",
            )
            return Verdict.LINK, [one, other], why
    return None


def _is_other_end(one: Account, other: Account) -> bool:
    """Whether both speak of one link, each from its end."""
    ends = one.finding.ends if one.finding is not None else None
    return ends is not None and other.finding is not None and other.finding.ends == (ends[1], ends[0])


def _look_at(
    candidates: Sequence[Account], failed: Sequence[Account], ranks: Sequence[Account]
) -> list[Account]:
    """Choose whom to look at among ranks without an error of waiting."""
    free = [one for one in candidates if not _is_victim(one)]
    if not free:
        return []
    if len(free) == 1 and len(ranks) > 1:
        return list(free)
    alive = [one for one in free if one.of.state is not WorkerState.SUCCEEDED]
    if alive and len(alive) == 1 and len(free) < len(ranks):
        return alive
    telling = [one for one in free if one.late is not None or one.passing is not None]
    told_off = [one for one in telling if (one.late or one.passing) is not None and _is_cause(one)]
    if told_off and len(told_off) < len(free):
        return told_off[:_MOST_SUSPECTS]
    keys = Counter(one.last_key for one in free)
    usual, count = keys.most_common(1)[0]
    odd = [one for one in free if one.last_key != usual]
    if count > len(free) / 2 and odd and len(odd) <= max(1, len(free) // 4):
        return odd[:_MOST_SUSPECTS]
    lines = Counter(one.last_line for one in free)
    exact, count = lines.most_common(1)[0]
    different = [one for one in free if one.last_line != exact]
    if count > len(free) / 2 and len(free) > 2 and len(different) == 1:
        return different
    if failed and len(free) <= max(1, len(ranks) // 2):
        return sorted(free, key=lambda one: one.of.last_output or 0.0)[:_MOST_SUSPECTS]
    return []


def _is_cause(one: Account) -> bool:
    finding = one.late or one.passing
    return finding is not None and finding.role is Role.PRIMARY


def _odd_ones(failed: Sequence[Account]) -> list[Account]:
    """The few ranks whose error is of another kind than all others', or about another operation or step."""
    keys: tuple[Callable[[Account], str], ...] = (
        lambda one: one.finding.key if one.finding is not None else "",
        lambda one: one.finding.exact if one.finding is not None else "",
    )
    for key in keys:
        counted = Counter(key(one) for one in failed)
        usual, count = counted.most_common(1)[0]
        odd = [one for one in failed if key(one) != usual]
        if odd and len(odd) <= max(1, len(failed) // 4) and count == len(failed) - len(odd) >= 2:
            return odd
    return []


def _state_of(one: Account, failed: Sequence[Account]) -> Words:
    if one.of.state is WorkerState.SUCCEEDED:
        first = min((other.time for other in failed if other.time is not None), default=None)
        if first is not None and one.of.ended is not None and one.of.ended > first:
            return Words(
                en="it still worked when the others gave up, and ended well later",
                zh="其他 rank 放弃时它仍在工作，之后正常结束",
            )
        return Words(en="it had ended well before: it ran fewer steps?", zh="它已提前正常结束：步数更少？")
    if one.of.ended is None or one.of.told is not None:
        return Words(en="it was still running, without an error of its own", zh="它仍在运行，没有自身错误")
    return Words(en="it says nothing of waiting", zh="它没有等待类错误")


def _list(accounts: Iterable[Account]) -> Words:
    numbers = sorted(one.rank for one in accounts)
    listed = compact(numbers)
    return Words(en=f"rank{'s' * (len(numbers) != 1)} {listed}", zh=f"rank {listed}")
