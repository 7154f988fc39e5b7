"""Network namespaces as hosts with a real sshd on each: own network, own processes, own name, own devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hosts import ip
from processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SSHD = "/usr/sbin/sshd"

_SERVER = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {own}/authorized
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
MaxStartups 100
PermitRootLogin yes
PidFile {own}/sshd.pid
SetEnv PYTEST_OF_DAVINCIRUN={mark}
"""
_CLIENT = """\
Host h*
 IdentityFile {folder}/user_key
 IdentitiesOnly yes
 UserKnownHostsFile {folder}/known
 StrictHostKeyChecking yes
"""
_BOOT = """\
hostname {name}
mount -t overlay -o lowerdir=/etc,upperdir={own}/etc,workdir={own}/work overlay /etc
mount --bind {own}/dev /dev
{more}
{sshd} -D -e -f {own}/sshd_config 2>>{own}/sshd.log &
wait
while :; do sleep 1000 & wait; done
"""


@dataclass(slots=True, kw_only=True)
class SshHost:
    """One host: its first process is a shell that waits, so that its sshd can be ended without it."""

    name: str
    namespace: str
    address: str
    interface: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def cut(self) -> None:
        """Take its cable out."""
        ip("-n", self.namespace, "link", "set", "eth", "down")

    def mend(self) -> None:
        """Put it in again."""
        ip("-n", self.namespace, "link", "set", "eth", "up")

    def power_off(self) -> None:
        """End all its processes at once, as a loss of power does: the peer is told nothing."""
        self.cut()
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def signal_sshd(self, number: signal.Signals) -> None:
        """Signal the sshd that listens; its sessions go on, as after a restart."""
        listener = int((self.folder / "sshd.pid").read_text())
        for pid in self.pids():
            if f"NSpid:\t{pid}\t{listener}\n" in _read(f"/proc/{pid}/status"):
                os.kill(pid, number)

    def restart_sshd(self) -> None:
        """End the sshd that listens, and start another one."""
        old = (self.folder / "sshd.pid").read_text()
        self.signal_sshd(signal.SIGTERM)
        wait_until(lambda: not (self.folder / "sshd.pid").exists(), what=f"sshd of {self.name} ends")
        words = self.command(
            SSHD, "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "sshd.log")
        )
        subprocess.run(words, check=True)
        wait_until((self.folder / "sshd.pid").exists, what=f"a new sshd of {self.name}")
        assert (self.folder / "sshd.pid").read_text() != old

    def pids(self) -> list[int]:
        """Every process of this host, as numbered outside."""
        assert self.process is not None
        children = _read(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()
        if not children:
            return []
        space = os.readlink(f"/proc/{children[0]}/ns/pid")
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _link(pid) == space]

    def command(self, *words: str) -> list[str]:
        """Give the words that run a command on this host."""
        assert self.process is not None
        (first,) = _read(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()
        return ["nsenter", "-t", first, "--net", "--uts", "--pid", "--mount", *words]

    def running(self, word: str) -> list[int]:
        """Processes of this host with a word in their command line."""
        return [pid for pid in self.pids() if word in _read(f"/proc/{pid}/cmdline").replace("\0", " ")]


@dataclass(slots=True, kw_only=True)
class SshHosts:
    """All of them, and the place that the driver runs in."""

    folder: Path
    namespace: str
    hosts: list[SshHost] = field(default_factory=list)

    @property
    def names(self) -> str:
        return ",".join(host.name for host in self.hosts)

    @property
    def ssh(self) -> str:
        """For `--ssh`."""
        return f"ssh -F {self.folder}/ssh_config"

    def on(self, *command: str) -> list[str]:
        """Give the words that run a command where the driver runs."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def launch(self, *options: str, hosts: str | None = None) -> list[str]:
        """Give the words of a davincirun over these hosts."""
        named = ["--hosts", self.names if hosts is None else hosts] if hosts != "" else []
        return self.on(
            sys.executable, "-m", "davincirunsdk", "--engine", "ssh", "--ssh", self.ssh,
            "--work-dir", str(self.folder), "--log-dir", str(self.folder / "log"), *named, *options,
        )  # fmt: skip


@contextmanager
def ssh_hosts(folder: Path, count: int = 3, *, devices: int = 0, more: str = "true") -> Iterator[SshHosts]:
    """Make hosts named h1, h2, ... that reach each other and nothing else; all is removed at the end.

    Args:
        folder: For keys, logs and the hosts' own files.
        count: Number of hosts.
        devices: NPUs of each, as far as device files and addresses show them.
        more: Shell commands for each, before its sshd starts.
    """
    tag = f"ds{os.getpid()}"
    made = SshHosts(folder=folder, namespace=f"{tag}d")
    spaces = [f"{tag}s", made.namespace, *(f"{tag}h{n}" for n in range(1, count + 1))]
    _make_keys(folder, count)
    Path("/run/sshd").mkdir(exist_ok=True)
    added: list[str] = []
    try:
        for space in spaces:
            ip("netns", "add", space)
            added.append(space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", spaces[0], "link", "add", "switch", "type", "bridge")
        ip("-n", spaces[0], "link", "set", "switch", "up")
        for number, space in enumerate(spaces[1:]):
            port = f"p{number}"
            ip("link", "add", "eth", "netns", space, "type", "veth", "peer", "name", port, "netns", spaces[0])
            ip("-n", spaces[0], "link", "set", port, "master", "switch")
            ip("-n", spaces[0], "link", "set", port, "up")
            ip("-n", space, "addr", "add", f"10.78.0.{number or 100}/24", "dev", "eth")
            ip("-n", space, "link", "set", "eth", "up")
            if number:
                host = SshHost(
                    name=f"h{number}",
                    namespace=space,
                    address=f"10.78.0.{number}",
                    interface="eth",
                    folder=folder / f"h{number}",
                )
                made.hosts.append(host)
                _boot(host, devices, more)
        for host in made.hosts:
            wait_until((host.folder / "sshd.pid").exists, what=f"sshd of {host.name}")
        yield made
    finally:
        for host in made.hosts:
            if host.process is not None:
                host.process.kill()
                host.process.wait()
        for space in added:
            ip("netns", "del", space)


def _make_keys(folder: Path, count: int) -> None:
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    addresses = ",".join(f"10.78.0.{number}" for number in range(1, count + 1))
    (folder / "known").write_text(f"{addresses} {key}\n")
    client = _CLIENT.format(folder=folder)
    for number in range(1, count + 1):
        client += f"Host h{number}\n HostName 10.78.0.{number}\n"
    (folder / "ssh_config").write_text(client)


def _boot(host: SshHost, devices: int, more: str) -> None:
    own = host.folder
    for name in ("etc", "work", "dev"):
        (own / name).mkdir(parents=True)
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(own / "dev" / name, 0o020666, os.makedev(1, minor))
        (own / "dev" / name).chmod(0o666)
    for number in range(devices):
        (own / "dev" / f"davinci{number}").touch()
    if devices:
        network = host.address.rpartition(".")[2]
        lines = [f"address_{number}=192.168.{network}.{number + 1}" for number in range(devices)]
        (own / "etc" / "hccn.conf").write_text("\n".join(lines) + "\n")
    (own / "authorized").write_text((own.parent / "user_key.pub").read_text())
    mark = os.environ.get("PYTEST_OF_DAVINCIRUN", "")
    (own / "sshd_config").write_text(_SERVER.format(folder=own.parent, own=own, mark=mark))
    boot = _BOOT.format(name=host.name, own=own, sshd=SSHD, more=more)
    host.process = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--pid", "--mount",
         "--fork", "--kill-child", "--mount-proc", "sh", "-c", boot],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _link(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
