"""Launchers that start apart: from a rank's death on node 2 to SIGTERM on the others, and to all returns.

    python benchmarks/apart.py [RUNS]

Three launchers on this machine, two workers each, with a meeting at node 0 over loopback.
"""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = """
import os, signal, sys, time
def note(word):
    os.write(1, f"{word} {time.time():.6f}\\n".encode())
signal.signal(signal.SIGTERM, lambda *_: (note("told"), os._exit(0)))
note("ready")
if os.environ["RANK"] == "5":
    time.sleep(2)
    note("died")
    os._exit(7)
time.sleep(60)
"""


def measure(folder: Path) -> tuple[float, float]:
    """Run one job; seconds from the death to the last SIGTERM on another node, and to the last return."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "davincirunsdk", "--nnodes", "3", "--node-rank", str(rank),
             "--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "2", "--quiet",
             "--log-dir", str(folder / str(rank)), sys.executable, "-S", "-c", WORKER],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(3)
    ]  # fmt: skip
    codes = [node.wait() for node in nodes]
    ended = time.time()
    assert codes == [7, 7, 7], codes
    logs = {
        rank: "\n".join(path.read_text() for path in (folder / str(rank)).glob("*-proc-rank-*.txt"))
        for rank in range(3)
    }
    (died,) = re.findall(r"died ([\d.]+)", logs[2])
    told = [float(moment) for rank in (0, 1) for moment in re.findall(r"told ([\d.]+)", logs[rank])]
    return max(told) - float(died), ended - float(died)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    found = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(folder)))
    told, returned = zip(*found, strict=True)
    for name, values in (("SIGTERM on the other nodes", told), ("return of all launchers", returned)):
        print(f"{name}: median {statistics.median(values) * 1000:.0f} ms, most {max(values) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
