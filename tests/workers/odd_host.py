"""A program that does odd things with processes and signals and has jobs: `odd_host.py HABIT FOLDER`.

It prints, as JSON, how its jobs ended and whether its own affairs stayed as they were.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk import DistributedRuntimeError, FMKManager

if TYPE_CHECKING:
    from collections.abc import Callable

habit, folder = sys.argv[1:]
PROBE = "grep -E 'Sig(Ign|Blk)' /proc/self/status"
OPEN = """
import os
for fd in range(2000):
    try: os.fstat(fd)
    except OSError: continue
    print(fd)
"""


def ignores_sigchld() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def reaps_in_a_handler() -> None:
    def reap(number: int, frame: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGCHLD, reap)


def reaps_in_a_thread() -> None:
    def reap() -> None:
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(0.001)

    threading.Thread(target=reap, daemon=True).start()


def runs_processes_of_its_own() -> None:
    def run(code: int) -> None:
        for _ in range(20):
            done = subprocess.run(["sh", "-c", f"exit {code}"], check=False)
            wrong.extend({done.returncode} - {code})

    threads = [threading.Thread(target=run, args=(code,)) for code in range(10)]
    for thread in threads:
        thread.start()
    at_end.extend(thread.join for thread in threads)


def blocks_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def ignores_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def ignores_signals_in_c() -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    for number in (signal.SIGTERM, signal.SIGUSR2):
        libc.signal(number, 1)


def has_descriptors() -> None:
    for _ in range(1000):
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)


def forks_with_locks_held() -> None:
    """Locks change hands all the time while children are forked, which find them taken."""
    over = threading.Event()

    def log() -> None:
        while not over.is_set():
            logging.getLogger("davincirunsdk").debug("busy")
            time.sleep(0)

    def fork() -> None:
        while not over.is_set():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            time.sleep(0.01)

    threads = [threading.Thread(target=log), threading.Thread(target=log), threading.Thread(target=fork)]
    for thread in threads:
        thread.start()
    at_end.extend([over.set, *(thread.join for thread in threads)])


HABITS = {
    "ignores SIGCHLD": ignores_sigchld,
    "reaps in a handler": reaps_in_a_handler,
    "reaps in a thread": reaps_in_a_thread,
    "runs processes of its own": runs_processes_of_its_own,
    "blocks signals": blocks_signals,
    "ignores signals": ignores_signals,
    "ignores signals in C": ignores_signals_in_c,
    "has descriptors": has_descriptors,
    "forks with locks held": forks_with_locks_held,
}
wrong: list[int] = []
at_end: list[Callable[[], object]] = []


def affairs() -> list[object]:
    """What belongs to this program and nobody else."""
    umask = os.umask(0)
    os.umask(umask)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    root = logging.getLogger()
    policy = asyncio.get_event_loop_policy()
    return [
        [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        umask,
        wakeup,
        Path.cwd(),
        dict(os.environ),
        list(root.handlers),
        root.level,
        list(logging.getLogger("davincirunsdk").handlers),
        policy,
        # The child watcher of Python 3.10 and 3.11; asking for it would make one.
        getattr(policy, "_watcher", None),
        sys.excepthook,
        threading.excepthook,
    ]


async def end_of(command: list[str], *, stop: bool = False) -> dict[str, object]:
    """Run a job and tell how it ended."""
    try:
        async with FMKManager(command, log_dir=f"{folder}/log", nproc_per_node=2, grace_period=5) as manager:
            if stop:
                await both_ready(manager)
                await manager.stop()
            await manager.wait()
    except DistributedRuntimeError as error:
        failure = error.root_cause.exit_code
    else:
        failure = 0
    return {
        "state": str(manager.state),
        "failure": failure,
        "codes": [worker.exit_code for worker in manager.workers],
        "logs": [worker.log_path.read_text() for worker in manager.workers],
    }


async def both_ready(manager: FMKManager) -> None:
    """Wait for a line of each worker."""
    ranks = set()
    async for line in manager.logs():
        ranks.add(line.rank)
        if len(ranks) == 2:
            return


async def main() -> dict[str, object]:
    before = affairs()
    ends = {
        "good": await end_of(["sh", "-c", PROBE]),
        "open": await end_of([sys.executable, "-S", "-E", "-c", OPEN]),
        "bad": await end_of(["sh", "-c", "exit 7"]),
        "late": await end_of(["sh", "-c", "sleep 0.3; exit 9"]),
        "signal": await end_of(["sh", "-c", "kill -SEGV $$"]),
        "stopped": await end_of(["sh", "-c", "echo ready; exec sleep 600"], stop=True),
    }
    for end in at_end:
        end()
    changed = [(repr(was), repr(now)) for was, now in zip(before, affairs(), strict=True) if was != now]
    return {**ends, "changed": changed, "wrong": wrong}


if __name__ == "__main__":
    HABITS[habit]()
    print(json.dumps(asyncio.run(main())))
