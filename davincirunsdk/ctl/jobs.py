"""Jobs of this host, found without a register: a launcher holds its job's events file open.

What a launcher is doing does not matter: nothing here asks it, so that one that is stuck or stopped
keeps nobody from looking. Processes of jobs whose launcher is gone are found by the mark in their
environment.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.leftovers.proc import Environments, MarkedProcess, Proc
from davincirunsdk.output.run_record import RunRecord, read_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_EVENTS = "-events.jsonl"
_MARK_LENGTH = 6
"""Letters of a mark that a person types: enough among the jobs of one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJob:
    """A job whose launcher lives on this host.

    Attributes:
        mark: Short mark, which no other job of this host has.
        job_id: Its name.
        launcher: Pid of its launcher.
        is_command: The launcher is `davincirun`; False for a program that uses the library.
        user: Who owns it.
        events: Its events file.
        record: What the events say so far.
    """

    mark: str
    job_id: str
    launcher: int
    is_command: bool
    user: int
    events: Path
    record: RunRecord

    @property
    def workers(self) -> dict[int, int]:
        """Pids of the ranks that run, by rank.

        Whoever writes an events file may name any process in it, and root reads those of others: only
        processes of the launcher's own user are believed.
        """
        proc = Proc()
        return {
            rank.rank: life.pid
            for rank in self.record.ranks
            if rank.lives and (life := rank.lives[-1]).ended is None and life.pid is not None
            if _owner(proc, life.pid) == self.user
        }

    @property
    def state(self) -> str:
        """`RUNNING`, `STOPPING`, or `LAUNCHER STOPPED` where its launcher is suspended."""
        if is_stopped(self.launcher):
            return "LAUNCHER STOPPED"
        return "STOPPING" if any(one.kind == "stopping" for one in self.record.happenings) else "RUNNING"

    def __str__(self) -> str:
        """What a person tells it by."""
        return f"{self.job_id} ({self.mark})" if self.mark else self.job_id


class NoSuchJobError(LookupError):
    """There is no such job, or none at all."""


class SeveralJobsError(LookupError):
    """A name fits several jobs; the text lists them."""


def running_jobs(proc: Proc | None = None) -> list[HostJob]:
    """List the jobs that run on this host and that this user may steer, oldest first.

    Args:
        proc: Where to look, `/proc` by default.
    """
    proc = proc or Proc()
    found: dict[tuple[int, str], HostJob] = {}
    for pid in sorted(proc.pids() - {os.getpid()}):
        for path in _open_events(proc, pid):
            job = _job_of(proc, pid, path)
            if job is not None:
                found[pid, str(path)] = job
    return sorted(found.values(), key=lambda job: job.record.started)


def find_job(name: str | None) -> HostJob:
    """Find one running job.

    Args:
        name: Its id or its short mark, or the beginning of that; None where there is only one.

    Raises:
        NoSuchJobError: No job that runs is called so.
        SeveralJobsError: More than one is.
    """
    jobs = running_jobs()
    fitting = [
        job for job in jobs if name is None or job.job_id == name or (job.mark and job.mark.startswith(name))
    ]
    if not fitting:
        if name is None:
            raise NoSuchJobError("no job runs here")
        known = ", ".join(map(str, jobs)) or "none"
        raise NoSuchJobError(
            f"no job {name!r} runs on this host; running: {known} (`davincirunctl report LOGDIR` tells of "
            "one that is over)"
        )
    if len(fitting) > 1:
        listed = ", ".join(
            f"{job.mark} ({job.job_id}, launcher {job.launcher}, logs in {job.events.parent})"
            for job in fitting
        )
        raise SeveralJobsError(f"several jobs fit: {listed}; give the short mark of one")
    return fitting[0]


