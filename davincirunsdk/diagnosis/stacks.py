"""Where the workers are: stacks of running processes, taken without harm and grouped by equal ones.

In order of what they show: py-spy where it is installed and may look, reading memory without stopping
anything; faulthandler, by a signal, only in a process that registered for exactly that; and what the
kernel tells about every process of the same user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from davincirunsdk.script.stacks import MEMORY_NAME, SIGNAL
from davincirunsdk.types import Stacks, WorkerStack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PATIENCE = 30.0
"""Seconds for all stacks together: a look at a process in a sick driver may never end."""
_PY_SPY_PATIENCE = 10.0
_TRIES = 3
"""Looks of py-spy at a process that goes on meanwhile."""
_ANSWER_PATIENCE = 2.0
"""Seconds for faulthandler's answer; it comes at once unless the process is stopped or in the kernel."""
_FRAMES = 64
"""Frames of a thread that are kept, from the innermost."""
_PROCESSES = 64
"""Processes of a worker that are looked through for the one that trains."""
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, beyond signals",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A worker to look at."""

    rank: int
    name: str
    pid: int


def take_stacks(targets: Sequence[Target]) -> tuple[WorkerStack, ...]:
    """Take the stacks of running workers; blocking, for a thread, at most half a minute.

    No worker is stopped, signalled without having asked for it, or changed in another way.

    Args:
        targets: The workers, each by the process that was started for it.

    Returns:
        One for each, in the same order.
    """
    found: dict[int, WorkerStack] = {}

    def look(target: Target) -> None:
        found[target.pid] = _look(target)

    # A thread each: one that hangs holds up nobody, and all are seen in nearly the same moment.
    threads = [threading.Thread(target=look, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return tuple(
        found.get(target.pid)
        or WorkerStack(
            rank=target.rank,
            name=target.name,
            pid=target.pid,
            state="does not let itself be looked at",
            source="",
            frames=(),
            text=f"no answer within {_PATIENCE:g} s: the process, or its driver, is stuck in the kernel",
        )
        for target in targets
    )


def _look(target: Target) -> WorkerStack:
    why = ""
    found: WorkerStack | None = None
    for pid in _pythons(target.pid):
        state = describe_state(pid)
        source = "py-spy"
        try:
            threads = _from_py_spy(pid)
        except _NoStacksError as error:
            why = why or str(error)
            source = "faulthandler"
            threads = _from_faulthandler(pid)
        if not threads:
            continue
        found = WorkerStack(
            rank=target.rank,
            name=target.name,
            pid=pid,
            state=state,
            source=source,
            frames=threads[0].frames,
            text="\n\n".join(map(str, threads)),
        )
        if not _waits_for_child(threads[0]):
            break
    if found is not None:
        return found
    text = _from_kernel(target.pid)
    return WorkerStack(
        rank=target.rank,
        name=target.name,
        pid=target.pid,
        state=describe_state(target.pid),
        source="kernel",
        frames=(),
        text=f"{text}\n({why})" if why else text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Thread:
    title: str
    frames: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"    {frame}" for frame in self.frames)])


class _NoStacksError(Exception):
    """One way did not work; the text says why."""


def _pythons(pid: int) -> list[int]:
    """List a worker's Python processes, itself first; a shell or numactl may stand before them."""
    pids = [pid]
    try:
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
    return [one for one in pids[:_PROCESSES] if _is_python(one)]


def _is_python(pid: int) -> bool:
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return re.match(r"(?:python|pypy)", Path(program).name) is not None


def _waits_for_child(main: _Thread) -> bool:
    """Tell whether a process only waits for another, which may be the one that trains: `conda run` does."""
    return bool(main.frames) and "(subprocess.py:" in main.frames[0]


