"""Network namespaces as hosts: each with its own loopback and its cable to the others."""

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
        named: What runs on it knows it by its name, rather than by this machine's.
    """

    name: str
    address: str
    interface: str
    named: bool = False

    def on(self, *command: str, own: str = "", npus: int = 0) -> list[str]:
        """Give the words that run a command on this host.

        Args:
            command: Its words.
            own: A folder of which this command has one of its own, as on a host's own disk.
            npus: NPUs whose device files this command sees.
        """
        setting = f"hostname {self.name}; " if self.named else ""
        setting += f"mount -t tmpfs none '{own}'; " if own else ""
        if npus:
            setting += "mount -t tmpfs none /mnt; mkdir /mnt/upper /mnt/work; "
            setting += "mount -t overlay none -o lowerdir=/dev,upperdir=/mnt/upper,workdir=/mnt/work /dev; "
            files = " ".join(f"/dev/davinci{number}" for number in range(npus))
            setting += f"mount -t tmpfs none /dev/shm; touch {files}; "
        words = ["unshare", "--uts", "sh", "-c", f'{setting}exec "$@"', "sh"] if setting else []
        return ["ip", "netns", "exec", self.name, *words, *command]


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


@contextmanager
def named_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Make hosts with names of their own that reach each other through a switch, and nothing else."""
    tag = f"dr{os.getpid()}"
    switch = f"{tag}s"
    hosts = tuple(
        Host(name=f"{tag}h{number}", address=f"10.77.1.{number + 1}", interface=f"{tag}h{number}", named=True)
        for number in range(count)
    )
    made = []
    try:
        for name in (switch, *(host.name for host in hosts)):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            ip("link", "add", host.interface, "netns", host.name, "type", "veth",
                "peer", "name", f"port{number}", "netns", switch)  # fmt: skip
            ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                ip("-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for name in made:
            ip("netns", "del", name)


def ip(*words: str) -> None:
    """Run `ip`, which has to succeed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}; this needs root and iproute2"
