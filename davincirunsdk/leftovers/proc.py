"""What the kernel says about a process: small reads of /proc, and how to give up one that hangs.

`stat`, `status`, `wchan` and the links in `fd` are answered from the kernel's own books. `environ` is
not: it needs the memory lock of the process, and one that is stuck in a driver may hold that for ever.
So those are read in a thread that can be left behind.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOOK_PATIENCE = 0.25
"""Seconds after which a look at one process is given up."""

_TICKS = os.sysconf("SC_CLK_TCK")

_WAITING = (b"do_wait", b"kernel_wait4", b"do_sys_wait")
_SIGNAL_WAITING = (b"do_sigtimedwait", b"rt_sigtimedwait", b"sigtimedwait")
_CALLS = {
    # wait4 and waitid, rt_sigtimedwait; the second family of numbers is what newer architectures share.
    "x86_64": ((b"61", b"247"), (b"128",)),
    "aarch64": ((b"260", b"95"), (b"137",)),
}


class MarkedProcess(NamedTuple):
    """A process, told from a later one with the same pid by its start time.

    A named tuple and no dataclass: the guardian, which loads this module, has to stay small.

    Attributes:
        started: Clock ticks from the machine's boot to its start.
        state: The kernel's letter: `R` running, `S` asleep, `T` stopped, `Z` dead and not reaped.
    """

    pid: int
    started: int
    parent: int
    group: int
    session: int
    state: str
    threads: int
    command: str

    @property
    def key(self) -> tuple[int, int]:
        """What no later process has in common with it."""
        return self.pid, self.started

    @property
    def is_dead(self) -> bool:
        """True when only its exit status is left; a leader whose other threads run is not dead."""
        return self.state == "X" or (self.state == "Z" and self.threads <= 1)


class Disposition(NamedTuple):
    """What a process does with signals, one bit per signal."""

    blocked: int
    ignored: int
    caught: int

    def catches(self, number: int) -> bool:
        """Tell whether it has a handler for a signal."""
        return bool(self.caught >> (number - 1) & 1)

    def ignores(self, number: int) -> bool:
        """Tell whether a signal has no effect on it."""
        return bool(self.ignored >> (number - 1) & 1)

    def blocks(self, number: int) -> bool:
        """Tell whether a signal waits until it is asked for."""
        return bool(self.blocked >> (number - 1) & 1)


def since_boot() -> int:
    """Clock ticks since the machine's boot: the clock of `MarkedProcess.started`, which nobody sets."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