def _from_py_spy(pid: int) -> list[_Thread]:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        raise _NoStacksError("py-spy is not installed: pip install davincirunsdk[stacks]")
    words = [program, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    trouble = ""
    for _ in range(_TRIES):
        try:
            answer = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PY_SPY_PATIENCE,
                check=False,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise _NoStacksError(f"py-spy did not answer within {_PY_SPY_PATIENCE:g} s") from None
        except OSError as error:
            raise _NoStacksError(f"py-spy cannot be started: {error.strerror}") from None
        if answer.returncode == 0:
            try:
                return _threads(json.loads(answer.stdout), pid)
            except (ValueError, KeyError, TypeError):
                trouble = "its answer cannot be read"
        else:
            trouble = (answer.stderr.strip().splitlines() or ["it gave no reason"])[0]
    raise _NoStacksError(f"py-spy cannot look: {trouble}")


def _threads(found: list[dict[str, object]], pid: int) -> list[_Thread]:
    """Turn py-spy's answer into threads, the main one first."""
    threads: list[_Thread] = []
    for thread in found:
        frames = thread["frames"]
        assert isinstance(frames, list)
        words = [f"{frame['name']} ({_short(str(frame['filename']))}:{frame['line']})" for frame in frames]
        state = "active" if thread["active"] else "idle"
        title = f"thread {thread['thread_name'] or thread['os_thread_id']} ({state})"
        made = _Thread(title=title, frames=tuple(words[:_FRAMES]))
        threads.insert(0 if thread["os_thread_id"] == pid else len(threads), made)
    return threads


def _short(path: str) -> str:
    """Name a file from its package on: paths of environments differ between nodes and say nothing."""
    _, packages, inside = path.rpartition("/site-packages/")
    if packages:
        return inside
    return path.rpartition("/")[2] if re.search(r"/lib/python3[^/]*/", path) else path


def _from_faulthandler(pid: int) -> list[_Thread]:
    """Ask a process that called `register_stacks`; [] for every other, and where nothing comes."""
    path = _answer_file(pid)
    if path is None or not _catches(pid, SIGNAL):
        return []
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            text, silent_since = b"", None
            deadline = time.monotonic() + _ANSWER_PATIENCE
            while time.monotonic() < deadline:
                if piece := file.read():
                    text, silent_since = text + piece, None
                elif text:
                    # Nothing tells its end: the main thread comes last.
                    silent_since = silent_since or time.monotonic()
                    if time.monotonic() - silent_since > 0.1:
                        break
                # Memory cannot be waited for.
                time.sleep(0.01)
    except OSError:
        return []
    return _parse_faulthandler(text.decode(errors="replace"))


def _parse_faulthandler(text: str) -> list[_Thread]:
    threads: list[_Thread] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        title, *lines = block.splitlines() or [""]
        found = [re.match(r'\s*File "([^"]*)", line (\d+|\?\?\?) in (.*)', line) for line in lines]
        frames = [f"{frame[3]} ({_short(frame[1])}:{frame[2]})" for frame in found if frame is not None]
        if frames:
            # The main thread is the oldest, and the last.
            threads.insert(0, _Thread(title=title.rstrip(":").lower(), frames=tuple(frames[:_FRAMES])))
    return threads


def _answer_file(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{MEMORY_NAME}"):
                return f"{folder}/{name}"
    except OSError:
        return None
    return None


def _catches(pid: int, number: int) -> bool:
    caught = int(_status(pid).get("SigCgt", "0"), 16)
    return bool(caught & 1 << (number - 1))


def _status(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def describe_state(pid: int) -> str:
    """Say what the kernel has a process do, such as `sleeping in futex_do_wait`.

    Args:
        pid: The process.
    """
    letter = _status(pid).get("State", "X")[:1]
    state = _STATES.get(letter, letter)
    place = _read(f"/proc/{pid}/wchan")
    return f"{state} in {place}" if letter in "SD" and place not in ("", "0") else state


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, by SIGSTOP for example.

    Args:
        pid: The process.
    """
    return _status(pid).get("State", "")[:1] == "T"


def _from_kernel(pid: int) -> str:
    """Say what /proc tells about every process of a worker."""
    pids = [pid]
    try:
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        pass
    lines = []
    for one in pids[:_PROCESSES]:
        lines.append(f"process {one} ({_read(f'/proc/{one}/comm')}): {describe_state(one)}")
        places: dict[str, int] = {}
        for thread in _tasks(one):
            place = _read(f"/proc/{one}/task/{thread}/wchan")
            words = f"in {place}" if place not in ("", "0") else "on a processor"
            places[words] = places.get(words, 0) + 1
        if len(places) > 1 or sum(places.values()) > 1:
            counts = sorted(places.items(), key=lambda item: -item[1])
            lines.append("    threads: " + ", ".join(f"{count} {words}" for words, count in counts))
        lines += [f"    {line}" for line in _read(f"/proc/{one}/stack").splitlines()[:8]]
    return "\n".join(lines)


def _tasks(pid: int) -> Iterable[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")[:1000]
    except OSError:
        return []


def take_and_save(targets: Sequence[Target], log_dir: Path, job_id: str) -> Stacks:
    """Take stacks and write them beside the logs; blocking, for a thread, at most half a minute.

    Args:
        targets: The workers.
        log_dir: Folder of the log files.
        job_id: First part of their names.
    """
    return save_stacks(Stacks(time=time.time(), workers=take_stacks(targets)), log_dir, job_id)


def save_stacks(stacks: Stacks, log_dir: Path, job_id: str) -> Stacks:
    """Write stacks beside the logs, as `<job id>-stacks-<n>.txt`; blocking.

    Args:
        stacks: What was taken.
        log_dir: Folder of the log files.
        job_id: First part of their names.

    Returns:
        The stacks with the file's path; without one where it cannot be written.
    """
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stacks.time))
    parts = [f"stacks of job {job_id}, taken at {moment}", str(stacks)]
    for worker in stacks.workers:
        title = f"{worker.name}, pid {worker.pid}, {worker.state}"
        parts.append(f"{title}\n{'-' * len(title)}\n{worker.text}")
    text = "\n\n".join(parts) + "\n"
    for number in count(1):
        path = log_dir / f"{job_id}-stacks-{number}.txt"
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError:
            return stacks
        return replace(stacks, path=path)
    raise AssertionError("unreachable: count() does not end")
