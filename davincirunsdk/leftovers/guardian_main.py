"""The guardians' own processes: see `guardian`.

They import little: each has to stay below 15 MB beside every job, and two of them start with every job.
`signal` and `typing` alone would take twice as long as Python's own start.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # it has no stubs; `signal` brings enum and all below it
import _socket
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from davincirunsdk.leftovers.drain import Drain

_CLEAN_LOOKS = 3
"""Looks without a find, 0.1 s apart, before a guardian leaves: a worker may be at its exec just now."""

_WARM_AFTER = 1000
"""Milliseconds of quiet after which what the clean-up needs is loaded: not in the rush of the start."""

_STEP = 500
"""Milliseconds between looks at whoever is watched, on kernels before 5.3, which have no pidfd."""


class Output:
    """A worker, and the descriptors that came with it: the read end of its pipe, its log file."""

    def __init__(self, rank: int, descriptors: list[int]) -> None:
        self.rank = rank
        self.descriptors = descriptors


class Job:
    """What a guardian knows of one job.

    Args:
        grace_period: Seconds from the stop signal to SIGKILL.
        since: The tick before which no process of it can have been started.
        stop_signal: Asks its processes to end.
        deadline: The monotonic second of SIGKILL of a stop that has begun, None without one.
    """

    def __init__(self, grace_period: float, since: int, stop_signal: int, deadline: float | None) -> None:
        self.grace_period = grace_period
        self.since = since
        self.stop_signal = stop_signal
        self.deadline = deadline
        self.outputs: dict[int, Output] = {}
        self.exits: dict[int, int] = {}
        self.told: set[tuple[int, int]] = set()


class Watch:
    """All that one guardian watches.

    Args:
        supervisor: Pid of the process to outlive.
    """

    def __init__(self, supervisor: int) -> None:
        self.supervisor = supervisor
        self.jobs: dict[str, Job] = {}
        self.folders: set[str] = set()
        self.dismissed: bool = False

    def take(self, message: bytes, descriptors: list[int]) -> None:
        """Follow one order."""
        what, *rest = map(os.fsdecode, message.split(b"\0"))
        if what == "watch":
            mark, grace_period, since, stop_signal, *deadline = rest
            known = self.jobs.get(mark)
            self.jobs[mark] = job = Job(
                float(grace_period), int(since), int(stop_signal), float(deadline[0]) if deadline else None
            )
            if known is not None:
                job.outputs, job.exits, job.told = known.outputs, known.exits, known.told
        elif what == "output":
            mark, pid, rank = rest
            if mark in self.jobs and int(pid) not in self.jobs[mark].outputs:
                self.jobs[mark].outputs[int(pid)] = Output(int(rank), descriptors)
                descriptors = []
        elif what == "exited":
            mark, tick, *pids = rest
            if mark in self.jobs:
                self.jobs[mark].exits.update(dict.fromkeys(map(int, pids), int(tick)))
        elif what == "told":
            if rest[0] in self.jobs:
                keys = [key.split(" ") for key in rest[1:]]
                self.jobs[rest[0]].told.update((int(pid), int(started)) for pid, started in keys)
        elif what == "closed":
            mark, *pids = rest
            for pid in pids if mark in self.jobs else ():
                if (output := self.jobs[mark].outputs.get(int(pid))) is not None:
                    close_all(output.descriptors)
        elif what == "release":
            if (released := self.jobs.pop(rest[0], None)) is not None:
                for output in released.outputs.values():
                    close_all(output.descriptors)
        elif what == "folder":
            self.folders.add(rest[0])
        elif what == "no folder":
            self.folders.discard(rest[0])
        elif what == "bye":
            self.dismissed = True
        close_all(descriptors)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, and forget them."""
    while descriptors:
        os.close(descriptors.pop())


def main(supervisor: int, first: int, first_started: int) -> None:
    """Be a guardian: orders come on descriptor 0.

    Args:
        supervisor: Pid of the process to outlive.
        first: Pid of the guardian that this one is the standby of, 0 for that guardian itself.
        first_started: Tick of its start, 0 if unknown: its number may be another's by now.
    """
    for number in _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD}:
        # Ctrl-C, hang-up and a batch system's SIGTERM are meant for the supervisor, which ends us.
        try:
            _signal.signal(number, _signal.SIG_IGN)
        except OSError:
            continue
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    call_this_process("job-standby" if first else "job-guardian")
    watch = Watch(supervisor)
    guardian = _Life(first, bool(first) and _started(first) == first_started)
    _serve(watch)
    if not watch.dismissed and (watch.jobs or watch.folders):
        # The standby looks whether anything is left when the guardian has done it, or is gone.
        guardian.wait()
        clean(watch)
    os._exit(0)


