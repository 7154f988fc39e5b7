"""Why a job was stopped, in Chinese: its supervisor and its events give the reason in English words."""

from __future__ import annotations

import re

_READINGS = tuple(
    (re.compile(pattern), chinese)
    for pattern, chinese in (
        (r"no rank showed progress for ([\d.e+]+) s", "{0} 秒内没有 rank 有进展"),
        (r"ranks? ([\d, and-]+) still ran ([\d.e+]+) s after rank (\d+) had ended well",
         "rank {2} 正常结束 {1} 秒后，rank {0} 仍在运行"),
        (r"time limit of ([\d.e+]+) s", "达到 {0} 秒的时间限制"),
        (r"node (\S+) was lost", "节点 {0} 失联"),
        (r"internal error of davincirunsdk: ((?s:.+))", "{0}"),
        (r"cancelled", "作业被取消"),
        (r"\b(SIG[A-Z]+[12]?)\b", "{0}"),
        (r"Ctrl-C", "Ctrl-C"),
    )
)  # fmt: skip


def reason_in_chinese(reason: str) -> str:
    """Say in Chinese why a job was stopped.

    Args:
        reason: The English words of the cause.

    Returns:
        The data of the reason in Chinese words; "" for one that is not known, because a sentence in
        two languages helps nobody.
    """
    for pattern, chinese in _READINGS:
        if (found := pattern.search(reason)) is not None:
            return chinese.format(*(part.strip(", ").replace(" and ", ", ") for part in found.groups()))
    # Words that a caller gave in Chinese are as good as ours.
    return reason if re.search(r"[\u4e00-\u9fff]", reason) else ""
