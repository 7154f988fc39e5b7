"""A worker that trains nothing: it says where it stands, and ends as its arguments tell it to.

    worker.py [--fail RANK:CODE] [--when-ready FOLDER] [--seconds S] [--deaf] [--grandchild]

With `--when-ready` it fails only after every rank has left a file in the folder, so that the failure
comes while all run. On SIGUSR1 it says that it saved; on SIGTERM too, and ends with 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--fail", default="")
parser.add_argument("--when-ready", type=Path)
parser.add_argument("--seconds", type=float, default=600.0)
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--grandchild", action="store_true")
options = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(text: str) -> None:
    # One write: a signal must not come between a text and its line end.
    os.write(1, f"{text} {time.time():.6f}\n".encode())


def save_and_end(*_: object) -> None:
    say("saved on SIGTERM")
    os._exit(0)


signal.signal(signal.SIGUSR1, lambda *_: say("saved on SIGUSR1"))
signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else save_and_end)
if options.grandchild:
    # In a session of its own, so that only the job's mark leads to it.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
say(f"ready rank {rank} of {world_size} master {place} node {os.environ['GROUP_RANK']}")
failing, _, code = options.fail.partition(":")
deadline = time.monotonic() + options.seconds
if options.when_ready is not None:
    (options.when_ready / str(rank)).touch()
while time.monotonic() < deadline:
    ready = options.when_ready is None or len(os.listdir(options.when_ready)) >= world_size
    if failing and int(failing) == rank and ready:
        say("failing")
        sys.exit(int(code))
    time.sleep(0.02)
