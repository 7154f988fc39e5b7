"""Evidence beyond the log: what files of CANN, the kernel and the machine say. Never needs root, never fails."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.exits import signal_behind
from davincirunsdk.diagnosis.lines import clean
from davincirunsdk.diagnosis.recorded import read_error_file
from davincirunsdk.host.memory import memory_kills
from davincirunsdk.types import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk.diagnosis.evidence import Evidence, RankEvidence

PATIENCE = 2.0
"""Seconds that all of it may take; a mount that hangs holds no report."""

_MOST_RANKS = 8
_PLOG_BYTES = 8 << 20
_WIDER_BYTES = 1 << 20
_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_SHM = Path("/dev/shm")
_FULL = 0.02
"""Share of free space below which /dev/shm counts as full."""


def look_around(
    evidence: Evidence, *, kills_before: int | None = None, plog_roots: dict[int, Path] | None = None
) -> Evidence:
    """Add what the surroundings of the ranks that failed say; takes at most `PATIENCE` seconds.

    Args:
        evidence: What is known so far.
        kills_before: `memory_kills` at the start of the job.
        plog_roots: Per rank the folder of CANN's own logs; its usual one for the others.

    Returns:
        The same evidence with facts; as it was, as far as something could not be seen in time.
    """
    found: list[Evidence] = []
    deadline = time.monotonic() + PATIENCE

    def look() -> None:
        found.append(_with_ranks(evidence, plog_roots or {}, deadline))
        found.append(_with_machine(found[-1], kills_before))

    # It cannot be ended, only left alone: a read of a dead mount does not come back.
    thread = threading.Thread(target=look, name="davincirun-look", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The job has used up all processes of this user.
        return evidence
    thread.join(PATIENCE)
    return found[-1] if found else evidence


def _with_ranks(evidence: Evidence, roots: dict[int, Path], deadline: float) -> Evidence:
    seen: list[RankEvidence] = []
    looked = 0
    for one in evidence.ranks:
        failed = one.state is WorkerState.FAILED
        if looked >= _MOST_RANKS or time.monotonic() > deadline or not (failed or one.told is not None):
            seen.append(one)
            continue
        raised = read_error_file(one.log_path.with_name(f"{one.log_path.stem}-error.json"))
        if failed:
            looked += 1
            one = _with_plog(_with_more_output(one), roots.get(one.rank))
            one = _with_kernel_log(one, evidence.lang)
        seen.append(replace(one, raised=raised))
    return replace(evidence, ranks=tuple(seen))


def _with_more_output(one: RankEvidence) -> RankEvidence:
    """The end of its log instead of the last words alone, where the log is not shortened."""
    try:
        with one.log_path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _WIDER_BYTES))
            data = file.read(_WIDER_BYTES)
    except OSError:
        return one
    if len(data) <= len(one.output) or not data.endswith(one.output):
        return one
    more = len(data) - len(one.output)
    return replace(one, output=data, times=tuple((count + more, moment) for count, moment in one.times))


def _with_plog(one: RankEvidence, root: Path | None) -> RankEvidence:
    if one.pid is None:
        return one
    names = [str(root or ""), os.environ.get("ASCEND_PROCESS_LOG_PATH", ""), "~/ascend/log"]
    roots = [Path(name).expanduser() for name in names if name]
    for folder in roots:
        for kind in ("debug/plog", "run/plog", "plog"):
            files = sorted((folder / kind).glob(f"plog-{one.pid}_*.log"))
            if files:
                lines = tuple(f"plog: {line}" for line in _error_lines(files[0]))
                return replace(one, plog=files[-1], facts=(*one.facts, *lines))
    return one


def _error_lines(path: Path, count: int = 2) -> Iterator[str]:
    """The first lines at error level: HCCL's detail often stands nowhere else."""
    try:
        with path.open("rb") as file:
            read = 0
            for line in file:
                read += len(line)
                if line.startswith(b"[ERROR]"):
                    yield clean(line[:1000].decode(errors="replace"))
                    count -= 1
                if count == 0 or read > _PLOG_BYTES:
                    return
    except OSError:
        return


def _with_kernel_log(one: RankEvidence, lang: str) -> RankEvidence:
    number = signal_behind(one.exit_code)
    if one.pid is None or number is None or number.name != "SIGKILL":
        return one
    wanted = re.compile(rf"Killed process {one.pid}\b")
    for text in _kernel_log():
        if wanted.search(text):
            head = "内核因内存不足结束了它：" if lang == "zh" else "the kernel killed it for memory: "
            return replace(one, facts=(*one.facts, head + clean(text.partition(";")[2][:300])))
    return one


def _kernel_log() -> Iterator[str]:
    """Records of the kernel's log, where this user may read it."""
    try:
        file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                yield os.read(file, 8192).decode(errors="replace")
            except BrokenPipeError:
                # Records were overwritten while we read.
                continue
            except OSError:
                return
    finally:
        os.close(file)


def _with_machine(evidence: Evidence, kills_before: int | None) -> Evidence:
    zh = evidence.lang == "zh"
    facts = list(evidence.facts)
    failed = [one for one in evidence.ranks if one.state is WorkerState.FAILED]
    numbers = {number.name for one in failed if (number := signal_behind(one.exit_code)) is not None}
    now = memory_kills()
    if now is not None and kills_before is not None:
        if now > kills_before:
            count = now - kills_before
            facts.append(
                f"内存控制组在作业期间结束了 {count} 个进程（内存不足）"
                if zh
                else f"the memory limit of this container killed {count} process{'es' * (count > 1)} during the job"
            )
        elif "SIGKILL" in numbers:
            facts.append(
                "内存控制组的计数器没有显示因内存不足的结束"
                if zh
                else "the container's counter shows no kill for memory during the job"
            )
    if numbers & {"SIGBUS", "SIGSEGV"} or b"shm" in b"".join(one.output[-4096:] for one in failed[:4]):
        facts += _shared_memory(zh)
    if numbers & {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"}:
        facts += _core_dumps(zh)
    if failed:
        facts += _driver(zh)
    return replace(evidence, facts=tuple(facts))


def _shared_memory(zh: bool) -> list[str]:
    try:
        space = os.statvfs(_SHM)
    except OSError:
        return []
    if not space.f_blocks or space.f_bavail / space.f_blocks > _FULL:
        return []
    size = space.f_blocks * space.f_frsize >> 20
    return [f"/dev/shm 已满（{size} MiB）" if zh else f"/dev/shm is full ({size} MiB)"]


def _core_dumps(zh: bool) -> list[str]:
    try:
        pattern = Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return []
    if not pattern:
        return []
    return [
        f"core dump 位置（如已开启）：{pattern}" if zh else f"core dumps, where allowed, go to: {pattern}"
    ]


def _driver(zh: bool) -> list[str]:
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = re.search(r"^Version=(\S+)$", text, re.MULTILINE)
    return [f"驱动版本 {found[1]}" if zh else f"driver version {found[1]}"] if found else []