class Proc:
    """Reads one /proc.

    Args:
        root: The folder, `/proc` but for tests.
    """

    def __init__(self, root: str = "/proc") -> None:
        self.root = root

    def pids(self) -> set[int]:
        """List all processes; none where there is no /proc."""
        try:
            return {int(name) for name in os.listdir(self.root) if name.isdigit()}
        except OSError:
            return set()

    def look(self, pid: int) -> MarkedProcess | None:
        """Look at one process; None if it is not there, or may not be seen."""
        data = self._read(f"{pid}/stat")
        if data is None:
            return None
        head, _, tail = data.rpartition(b")")
        fields = tail.split()
        if len(fields) < 20:
            return None
        return MarkedProcess(
            pid=pid,
            started=int(fields[19]),
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            state=os.fsdecode(fields[0]),
            threads=int(fields[17]),
            command=head.partition(b"(")[2].decode(errors="replace"),
        )

    def disposition(self, pid: int) -> Disposition | None:
        """Learn what a process does with signals; None if that cannot be known."""
        data = self._read(f"{pid}/status")
        if data is None:
            return None
        masks = {line[:6]: line[7:] for line in data.split(b"\n") if line.startswith(b"Sig")}
        try:
            blocked, ignored, caught = (int(masks[name], 16) for name in (b"SigBlk", b"SigIgn", b"SigCgt"))
        except (KeyError, ValueError):
            return None
        return Disposition(blocked, ignored, caught)

    def waits_for_child(self, process: MarkedProcess) -> bool:
        """Tell whether a process sleeps in a call that waits for a child, and does nothing else."""
        return process.threads == 1 and process.state == "S" and self._sleeps_in(f"{process.pid}", 0)

    def awaits_signal(self, pid: int, number: int) -> bool:
        """Tell whether a process takes a signal by a call: `sigwait`, or a signalfd while it is blocked.

        Reads memory of the process: for a thread that may be left behind.
        """
        try:
            threads = os.listdir(f"{self.root}/{pid}/task")
        except OSError:
            return False
        tasks = Proc(f"{self.root}/{pid}/task")
        blocking = {
            thread
            for thread in threads
            if (told := tasks.disposition(int(thread))) is not None and told.blocks(number)
        }
        for thread in threads:
            if self._sleeps_in(f"{pid}/task/{thread}", 1):
                # The kernel counts what is waited for as not blocked meanwhile.
                awaited = self._awaited(pid, thread)
                others_block = len(threads) > 1 and blocking >= {*threads} - {thread}
                if others_block if awaited is None else awaited >> (number - 1) & 1:
                    return True
        return blocking == {*threads} and any(self._signal_descriptor(pid, number))

    def _awaited(self, pid: int, thread: str) -> int | None:
        """Read the signals that a thread waits for; None without the right to."""
        words = (self._read(f"{pid}/task/{thread}/syscall") or b"").split()
        try:
            with open(f"{self.root}/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(int(words[1], 16))
                return int.from_bytes(memory.read(8), sys.byteorder)
        except (OSError, IndexError, ValueError):
            return None

    def pipe_at(self, pid: int, descriptor: int) -> int:
        """Inode of the pipe that a process has at a descriptor, 0 if that is none."""
        try:
            target = os.readlink(f"{self.root}/{pid}/fd/{descriptor}")
        except OSError:
            return 0
        kind, _, inode = target.partition(":[")
        return int(inode[:-1]) if kind == "pipe" else 0

    def written_pipes(self, pid: int) -> frozenset[int]:
        """Inodes of all pipes that a process can write to."""
        found = set()
        try:
            for name in os.listdir(f"{self.root}/{pid}/fd"):
                # The kernel shows in the link's own mode how the descriptor was opened.
                if os.lstat(f"{self.root}/{pid}/fd/{name}").st_mode & stat.S_IWUSR:
                    found.add(self.pipe_at(pid, int(name)))
        except OSError:
            # It ended meanwhile.
            pass
        return frozenset(found - {0})

    def limit_of_locks(self, pid: int) -> int | None:
        """Soft limit of file locks, which the kernel has not used since 2.4.25; None for no limit."""
        for line in (self._read(f"{pid}/limits") or b"").split(b"\n"):
            if line.startswith(b"Max file locks"):
                value = line.split()[3]
                return int(value) if value.isdigit() else None
        return None

    def children(self, pid: int) -> list[int]:
        """List the living and dead children of a process without a look at all others."""
        found: list[int] = []
        try:
            threads = os.listdir(f"{self.root}/{pid}/task")
            for thread in threads:
                with open(f"{self.root}/{pid}/task/{thread}/children", "rb") as file:
                    found.extend(map(int, file.read().split()))
        except OSError:
            # A kernel without these files: all have to be asked.
            seen = map(self.look, self.pids())
            return [process.pid for process in seen if process is not None and process.parent == pid]
        return found

    def _signal_descriptor(self, pid: int, number: int) -> Iterator[bool]:
        folder = f"{self.root}/{pid}"
        try:
            descriptors = os.listdir(f"{folder}/fd")
        except OSError:
            return
        for descriptor in descriptors:
            try:
                if "signalfd" not in os.readlink(f"{folder}/fd/{descriptor}"):
                    continue
            except OSError:
                continue
            for line in (self._read(f"{pid}/fdinfo/{descriptor}") or b"").split(b"\n"):
                if line.startswith(b"sigmask:"):
                    yield bool(int(line.split()[1], 16) >> (number - 1) & 1)

    def _sleeps_in(self, path: str, which: int) -> bool:
        names = (_WAITING, _SIGNAL_WAITING)[which]
        place = self._read(f"{path}/wchan")
        if place is not None and place not in (b"", b"0"):
            return any(name in place for name in names)
        # Not every kernel names the place; the number of the call needs more rights.
        numbers = _CALLS.get(os.uname().machine, ((), ()))[which]
        return (self._read(f"{path}/syscall") or b"").split(b" ")[0] in numbers

    def _read(self, path: str) -> bytes | None:
        try:
            file = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(file, 16384)
        except OSError:
            return None
        finally:
            os.close(file)


class Environments:
    """Reads environments of processes; what hangs is left behind and not tried again.

    Args:
        proc: Where to read.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._stuck: set[tuple[int, int]] = set()

    def read(self, processes: Iterable[MarkedProcess]) -> Iterator[tuple[MarkedProcess, bytes | None]]:
        """Read the environments of processes, as they were at their exec.

        Args:
            processes: Whose.

        Yields:
            Each process with its variables, separated by zero bytes; with None where they may not
            be read or the look has been given up.
        """
        left = [process for process in processes if process.key not in self._stuck]
        while left:
            done = 0
            for process, data in self._read_some(left):
                done += 1
                yield process, data
            if done < len(left):
                self._stuck.add(left[done].key)
                yield left[done], None
                done += 1
            left = left[done:]

    def _read_some(self, processes: list[MarkedProcess]) -> Iterator[tuple[MarkedProcess, bytes | None]]:
        found: SimpleQueue[bytes | None] = SimpleQueue()

        def read_all() -> None:
            for process in processes:
                found.put(self._read(process.pid))

        try:
            threading.Thread(target=read_all, name="davincirun-look", daemon=True).start()
        except RuntimeError:
            # The limit on processes is reached: a look that may hang is better than none.
            for process in processes:
                yield process, self._read(process.pid)
            return
        for process in processes:
            try:
                yield process, found.get(timeout=LOOK_PATIENCE)
            except Empty:
                return

    def _read(self, pid: int) -> bytes | None:
        try:
            with open(f"{self._proc.root}/{pid}/environ", "rb", buffering=0) as file:
                return file.readall()
        except OSError:
            return None


def send(proc: Proc, process: MarkedProcess, number: int) -> bool:
    """Signal exactly this process: its start time is checked while a pidfd holds its identity.

    Returns:
        False when it is gone.

    Raises:
        PermissionError: The signal is refused: the process has become another user's.
    """
    handle = open_handle(process.pid)
    try:
        seen = proc.look(process.pid)
        if seen is None or seen.started != process.started:
            return False
        if handle is not None:
            try:
                signal.pidfd_send_signal(handle, number)
                return True
            except ProcessLookupError:
                return False
            except (AttributeError, OSError):
                # A container's filter may refuse the newer call only.
                pass
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def open_handle(pid: int) -> int | None:
    """Open a pidfd; None where the process is gone, the kernel is older than 5.3, or a filter refuses."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