def newest_events(name: str) -> Path | None:
    """Find the events file of a job that may be over: nobody holds it open then.

    Args:
        name: Log folder of the job, or its id where the folder is `./log`, as it is by default.
    """
    folder = Path(name)
    if os.path.isdir(folder):
        found = list(folder.glob(f"*{_EVENTS}"))
    elif os.sep in name:
        return None
    else:
        known = glob.escape(name)
        found = [path for form in (known, f"{known}-node-*") for path in Path("log").glob(f"{form}{_EVENTS}")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def dead_processes(proc: Proc | None = None) -> list[MarkedProcess]:
    """List this user's processes of jobs that no launcher looks after any more.

    Args:
        proc: Where to look, `/proc` by default.
    """
    proc = proc or Proc()
    seen = [look for pid in proc.pids() if (look := proc.look(pid)) is not None and not look.is_dead]
    own = [one for one in seen if _owner(proc, one.pid) == os.geteuid() or os.geteuid() == 0]
    marks = {one.key: mark for one, data in Environments(proc).read(own) if (mark := _mark_in(data))}
    parents = {one.pid: one for one in seen}
    return [one for one in own if one.key in marks and not _is_looked_after(proc, one, marks, parents)]


def _is_looked_after(
    proc: Proc,
    process: MarkedProcess,
    marks: dict[tuple[int, int], str],
    parents: dict[int, MarkedProcess],
) -> bool:
    """Tell whether the job's launcher lives: what is above the job's uppermost process.

    An orphan is below process 1 or another that inherits orphans, which neither writes events nor
    reads what the job prints.
    """
    mark, top = marks[process.key], process
    above = parents.get(process.parent)
    while above is not None and above.pid > 1 and marks.get(above.key) == mark:
        top, above = above, parents.get(above.parent)
    if above is None or above.pid <= 1:
        return False
    if any(True for _ in _open_events(proc, above.pid)):
        return True
    pipes = {target for target in _descriptors(proc, top.pid, ("1", "2")) if target.startswith("pipe:")}
    return not pipes.isdisjoint(_descriptors(proc, above.pid))


def _descriptors(proc: Proc, pid: int, numbers: Sequence[str] | None = None) -> Iterator[str]:
    """What a process has open, as links of /proc; nothing of one that may not be looked at."""
    folder = f"{proc.root}/{pid}/fd"
    try:
        for number in numbers if numbers is not None else os.listdir(folder):
            try:
                yield os.readlink(f"{folder}/{number}")
            except OSError:
                continue
    except OSError:
        return


def _open_events(proc: Proc, pid: int) -> Iterator[Path]:
    return (Path(target) for target in _descriptors(proc, pid) if target.endswith(_EVENTS))


def _job_of(proc: Proc, pid: int, path: Path) -> HostJob | None:
    """Read a job's events; None where the file is not that of a job of this process."""
    try:
        if not path.is_file():
            # Opening a pipe that somebody else holds would block.
            return None
        with path.open(encoding="utf-8", errors="replace") as file:
            first = json.loads(file.readline() or "null")
        # Only then: it may be long.
        record = read_record(path)
    except (OSError, ValueError):
        return None
    about = first.get("about") if isinstance(first, dict) and first.get("kind") == "about" else None
    if not isinstance(about, dict) or about.get("launcher") != pid or record.finished:
        return None
    return HostJob(
        mark=str(about.get("mark", ""))[:_MARK_LENGTH],
        job_id=record.job,
        launcher=pid,
        is_command=about.get("started_by") == "davincirun",
        user=_owner(proc, pid),
        events=path,
        record=record,
    )


def is_stopped(pid: int) -> bool:
    """Tell whether a process is suspended, as by SIGSTOP."""
    look = Proc().look(pid)
    return look is not None and look.state == "T"


def _mark_in(environment: bytes | None) -> str:
    for entry in (environment or b"").split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == JOB_MARK.encode():
            return value.decode(errors="replace")
    return ""


def _owner(proc: Proc, pid: int) -> int:
    try:
        return os.stat(f"{proc.root}/{pid}").st_uid
    except OSError:
        return -1