def call_this_process(name: str) -> None:
    """Give this process a name of its own in lists of processes."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        # It is only for whoever looks.
        return


def _serve(watch: Watch) -> None:
    """Take orders until the supervisor is gone or lets us go."""
    supervisor = _Life(watch.supervisor, os.getppid() == watch.supervisor)
    orders = _socket.socket(fileno=0)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if supervisor.handle is not None:
        poll.register(supervisor.handle, select.POLLIN)
    warm = False
    while not watch.dismissed:
        step = _STEP if supervisor.handle is None else None if warm else _WARM_AFTER
        ready = {descriptor for descriptor, _ in poll.poll(step)}
        if 0 in ready:
            # All that it has told comes before its end.
            if not _take_order(orders, watch):
                return
        elif supervisor.is_over():
            return
        elif not warm:
            # What the clean-up needs is loaded after the rush of the start, while all is well.
            import davincirunsdk.leftovers.drain
            import davincirunsdk.leftovers.ending
            import davincirunsdk.leftovers.process_tree  # noqa: F401 - loaded now, used by `clean`

            warm = True


def _take_order(orders: _socket.socket, watch: Watch) -> bool:
    """Take one order; False when there will be none any more."""
    try:
        message, extra, _, _ = orders.recvmsg(65536, _socket.CMSG_SPACE(4 * 4), _socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return False
    descriptors = [
        int.from_bytes(data[place : place + 4], sys.byteorder)
        for _, kind, data in extra
        if kind == _socket.SCM_RIGHTS
        for place in range(0, len(data), 4)
    ]
    if message:
        watch.take(message, descriptors)
    return bool(message)


def _started(pid: int) -> int:
    """Tick of a living process's start, -1 if it is dead, 0 if it is gone or cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


class _Life:
    """Whether a process still lives.

    Args:
        pid: Which.
        is_there: False when it is known to be gone, and the number may be another's.
    """

    def __init__(self, pid: int, is_there: bool) -> None:
        self._pid = pid
        self._gone = not is_there
        self.handle: int | None = None
        try:
            self.handle = os.pidfd_open(pid) if is_there else None
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError):
            # An older kernel or a container's filter: looked at now and then.
            self._started = _started(pid)

    def is_over(self) -> bool:
        """Tell whether it has ended."""
        if self._gone:
            return True
        if self.handle is None:
            return _started(self._pid) != self._started
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self) -> None:
        """Wait for its end, as long as it takes: it has bounds of its own."""
        while not self.is_over():
            if self.handle is None:
                time.sleep(0.1)
            else:
                poll = select.poll()
                poll.register(self.handle, select.POLLIN)
                poll.poll()


def clean(watch: Watch) -> None:
    """End every job, each with its own grace period, keep what they print, and remove the folders."""
    from threading import Thread

    from davincirunsdk.leftovers.drain import Drain

    drain = Drain(
        [(pid, *output.descriptors) for job in watch.jobs.values() for pid, output in job.outputs.items()]
    )
    # A disk that is stuck must not keep it from ending anything.
    Thread(target=drain.run, daemon=True).start()
    endings = [Thread(target=_end, args=(mark, job, drain)) for mark, job in watch.jobs.items()]
    for ending in endings:
        ending.start()
    for ending in endings:
        ending.join()
    drain.finish()
    if watch.folders:
        import shutil

        for folder in watch.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end(mark: str, job: Job, drain: Drain) -> None:
    from functools import partial

    from davincirunsdk.leftovers.ending import Ending
    from davincirunsdk.leftovers.process_tree import ProcessTree, Top

    deadline = time.monotonic() + job.grace_period
    if job.deadline is not None:
        deadline = min(deadline, job.deadline)
    tops = [
        Top(
            pid,
            rank=output.rank,
            ended=job.exits.get(pid),
            told=job.deadline is not None,
            pipe=drain.inode(pid),
            silence=partial(drain.silence, pid),
        )
        for pid, output in job.outputs.items()
    ]
    tree = ProcessTree(mark, since=job.since)
    ending = Ending(tree, tops=lambda: tops, deadline=lambda: deadline, number=job.stop_signal, told=job.told)
    ending.stop()
    clean_looks = 0
    while clean_looks < _CLEAN_LOOKS:
        clean_looks = 0 if ending.end() else clean_looks + 1
        time.sleep(0.1)
