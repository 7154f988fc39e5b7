"""The guardians' own processes: see `guardian`.

They import little, for each has to stay below 15 MB beside every job.
"""

from __future__ import annotations

import _socket
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from davincirunsdk.leftovers.drain import Drain

_CLEAN_LOOKS = 3
"""Looks without a find, 0.1 s apart, before a guardian leaves: a worker may be at its exec just now."""

_STANDBYS = 20
"""Standbys in a row; one that cannot live must not be started for ever."""

_WARM_AFTER = 1000
"""Milliseconds of quiet after which what the clean-up needs is loaded: not in the rush of the start."""

_STEP = 500
"""Milliseconds between looks at whoever is watched, on kernels before 5.3, which have no pidfd."""


class Output(NamedTuple):
    """A worker, and the descriptors that came with it: the read end of its pipe, its log file."""

    rank: int
    descriptors: list[int]


class Job:
    """What a guardian knows of one job.

    Args:
        grace_period: Seconds from SIGTERM to SIGKILL.
        since: The tick before which no process of it can have been started.
        deadline: The monotonic second of SIGKILL of a stop that has begun, None without one.
    """

    def __init__(self, grace_period: float, since: int, deadline: float | None) -> None:
        self.grace_period = grace_period
        self.since = since
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
        self.dismissed = False

    def take(self, message: bytes, descriptors: list[int]) -> None:
        """Follow one order."""
        what, *rest = map(os.fsdecode, message.split(b"\0"))
        if what == "watch":
            mark, grace_period, since, *deadline = rest
            known = self.jobs.get(mark)
            self.jobs[mark] = job = Job(
                float(grace_period), int(since), float(deadline[0]) if deadline else None
            )
            if known is not None:
                job.outputs, job.exits, job.told = known.outputs, known.exits, known.told
        elif what == "output":
            mark, pid, rank = rest
            if mark in self.jobs and int(pid) not in self.jobs[mark].outputs:
                self.jobs[mark].outputs[int(pid)] = Output(int(rank), descriptors)
                descriptors = []
        elif what == "exited":
            mark, pid, tick = rest
            if mark in self.jobs:
                self.jobs[mark].exits[int(pid)] = int(tick)
        elif what == "told":
            if rest[0] in self.jobs:
                keys = [key.split(" ") for key in rest[1:]]
                self.jobs[rest[0]].told.update((int(pid), int(started)) for pid, started in keys)
        elif what == "closed":
            mark, pid = rest
            if mark in self.jobs and (output := self.jobs[mark].outputs.get(int(pid))) is not None:
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


def main(supervisor: int, standby: int) -> None:
    """Be the guardian, and have a standby: orders come on descriptor 0.

    Args:
        supervisor: Pid of the process to outlive.
        standby: Descriptor that the standby's orders come on.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        # Ctrl-C, hang-up and a batch system's SIGTERM are meant for the supervisor, which ends us.
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    call_this_process("job-guardian")
    _Guard(Watch(supervisor), 0, standby).run()


def call_this_process(name: str) -> None:
    """Give this process a name of its own in lists of processes."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        # It is only for whoever looks.
        return


class _Guard:
    """One of the two, from its start to its end.

    Args:
        watch: What is known already.
        channel: Where orders come in.
        standby: Where the standby's come in; -1 for the standby itself.
        first: Pid of the guardian that this is the standby of.
    """

    def __init__(self, watch: Watch, channel: int, standby: int, first: int = 0) -> None:
        self._watch = watch
        self._channel = channel
        self._standby = standby
        self._first = first
        self._socket = _socket.socket(fileno=channel)
        self._child = 0
        self._started = 0

    def run(self) -> None:
        """Watch, and clean up where that falls to this one; does not return."""
        if self._standby >= 0:
            self._start_standby()
        self._serve()
        if not self._watch.dismissed and (self._watch.jobs or self._watch.folders):
            if self._first:
                # It may be at it already.
                _Life(self._first, os.getppid() == self._first).wait()
            clean(self._watch)
        elif self._child:
            # A supervisor that inherits orphans would have to reap it.
            _Life(self._child, True).wait(2.0)
            os.waitpid(self._child, os.WNOHANG)
        os._exit(0)

    def _start_standby(self) -> None:
        if self._started > _STANDBYS:
            return
        self._started += 1
        guardian = os.getpid()
        try:
            self._child = os.fork()
        except OSError:
            # The limit on processes: one is better than none.
            self._child = 0
            return
        if self._child == 0:
            os.setsid()
            call_this_process("job-standby")
            os.dup2(os.open("/dev/null", os.O_RDWR), self._channel)
            self._socket.detach()
            _Guard(self._watch, self._standby, -1, guardian).run()

    def _serve(self) -> None:
        """Take orders until the supervisor is gone or lets us go."""
        supervisor = _Life(
            self._watch.supervisor, bool(self._first) or os.getppid() == self._watch.supervisor
        )
        child = _Life(self._child, True) if self._child else None
        warm = False
        while True:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            for life in (supervisor, child):
                if life is not None and life.handle is not None:
                    poll.register(life.handle, select.POLLIN)
            step = _STEP if supervisor.handle is None else None if warm else _WARM_AFTER
            ready = {descriptor for descriptor, _ in poll.poll(step)}
            if self._channel in ready:
                # All that it has told comes before its end.
                if not self._take_order() or self._watch.dismissed:
                    return
            elif supervisor.is_over():
                return
            elif child is not None and child.is_over():
                os.waitpid(self._child, 0)
                child.close()
                self._start_standby()
                child = _Life(self._child, True) if self._child else None
            elif not warm:
                import davincirunsdk.leftovers.drain
                import davincirunsdk.leftovers.ending
                import davincirunsdk.leftovers.process_tree  # noqa: F401 - loaded now, used by `clean`

                warm = True

    def _take_order(self) -> bool:
        try:
            message, extra, _, _ = self._socket.recvmsg(
                65536, _socket.CMSG_SPACE(4 * 4), _socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return False
        descriptors = [
            int.from_bytes(data[place : place + 4], "little" if _IS_LITTLE else "big")
            for _, kind, data in extra
            if kind == _socket.SCM_RIGHTS
            for place in range(0, len(data), 4)
        ]
        if message:
            self._watch.take(message, descriptors)
        return bool(message)


_IS_LITTLE = memoryview(b"\x01\x00").cast("H")[0] == 1


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
            self._started = self._look()

    def is_over(self) -> bool:
        """Tell whether it has ended."""
        if self._gone:
            return True
        if self.handle is None:
            return self._look() != self._started
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self, patience: float | None = None) -> None:
        """Wait for its end, for some seconds at most, or as long as it takes: it has bounds of its own."""
        limit = None if patience is None else time.monotonic() + patience
        while not self.is_over():
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return
            if self.handle is None:
                time.sleep(0.1)
            else:
                poll = select.poll()
                poll.register(self.handle, select.POLLIN)
                poll.poll(None if left is None else 1000 * left)

    def close(self) -> None:
        """Give the descriptor back."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def _look(self) -> int:
        from davincirunsdk.leftovers.proc import Proc

        seen = Proc().look(self._pid)
        return -1 if seen is None or seen.is_dead else seen.started


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
        )
        for pid, output in job.outputs.items()
    ]
    tree = ProcessTree(mark, since=job.since)
    ending = Ending(tree, tops=lambda: tops, deadline=lambda: deadline, told=job.told)
    ending.stop()
    clean_looks = 0
    while clean_looks < _CLEAN_LOOKS:
        clean_looks = 0 if ending.end() else clean_looks + 1
        time.sleep(0.1)
