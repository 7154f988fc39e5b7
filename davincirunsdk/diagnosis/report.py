"""The failure report: the text that a person reads when a job has failed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from davincirunsdk.columns import width
from davincirunsdk.diagnosis.blocks import Kind
from davincirunsdk.diagnosis.exits import explain_exit, name_exit
from davincirunsdk.diagnosis.knowledge import Role
from davincirunsdk.diagnosis.layout import (
    WIDTH,
    common_indent,
    decisive,
    duration,
    field,
    label,
    shorten,
    stamp,
    wrap,
)
from davincirunsdk.phrases import compact
from davincirunsdk.types import Verdict, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from davincirunsdk.diagnosis.account import Account
    from davincirunsdk.diagnosis.conclusion import Conclusion
    from davincirunsdk.diagnosis.evidence import Evidence

_MOST_LINES = 39
_FEWEST_QUOTED = 5
_MOST_QUOTED = 22
_MOST_OTHERS = 8
_MOST_LATE = 4
_LONGEST_PATH = 4096
_OBEYED = frozenset({0, -15, -9, -2, 143, 137, 130, None})
_STOPPED_BY_US = frozenset({WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.KILLED})

_STAMPS = re.compile(r"\[PID: ?\d+\] [\d:.-]{10,30} ?|^\[[EWF]\d{3,4} [\d:.]+ [^\]]{1,60}\] ")

_LABELS_ZH = {
    "root cause": "根因",
    "failed first": "最先失败",
    "why": "判断依据",
    "ended": "结束方式",
    "time": "时间",
    "error": "错误",
    "reason": "具体原因",
    "meaning": "含义",
    "usual cause": "常见原因",
    "to do": "处理建议",
    "found": "其他证据",
    "log": "日志",
    "plog": "plog",
    "output": "输出",
    "all logs": "全部日志",
    "other ranks": "其他 rank",
    "suspects": "嫌疑",
    "leftovers": "残留进程",
    "clocks": "时钟",
    "first line": "首个错误",
    "stopped": "停止原因",
    "names": "指向",
    "note": "注意",
}


def write_report(evidence: Evidence, accounts: Sequence[Account], conclusion: Conclusion) -> str:
    """Write the report about a job.

    It stays within about 40 lines of 100 columns, however many workers there are. Apart from what
    workers printed themselves it holds no value of an environment variable.

    Args:
        evidence: What is known about the job.
        accounts: One account per worker.
        conclusion: What that comes to.

    Returns:
        Plain text without a line end at its end.
    """
    return _Writer(evidence, accounts, conclusion).write()


class _Writer:
    def __init__(self, evidence: Evidence, accounts: Sequence[Account], conclusion: Conclusion) -> None:
        self.evidence = evidence
        self.accounts = sorted(accounts, key=lambda one: one.rank)
        self.conclusion = conclusion
        self.lang = evidence.lang
        self.zh = evidence.lang == "zh"
        named = conclusion.named
        sure = conclusion.verdict in (Verdict.ROOT_CAUSE, Verdict.FAILED_ALIKE, Verdict.AUXILIARY)
        self.lead = named[0] if sure and named else (conclusion.failed[0] if conclusion.failed else None)
        self.sure = sure

    def write(self) -> str:
        head = [*decisive(self._title(), ""), *self._who()]
        head += self.field("why", self.conclusion.why.text(self.lang))
        if self.lead is not None and self.conclusion.verdict is not Verdict.SUCCEEDED:
            head += self._about(self.lead)
        tail = [*self._suspects(), *self._silent(), *self._others(), *self._late(), *self._rest()]
        tail += self._files()
        last = self._last_line()
        room = _MOST_LINES - len(head) - len(tail) - len(last) - 1
        quoted = self._quoted(max(_FEWEST_QUOTED, min(_MOST_QUOTED, room)))
        return "\n".join([*head, *quoted, *tail, *last])

    def field(self, key: str, value: str, rows: int | None = None) -> list[str]:
        return field(self.key(key), value, rows)

    def key(self, key: str) -> str:
        return _LABELS_ZH.get(key, key) if self.zh else key

    def said(self, en: str, zh: str) -> str:
        return zh if self.zh else en

    # --- who

    def _title(self) -> str:
        verdict, lead = self.conclusion.verdict, self.lead
        job = self.evidence.job_id
        ranks = _list(self.conclusion.named)
        end = self._end(lead) if lead is not None else ""
        if verdict is Verdict.ROOT_CAUSE and lead is not None:
            return self.said(
                f"job {job} failed: {self._name(lead)} is the root cause, {end}",
                f"作业 {job} 失败：{self._name(lead)} 是根因，{end}",
            )
        if verdict is Verdict.FAILED_ALIKE and lead is not None:
            listed = _list(sorted(self.conclusion.named, key=lambda one: one.rank))
            return self.said(
                f"job {job} failed: {listed} failed alike ({lead.rank} first), {end}",
                f"作业 {job} 失败：{listed} 以相同方式失败（rank {lead.rank} 最先），{end}",
            )
        if verdict is Verdict.AUXILIARY and lead is not None:
            return self.said(
                f"job {job} failed: MindSpore's {lead.of.name} is the root cause, {end}",
                f"作业 {job} 失败：MindSpore 的 {lead.of.name} 是根因，{end}",
            )
        words = {
            Verdict.STOPPED: ("was stopped from outside", "被外部停止"),
            Verdict.STALLED: ("stalled", "停滞"),
            Verdict.TIME_LIMIT: ("reached its time limit", "达到时间限制"),
            Verdict.INTERNAL_ERROR: ("ended by an error of the launcher itself", "因启动器自身错误结束"),
            Verdict.SUCCEEDED: ("ended well", "正常结束"),
        }
        if verdict in words:
            return self.said(f"job {job} {words[verdict][0]}", f"作业 {job} {words[verdict][1]}")
        if verdict is Verdict.NODE_LOST:
            lost = self.evidence.lost[0]
            if lost.node_rank < 0:
                return self.said(f"job {job} failed: the cluster was lost", f"作业 {job} 失败：集群失联")
            return self.said(
                f"job {job} failed: node {lost.node_rank} is the root cause, lost with all its workers",
                f"作业 {job} 失败：节点 {lost.node_rank} 是根因，连同其全部进程失联",
            )
        if verdict is Verdict.LINK:
            one, other = self.conclusion.named[0].rank, self.conclusion.named[1].rank
            return self.said(
                f"job {job} failed: the link between rank {one} and rank {other}",
                f"作业 {job} 失败：rank {one} 与 rank {other} 之间的链路",
            )
        if lead is None:
            if verdict is Verdict.SUSPECTS:
                return self.said(f"job {job} failed: look at {ranks}", f"作业 {job} 失败：请查看 {ranks}")
            return self.said(
                f"job {job} failed: no worker failed by itself", f"作业 {job} 失败：没有进程自行失败"
            )
        first = self.said(f"{self._name(lead)} failed first, {end}", f"{self._name(lead)} 最先失败，{end}")
        if verdict is Verdict.SUSPECTS:
            return self.said(
                f"job {job} failed: look at {ranks}; {first}", f"作业 {job} 失败：请查看 {ranks}；{first}"
            )
        return self.said(f"job {job} failed: {first}", f"作业 {job} 失败：{first}")

    def _name(self, one: Account) -> str:
        if one.rank >= 0:
            return f"rank {one.rank}"
        return self.said(f"MindSpore's {one.of.name}", f"MindSpore 的 {one.of.name}")

    def _end(self, one: Account, *, many: bool = False) -> str:
        if one.of.start_error:
            return self.said("not started", "未能启动")
        if _is_unknown(one):
            return self.said("exit status unknown", "退出状态未知")
        if one.of.ended is None and one.of.exit_code is None:
            return (
                self.said("still running", "仍在运行")
                if one.of.pid
                else self.said("exit status unknown", "退出状态未知")
            )
        if _stopped_after_error(one):
            its = "their errors" if many else "its error"
            return self.said(f"stopped by us after {its}", "报错后被我们停止")
        return name_exit(one.of.exit_code, self.lang)

    def _place(self, one: Account) -> str:
        of = one.of
        if one.rank < 0:
            place = [
                self.said(
                    f"MindSpore's {of.name}, an auxiliary process, not a rank",
                    f"MindSpore 的 {of.name}，辅助进程，不是 rank",
                )
            ]
        else:
            place = [f"rank {one.rank}"]
            if of.local_rank != one.rank and of.local_rank >= 0:
                place.append(f"local rank {of.local_rank}")
            if of.device_id >= 0:
                # A rank table and the tools of the host count otherwise than the worker, which sees its own only.
                differs = of.npu_id not in (-1, of.device_id)
                on_host = (
                    self.said(f" (NPU {of.npu_id} of the host)", f"（主机 NPU {of.npu_id}）")
                    if differs
                    else ""
                )
                place.append(self.said(f"device {of.device_id}", f"设备 {of.device_id}") + on_host)
        if self.evidence.nnodes > 1:
            place.append(
                self.said(
                    f"node {of.node} (node rank {of.node_rank})",
                    f"节点 {of.node}（node rank {of.node_rank}）",
                )
            )
        if of.pid is not None:
            place.append(f"pid {of.pid}")
        elif of.start_error:
            place.append(self.said("no process", "没有进程"))
        return "，".join(place) if self.zh else ", ".join(place)

    def _who(self) -> list[str]:
        verdict, lead = self.conclusion.verdict, self.lead
        if verdict is Verdict.LINK:
            ends = [self.said("one end", "一端"), self.said("other end", "另一端")]
            return [
                row
                for key, one in zip(ends, self.conclusion.named, strict=False)
                for row in field(key, f"{self._place(one)}, {self._end(one)}")
            ]
        if lead is None or verdict is Verdict.SUCCEEDED:
            return []
        if self.sure:
            return self.field("root cause", self._place(lead))
        unclear = verdict in (Verdict.SUSPECTS, Verdict.UNCLEAR)
        rows = []
        if unclear:
            rows += self.field(
                "root cause",
                self.said(
                    "unclear: the first failure looks like the effect of another rank",
                    "不明确：最先的失败像是其他 rank 造成的",
                ),
            )
        return rows + self.field("failed first", self._place(lead))

    # --- what

    def _about(self, one: Account) -> list[str]:
        of = one.of
        ended = of.start_error or explain_exit(of.exit_code, self.lang)
        if not of.start_error and (of.ended is None or _is_unknown(one)):
            ended = self._end(one)
        elif _stopped_after_error(one):
            ended = self.said("stopped by us after it had written its error", "在写出错误之后被我们停止")
        rows = self.field("ended", ended, 3)
        if (note := self._exit_note(one)) is not None:
            rows += self.field("found", note)
        moment = stamp(of.ended)
        if moment:
            if of.started is not None and of.ended is not None:
                ran = duration(of.ended - of.started, self.lang)
                moment += self.said(f", after {ran}", f"，运行了 {ran}")
            finding = one.finding
            if finding is not None and finding.time is not None and of.ended is not None:
                before = of.ended - finding.time
                if 0.05 <= before < 1e9:
                    span = duration(before, self.lang)
                    moment += self.said(f"; first error {span} before", f"；首个错误在此前 {span}")
            rows += self.field("time", moment)
        rows += self._error(one)
        for fact in (*of.facts, *self.evidence.facts)[:6]:
            rows += self.field("found", fact, 3)
        return rows

    def _exit_note(self, one: Account) -> str | None:
        """What an exit means in its surroundings."""
        if one.by_signal is None or one.by_signal.name != "SIGSEGV":
            return None
        others = [other for other in self.accounts if other is not one and other.rank >= 0]
        if (
            others
            and all(other.of.state is WorkerState.SUCCEEDED for other in others)
            and (one.finding is None or (one.finding.kind is Kind.ABORT and one.finding.known is None))
        ):
            return self.said(
                "its peers ended well and it wrote no error: it crashed while leaving, its results are complete",
                "其他 rank 均正常结束且它没有报错：它在退出时崩溃，结果是完整的",
            )
        return self.said(
            "a crash in native code; for its stack see the output, or allow core dumps (ulimit -c unlimited)",
            "本地代码崩溃；堆栈见输出，或开启 core dump（ulimit -c unlimited）",
        )

    def _error(self, one: Account) -> list[str]:
        finding = one.finding
        if finding is None:
            return []
        rows: list[str] = []
        for quote in finding.quotes[:3] if finding.kind is Kind.TRACEBACK else finding.quotes[:1]:
            rows += self.field("error" if not rows else "", quote, 4)
        known = finding.known
        if finding.reason and finding.reason not in " ".join(finding.quotes):
            rows += self.field("reason", finding.reason, 4)
        shown = finding.headline.removeprefix("... ") in finding.naming
        if finding.naming and not shown and not self.sure:
            rows += self.field("names", finding.naming, 3)
        if one.earlier and one.earlier != finding.headline:
            when = ""
            if one.earlier_time is not None and one.of.ended is not None:
                span = duration(one.of.ended - one.earlier_time, self.lang)
                when = self.said(f" ({span} before the end)", f"（结束前 {span}）")
            rows += self.field("first line", one.earlier + when, 4)
        if known is not None:
            name = f"{known.code} ({known.component})" if known.code else known.component
            meaning = f"{name}: {known.meaning.text(self.lang)}"
            if known.role is Role.SECONDARY:
                meaning += self.said(". Another rank is the likelier cause", "。其他 rank 更可能是原因")
            elif known.role is Role.UNKNOWN and not known.vague:
                meaning += self.said(
                    ". Cause, or effect of another rank's end", "。可能是原因，也可能是其他 rank 退出的结果"
                )
            rows += self.field("meaning", meaning)
            # The message's own reason says more than a table can.
            if known.cause.en and not finding.reason:
                rows += self.field("usual cause", known.cause.text(self.lang))
            rows += self.field("to do", known.remedy.text(self.lang))
        if finding.aside is not None:
            rows += self.field("note", finding.aside.meaning.text(self.lang))
            rows += self.field("", finding.aside.remedy.text(self.lang))
        return rows

    def _quoted(self, room: int) -> list[str]:
        lead = self.lead
        if lead is None or lead.of.start_error or self.conclusion.verdict is Verdict.SUCCEEDED:
            return []
        if not lead.excerpt:
            return self.field("output", self.said("no output before exit", "退出前没有输出"))
        finding = lead.finding
        traced = finding is not None and finding.kind in (Kind.TRACEBACK, Kind.ABORT)
        title = self.said("traceback:", "堆栈：") if traced else self.said("last lines:", "最后几行：")
        indent = common_indent(lead.excerpt)
        vital = set(finding.quotes) if finding is not None else set()
        rows: list[list[str]] = []
        for text in lead.excerpt:
            cut = text[indent:]
            if text.strip() in vital:
                rows.append(decisive(cut, "  | "))
            else:
                rows.append(["  | " + shorten(cut, WIDTH - 4)])
        return [title, *_fit(rows, room, [text.strip() in vital for text in lead.excerpt])]

    # --- the others

    def _suspects(self) -> list[str]:
        if self.conclusion.verdict not in (Verdict.SUSPECTS, Verdict.STALLED, Verdict.TIME_LIMIT):
            return []
        rows: list[str] = []
        for one in self.conclusion.named[:6]:
            rows += self.field("suspects" if not rows else "", self._state(one), 3)
            rows.append(label("") + shorten(str(one.of.log_path), _LONGEST_PATH))
        return rows

    def _state(self, one: Account) -> str:
        of = one.of
        parts = [f"rank {one.rank}"]
        if self.evidence.nnodes > 1:
            parts.append(shorten(of.node, 24))
        if of.state is WorkerState.SUCCEEDED:
            parts.append(self.said("had ended well", "已正常结束"))
        elif of.last_output is None:
            parts.append(
                self.said(
                    "no output at all" if not one.last_line else "silence unknown",
                    "没有任何输出" if not one.last_line else "",
                )
            )
        else:
            since = stamp(of.last_output, date=False)
            parts.append(self.said(f"silent since {since}", f"自 {since} 起无输出"))
        text = ", ".join(part for part in parts if part and part != "silence unknown")
        finding = one.late or one.passing or one.finding
        words = finding.headline if finding is not None else one.last_line
        return f"{text}: {words}" if words else text

    def _silent(self) -> list[str]:
        """One line per rank that ran when somebody or a limit stopped the job, the longest silent first."""
        if self.conclusion.verdict not in (
            Verdict.STALLED, Verdict.TIME_LIMIT, Verdict.STOPPED, Verdict.UNCLEAR,
        ):  # fmt: skip
            return []
        named = {one.rank for one in self.conclusion.named}
        ran = [one for one in self.accounts if one.rank >= 0 and one.running and one.rank not in named]
        if not ran:
            return []
        ran.sort(key=lambda one: (one.of.last_output or 0.0, one.rank))
        rows = [
            self.said(
                "workers that were running, the longest silent first:", "当时仍在运行的进程，静默最久的在前："
            )
        ]
        rows += ["  " + shorten(self._state(one), WIDTH - 2) for one in ran[:10]]
        if len(ran) > 10:
            rows.append(self.said(f"  ... and {len(ran) - 10} more", f"  ... 另有 {len(ran) - 10} 个"))
        return rows

    def _others(self) -> list[str]:
        shown = {self.lead.rank} if self.lead is not None else set()
        alike = [
            one
            for one in self.conclusion.named
            if self.conclusion.verdict is Verdict.FAILED_ALIKE and one.rank not in shown
        ]
        seen = shown | {one.rank for one in alike}
        rest = [one for one in self.conclusion.failed if one.rank not in seen]
        groups: dict[tuple[object, ...], list[Account]] = {}
        if alike:
            groups[("alike",)] = alike
        for one in rest:
            said = one.finding.key if one.finding is not None else ""
            node = one.of.node if self.evidence.nnodes > 1 else ""
            groups.setdefault((said, one.of.exit_code, node), []).append(one)
        if not groups:
            return []
        rows = [self.said("other failures:", "其他失败：")]
        listed = list(groups.items())
        for key, group in listed[:_MOST_OTHERS]:
            rows.append("  " + self._group(key == ("alike",), group))
        if len(listed) > _MOST_OTHERS:
            more = sum(len(group) for _, group in listed[_MOST_OTHERS:])
            rows.append(self.said(f"  ... and {more} more", f"  ... 另有 {more} 个"))
        return rows

    def _group(self, alike: bool, group: list[Account]) -> str:
        first = group[0]
        node = (
            f"{self.said(' on ', ' 在 ')}{shorten(first.of.node, 24)}"
            if self.evidence.nnodes > 1 and not alike
            else ""
        )
        end = (
            f"{_list(sorted(group, key=lambda one: one.rank))}{node}, {self._end(first, many=len(group) > 1)}"
        )
        if moment := stamp(first.of.ended, date=False):
            end += f", {moment}"
        if alike:
            return shorten(
                f"{end}: {self.said('the same error', '相同错误')} "
                f"({self.said('as rank', '同 rank')} {self.lead.rank if self.lead else ''})",
                WIDTH - 2,
            )
        words = _brief(first.finding.headline) if first.finding is not None else first.last_line
        words = words or self.said("no output before exit", "退出前没有输出")
        room = max(8, WIDTH - 4 - width(end))
        return f"{shorten(end, WIDTH - 14)}: {shorten(words, room)}"

    def _late(self) -> list[str]:
        bad = [one for one in self.accounts if _ended_badly(one)]
        if not bad:
            return []
        rows = [
            self.said(
                "ended badly while being stopped (an effect, not the cause):",
                "在被停止时异常结束（是结果，不是原因）：",
            )
        ]
        for one in bad[:_MOST_LATE]:
            end = f"{one.of.name}, {name_exit(one.of.exit_code, self.lang)}"
            words = one.late.headline if one.late is not None else one.last_line
            room = max(8, WIDTH - 4 - width(end))
            rows.append(f"  {end}: {shorten(words, room)}" if words else f"  {end}")
        if len(bad) > _MOST_LATE:
            rows.append(
                self.said(f"  ... and {len(bad) - _MOST_LATE} more", f"  ... 另有 {len(bad) - _MOST_LATE} 个")
            )
        return rows

    def _rest(self) -> list[str]:
        counts = (
            (WorkerState.STOPPED, "stopped by us in time", "由我们及时停止"),
            (
                WorkerState.KILLED,
                "killed by us after the grace period (SIGKILL)",
                "宽限期后由我们结束（SIGKILL）",
            ),
            (WorkerState.SUCCEEDED, "had ended well", "已正常结束"),
            (WorkerState.RUNNING, "still running", "仍在运行"),
            (WorkerState.STOPPING, "still being stopped", "正在停止"),
            (WorkerState.PENDING, "never started", "未启动"),
        )
        said = []
        for state, en, zh in counts:
            count = sum(
                one.rank >= 0
                and one.of.state is state
                and not one.failed
                and not _ended_badly(one)
                and not _is_unknown(one)
                for one in self.accounts
            )
            if count:
                said.append(self.said(f"{count} {en}", f"{count} 个{zh}"))
        unknown = sum(one.rank >= 0 and _is_unknown(one) and not one.failed for one in self.accounts)
        if unknown:
            said.append(self.said(f"{unknown} without an error in their logs", f"{unknown} 个日志中没有错误"))
        rows = self.field("other ranks", ("，" if self.zh else ", ").join(said)) if said else []
        if leftovers := self.evidence.leftovers:
            listed = ", ".join(f"{one.pid} ({one.command})" for one in leftovers[:4])
            more = f" ... {len(leftovers)}" if len(leftovers) > 4 else ""
            rows += self.field("leftovers", self.said(f"ended: {listed}{more}", f"已结束：{listed}{more}"), 3)
        if self.evidence.nnodes > 1 and self.conclusion.failed:
            rows += self.field(
                "clocks",
                self.said(
                    "each node's own: times tell the order within a node; nodes stand in the order in which the "
                    "news came",
                    "各节点使用自己的时钟：时间只说明节点内的先后；节点按消息到达的先后排列",
                ),
            )
        return rows

    def _files(self) -> list[str]:
        rows = []
        lead = self.lead
        if lead is not None and self.conclusion.verdict is not Verdict.SUCCEEDED:
            rows += self._path("log", lead.of.log_path)
            if lead.of.plog is not None:
                rows += self._path("plog", lead.of.plog)
        return [*rows, *self._path("all logs", self.evidence.log_dir)]

    def _path(self, key: str, path: Path) -> list[str]:
        """A path stays in one line, however long, so that it can be copied."""
        return [label(self.key(key)) + shorten(str(path), _LONGEST_PATH)]

    def _last_line(self) -> list[str]:
        """The line that stays on a small screen: rank, exception and log."""
        lead = self.lead
        if self.conclusion.verdict in (Verdict.SUSPECTS, Verdict.LINK) and self.conclusion.named:
            lead = self.conclusion.named[0]
        if lead is None or self.conclusion.verdict is Verdict.SUCCEEDED:
            return []
        if lead.finding is not None:
            words = _brief(lead.finding.headline)
        elif lead.failed:
            words = self._end(lead) + (f": {lead.last_line}" if lead.last_line else "")
        else:
            words = lead.last_line or self.said("no output", "没有输出")
        room = max(24, WIDTH - width(self._name(lead)) - 2)
        where = shorten(str(lead.of.log_path), _LONGEST_PATH)
        return [f"{self._name(lead)}: {wrap(words, room, 1)[0]} ({self.said('log', '日志')}: {where})"]


def _brief(headline: str) -> str:
    """A headline for a single row, without what CANN and a watchdog write before the words."""
    return _STAMPS.sub("", headline)


def _is_unknown(one: Account) -> bool:
    """Whether nobody saw how it ended: its log is all that is left."""
    return one.of.state is WorkerState.RUNNING and one.of.ended is not None


def _stopped_after_error(one: Account) -> bool:
    """Whether its exit tells only that it obeyed our stop signal."""
    return one.of.told is not None and one.of.exit_code in _OBEYED and one.by_signal is None


def _ended_badly(one: Account) -> bool:
    """Whether it ended otherwise than a worker does that obeys our stop signal."""
    return (
        one.of.told is not None
        and not one.failed
        and one.of.exit_code not in _OBEYED
        and (one.of.state in _STOPPED_BY_US)
    )


def _list(accounts: Iterable[Account]) -> str:
    numbers = sorted(one.rank for one in accounts)
    return f"rank{'s' * (len(numbers) != 1)} {compact(numbers)}"


def _fit(rows: list[list[str]], room: int, vital: list[bool]) -> list[str]:
    """Leave out lines from the top until the rest fits, but never one that says what is wrong."""
    total = sum(len(row) for row in rows)
    left = 0
    kept = list(rows)
    for index, row in enumerate(rows):
        if total + (1 if left else 0) <= room:
            break
        if not vital[index]:
            total -= len(row)
            kept[index] = []
            left += 1
    flat: list[str] = []
    marked = False
    for row in kept:
        if not row and not marked:
            flat.append(f"  | ... {left} more lines in the log ...")
            marked = True
        flat += row
    return flat
