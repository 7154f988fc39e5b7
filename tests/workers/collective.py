"""A stand-in for a collective: ranks meet at rank 0 over a socket, and one of them may not come.

`collective.py KIND [STEPS]`: each rank takes part in STEPS meetings, then the last rank goes astray as KIND
says while the others wait for it. Rank 0 keeps the address in the file `meeting` of the work folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Group:
    """Ranks that wait for each other."""

    def __init__(self) -> None:
        if RANK == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                hidden = Path(f".meeting-{os.getpid()}")
                hidden.write_text(str(server.getsockname()[1]))
                hidden.rename("meeting")
                self.peers = [server.accept()[0] for _ in range(SIZE - 1)]
        else:
            while not Path("meeting").exists():
                time.sleep(0.01)
            self.peers = [socket.create_connection(("127.0.0.1", int(Path("meeting").read_text())))]

    def all_reduce(self) -> None:
        """Wait for all ranks."""
        if RANK == 0:
            for peer in self.peers:
                receive(peer)
            for peer in self.peers:
                peer.sendall(b"!")
        else:
            self.peers[0].sendall(b"?")
            receive(self.peers[0])


def receive(peer: socket.socket) -> None:
    """Wait for a peer; that one has ended is not noticed, as between NPUs."""
    if not peer.recv(1):
        time.sleep(600)


def sleeps() -> None:
    """Never comes."""
    time.sleep(600)


def spins() -> None:
    """Burns a processor."""
    while True:
        pass


def stops() -> None:
    """Is stopped, as by a debugger or a scheduler."""
    os.kill(os.getpid(), signal.SIGSTOP)


def leaves() -> None:
    """Ends well while its peers wait."""
    os._exit(0)


def waits_for_helper() -> None:
    """Waits for a process of its own, which sleeps."""
    subprocess.run(["sleep", "600"], check=True)


KINDS = {"sleeps": sleeps, "spins": spins, "stops": stops, "leaves": leaves, "helper": waits_for_helper}


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if "--register" in sys.argv:
        import davincirunsdk

        davincirunsdk.register_stacks()
    group = Group()
    for step in range(1, steps + 1):
        group.all_reduce()
        print(f"step {step} loss {1 / step:.3f}", flush=True)
    if RANK == SIZE - 1:
        # Where a rank waits for its peers is seen when they wait, too.
        Path("astray").touch()
        KINDS[kind]()
    while not Path("astray").exists():
        time.sleep(0.01)
    group.all_reduce()


with contextlib.suppress(KeyboardInterrupt):
    main()
