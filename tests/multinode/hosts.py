"""Two network namespaces as two hosts: each with its own loopback, joined by one cable."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace.

    Attributes:
        name: Of the namespace.
        address: Its own on the cable.
        interface: Its end of the cable.
    """

    name: str
    address: str
    interface: str

    def on(self, *command: str) -> list[str]:
        """Give the words that run a command on this host."""
        return ["ip", "netns", "exec", self.name, *command]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other and nothing else; they are removed at the end."""
    # Names of interfaces have at most 15 characters.
    tag = f"dr{os.getpid()}"
    first, second = (
        Host(name=f"{tag}{letter}", address=f"10.77.0.{number}", interface=f"{tag}{letter}")
        for letter, number in (("a", 1), ("b", 2))
    )
    made = []
    try:
        for host in (first, second):
            ip("netns", "add", host.name)
            made.append(host.name)
        ip("link", "add", first.interface, "netns", first.name, "type", "veth",
            "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for host in (first, second):
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                ip("-n", host.name, "link", "set", interface, "up")
        yield first, second
    finally:
        for name in made:
            ip("netns", "del", name)


def ip(*words: str) -> None:
    """Run `ip`, which has to succeed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}; this needs root and iproute2"
