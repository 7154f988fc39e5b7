"""A worker of any kind that a stop may meet: `kinds.py RECORDS KIND,KIND,...`, one kind per local rank.

Each process of it leaves a file `RECORDS/KIND.PID` that holds its start time. Processes that other
processes start are named here as `KIND` with the argument `--as`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

records = Path(sys.argv[1])


def record(kind: str) -> None:
    """Say that this process runs, whole or not at all."""
    stat = Path("/proc/self/stat").read_text()
    started = stat.rpartition(")")[2].split()[19]
    hidden = records / f".{kind}.{os.getpid()}"
    hidden.write_text(started)
    hidden.rename(records / hidden.name[1:])


def rest() -> None:
    """Live until a signal ends it."""
    while True:
        time.sleep(600)


def be_deaf() -> None:
    """Ignore what can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def helper(kind: str, *, session: bool = False, pipe: bool = False, empty: bool = False) -> None:
    """Start a deaf process."""
    output = None if pipe else subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, str(records), "--as", kind],
        stdout=output,
        stderr=output,
        start_new_session=session,
        env={} if empty else None,
    )


def obedient() -> None:
    record("obedient")
    rest()


def deaf() -> None:
    be_deaf()
    record("deaf")
    rest()


def stopped() -> None:
    record("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
    rest()


def setsid() -> None:
    helper("setsid", session=True)
    rest()


def daemon(kind: str, *, session: bool) -> None:
    """Fork twice, as libraries do that become daemons."""
    if os.fork() == 0:
        if session:
            os.setsid()
        if os.fork() == 0:
            be_deaf()
            record(kind)
            rest()
        os._exit(0)
    os.wait()
    rest()


def pipe() -> None:
    helper("pipe", session=True, pipe=True)
    rest()


def dying() -> None:
    def fork(number: int, frame: object) -> None:
        if os.fork() == 0:
            os.setsid()
            be_deaf()
            record("dying")
            rest()
        os._exit(0)

    signal.signal(signal.SIGTERM, fork)
    record("dying")
    rest()


def once() -> None:
    helper("once")


def counts() -> None:
    """Note every signal; go on after all but SIGTERM."""

    def note(number: int, frame: object) -> None:
        with (records / f".signals.{os.getpid()}").open("a") as file:
            file.write(f"{number}\n")
        if number == signal.SIGTERM:
            # Long enough for a second one to come.
            time.sleep(0.3)
            sys.exit(0)

    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM"):
        signal.signal(getattr(signal, f"SIG{name}"), note)
    record("counts")
    while True:
        time.sleep(600)


def shell() -> None:
    words = f"{sys.executable} -S -E {__file__} {records} --as-obedient shell; true"
    os.execv("/bin/sh", ["sh", "-c", words])


def bare() -> None:
    helper("bare", empty=True)
    rest()


def bare_setsid() -> None:
    # Deaf itself: an unmarked process in a session of its own can be found while its parent lives.
    be_deaf()
    helper("bare-setsid", empty=True, session=True)
    rest()


def lost() -> None:
    """End well or badly, as the test says; before, orphan a process that nothing of the job is seen in."""
    words = f"{sys.executable} -S -E {__file__} {records} --as lost"
    subprocess.run(["setsid", "env", "-i", "/bin/sh", "-c", f"{words} >/dev/null 2>&1 &"], check=True)
    while not (records.parent / "fail").exists():
        time.sleep(0.01)
    sys.exit(int((records.parent / "fail").read_text() or 0))


def pool() -> None:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    # Starting the resource tracker unblocks SIGTERM, so that is blocked before and after the threads start.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    workers = context.Pool(2, pool_worker)
    workers.map(abs, range(2))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    record("pool")
    rest()
    del manager


def pool_worker() -> None:
    be_deaf()
    record("pool")


def fails() -> None:
    """End badly when the test says so."""
    record("fails")
    while not (records.parent / "fail").exists():
        time.sleep(0.01)
    sys.exit(3)


def once_pipe() -> None:
    print("last words")
    helper("once-pipe", session=True, pipe=True)


def floods() -> None:
    record("floods")
    while True:
        print("x" * 1000)


def talks() -> None:
    record("talks")
    for number in count():
        print("line", number, flush=True)
        time.sleep(0.01)


KINDS = {
    "obedient": obedient,
    "deaf": deaf,
    "stopped": stopped,
    "setsid": setsid,
    "double-fork": lambda: daemon("double-fork", session=False),
    "double-fork-setsid": lambda: daemon("double-fork-setsid", session=True),
    "pipe": pipe,
    "dying": dying,
    "once": once,
    "shell": shell,
    "bare": bare,
    "bare-setsid": bare_setsid,
    "pool": pool,
    "fails": fails,
    "lost": lost,
    "once-setsid": lambda: helper("once-setsid", session=True),
    "counts": counts,
    "once-pipe": once_pipe,
    "floods": floods,
    "talks": talks,
}


def main() -> None:
    if sys.argv[2] == "--as":
        be_deaf()
        record(sys.argv[3])
        rest()
    elif sys.argv[2] == "--as-obedient":
        record(sys.argv[3])
        rest()
    kind = sys.argv[2].split(",")[int(os.environ["LOCAL_RANK"])]
    KINDS[kind]()


if __name__ == "__main__":
    main()
