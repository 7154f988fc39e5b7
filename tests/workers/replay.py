"""A worker that does what `failure_cases.write_plan` has written for its rank: `replay.py PLAN FOLDER`."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Print the pieces at their times, counted from when the last rank is there, and end as planned."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    mine = plan[os.environ["RANK"]]
    # The end is planned: neither a stack of this program nor a core file belongs to it.
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mine["code_after_term"] is not None:
        signal.signal(signal.SIGTERM, lambda *_: _leave(mine))
    folder = Path(sys.argv[2])
    (folder / f"ready-{os.environ['RANK']}").touch()
    while len(ready := list(folder.glob("ready-*"))) < len(plan):
        time.sleep(0.005)
    start = max(path.stat().st_mtime for path in ready) + 0.1
    for at, text in mine["pieces"]:
        _sleep_until(start + at)
        _print(text)
    _sleep_until(start + mine["ended"])
    if mine["end"] == "stop":
        time.sleep(600)
    kind, what = mine["end"].split()
    if kind == "exit":
        os._exit(int(what))
    number = signal.Signals[f"SIG{what}"]
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(600)


def _leave(mine: dict[str, object]) -> None:
    _print(str(mine["last_words"]))
    os._exit(int(str(mine["code_after_term"])))


def _print(text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    while data:
        data = data[os.write(1, data) :]


def _sleep_until(moment: float) -> None:
    while (left := moment - time.time()) > 0:
        time.sleep(left)


main()
