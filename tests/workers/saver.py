"""A rank that saves when it is told to end: `saver.py FOLDER KIND,KIND,...`, one kind per local rank.

A kind is the way the rank is wrapped. The rank itself (`saver.py FOLDER --rank KIND`) needs a helper to
save, as a training script needs its data loaders, and leaves `saved.KIND` with the number of SIGTERMs
it got.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

folder = Path(sys.argv[1])
PY = [sys.executable, "-S", "-E"]


def rank_words(kind: str) -> list[str]:
    """Words that start the rank itself."""
    return [*PY, __file__, str(folder), "--rank", kind]


def words_of(kind: str) -> list[str]:
    """Words that start the rank as its kind says."""
    rank = rank_words(kind)
    line = shlex.join(rank)
    copy = shlex.quote(str(folder / f"copy.{kind}"))
    return {
        "tee": ["bash", "-c", f"{line} | tee {copy}"],
        "slow-filter": ["bash", "-c", f'{line} | while read -r line; do sleep 0.1; echo "$line"; done'],
        "substitution": ["bash", "-c", f"exec > >(tee {copy}) 2>&1; {line}; exit"],
        "gzip": ["bash", "-c", f"{line} | tee >(gzip > {copy}.gz)"],
        "shell": ["bash", "-c", f"{line}; true"],
        "dash": ["sh", "-c", f"{line}; true"],
        "shells": ["sh", "-c", f"bash -c {shlex.quote(line + '; true')}; true"],
        "exec": ["bash", "-c", f"exec {line}"],
        "trap": ["bash", "-c", f"trap 'echo trapped' TERM; {line}"],
        "deaf-shell": ["bash", "-c", f"trap '' TERM; {line}; true"],
        "forwards": ["bash", "-c", f"trap 'kill -TERM $!' TERM; {line} & wait $!; wait $!; true"],
        "python-wrapper": [
            *PY,
            "-c",
            "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
            *rank,
        ],
        "timeout": ["timeout", "600", *rank],
        "nested": [
            sys.executable,
            "-m",
            "davincirunsdk",
            "--nproc-per-node",
            "1",
            "--grace-period",
            "4",
            "--log-dir",
            str(folder / "nested"),
            "--",
            *rank,
        ],
    }.get(kind, rank)


def answer(line: Connection) -> None:
    """Serve one question; die of SIGTERM as a data loader does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    line.send("here")
    line.recv()
    line.send("data")
    time.sleep(600)


def run_rank(kind: str) -> None:
    told: list[int] = []
    helper = None
    ours, theirs = multiprocessing.Pipe()
    if kind != "timeout":
        # That one signals its whole group by itself, helpers too.
        spawn, fork = multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")
        start = spawn.Process if kind == "spawn" else fork.Process
        helper = start(target=answer, args=(theirs,), daemon=True)
        helper.start()
        ours.recv()
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    (folder / f"ready.{kind}").touch()
    while not told:
        time.sleep(0.02)
    if helper is not None:
        ours.send("more")
        if not ours.poll(5) or ours.recv() != "data":
            raise SystemExit("the helper is gone")
    time.sleep(0.4)
    for number in range(5):
        print(f"last words {number} of {kind}", flush=True)
    (folder / f".saved.{kind}").write_text(str(len(told)))
    (folder / f".saved.{kind}").rename(folder / f"saved.{kind}")


def main() -> None:
    if sys.argv[2] == "--rank":
        run_rank(sys.argv[3])
        return
    kind = sys.argv[2].split(",")[int(os.environ["LOCAL_RANK"])]
    words = words_of(kind)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
