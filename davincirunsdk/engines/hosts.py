"""Hosts as users write them: `a,b:8`, `atlas[01-16]`, and the host files of mpirun and DeepSpeed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.errors import PlatformError
from davincirunsdk.host import addresses
from davincirunsdk.platforms.slurm import expand

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

MOST_HOSTS = 10_000
"""A longer list is a mistake in a range."""

_EXAMPLE = "expected hosts such as a,b:8 or atlas[01-16]"
_LINE = "expected lines such as `atlas01 slots=8`"
_ENTRY = re.compile(
    r"(?P<user>[^@]*@)?(?:\[(?P<address>[^\]]*:[^\]]*)\]|(?P<name>[^:@]+))(?::(?P<slots>[^:]*))?"
)
"""Only an IPv6 address stands in brackets with a colon in them; other brackets hold ranges."""
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.+$-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")
_SLOTS = frozenset({"slots", "cpu", "cpus", "count"})
_IGNORED = frozenset({"max_slots", "max-slots"})
_USERS = frozenset({"user", "username", "user_name"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host to be reached over ssh.

    Attributes:
        name: What ssh is to be told, such as `atlas01` or `user@10.0.0.1`.
        slots: Workers that it may have, None if nobody said so.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read a list of hosts as mpirun's `--host` has it, with ranges.

    Args:
        text: Such as `a,b:8`, `user@a`, `atlas[01-16,20]:8` or `[fd00::1]:8`.

    Returns:
        The hosts in order, each once; see `_merge` for hosts that are named again.

    Raises:
        ValueError: It cannot be read.
    """
    parts = [part.strip() for part in _split(text) if part.strip()]
    if not parts:
        raise ValueError(f"hosts is {text!r}, which names none: {_EXAMPLE}")
    return _merge((host for part in parts for host in _entry(part, f"in {text!r}")), "hosts")


def read_hostfile(path: str | os.PathLike[str]) -> tuple[Host, ...]:
    """Read a host file as mpirun and DeepSpeed have it; blocks shortly.

    A line is a host as in `parse_hosts`, then `slots=N` (also `cpu=`, `count=`), `max_slots=N`, which
    makes no difference here, or `user=NAME`. `#` begins a comment. A host on several lines counts as
    for mpirun: its slots add up.

    Returns:
        The hosts in order, each once.

    Raises:
        ValueError: The file cannot be read, names no host, or has a line that cannot be understood.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ValueError(f"hostfile {path} cannot be read: {error.strerror}; {_LINE}") from None
    found: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            found += _line(words, f"in {path}, line {number}")
    if not found:
        raise ValueError(f"hostfile {path} names no host: {_LINE}")
    return _merge(found, f"hostfile {path}")


def choose(
    hosts: Sequence[Host], *, nnodes: int | None, nproc_per_node: int | None
) -> tuple[tuple[str, ...], int | None]:
    """Settle which hosts a job has and how many workers on each.

    Args:
        hosts: Those that were named.
        nnodes: How many to take, from the first on; None for all.
        nproc_per_node: Workers on each, None for as many as their slots, or one per device.

    Returns:
        The names of the hosts, and the workers on each; None for one per device.

    Raises:
        ValueError: There are not so many hosts, or their slots do not fit.
    """
    if nnodes is not None and nnodes > len(hosts):
        raise ValueError(f"nnodes is {nnodes}, but {len(hosts)} hosts are named: name more, or ask for fewer")
    chosen = hosts[:nnodes]
    slots = {host.slots: host.name for host in chosen if host.slots is not None}
    if nproc_per_node is None and len(slots) > 1:
        listed = ", ".join(f"{count} on {name}" for count, name in slots.items())
        raise ValueError(
            f"hosts have different slots: {listed}; expected the same on all, or --nproc-per-node "
            "(nproc_per_node) to say how many workers each has"
        )
    if nproc_per_node is None and slots:
        (nproc_per_node,) = slots
    for host in chosen:
        if host.slots is not None and nproc_per_node is not None and host.slots < nproc_per_node:
            raise ValueError(
                f"host {host.name} has {host.slots} slots; expected at least {nproc_per_node}, the "
                "nproc_per_node asked for"
            )
    return tuple(host.name for host in chosen), nproc_per_node


def _line(words: Sequence[str], where: str) -> Iterator[Host]:
    first, *settings = words
    slots: int | None = None
    user = ""
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or key not in (_SLOTS | _IGNORED | _USERS):
            raise ValueError(f"found {setting!r} {where}; {_LINE}")
        if key in _USERS:
            user = value
        elif key in _SLOTS:
            slots = _count(value, setting, where)
        else:
            _count(value, setting, where)
    for host in _entry(first, where):
        name = f"{user}@{host.name}" if user and "@" not in host.name else host.name
        yield Host(name=_checked(name, where), slots=host.slots if slots is None else slots)


def _entry(text: str, where: str) -> Iterator[Host]:
    """Read one entry, which may stand for many hosts."""
    if addresses.is_address(text):
        yield Host(name=text)
        return
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ValueError(f"found {text!r} {where}; {_EXAMPLE}")
    user, address, name, count = match["user"] or "", match["address"], match["name"], match["slots"]
    slots = None if count is None else _count(count, text, where)
    if address is not None:
        if not addresses.is_address(address):
            raise ValueError(f"found {text!r} {where}, where {address!r} is not an address; {_EXAMPLE}")
        yield Host(name=_checked(f"{user}{address}", where), slots=slots)
        return
    try:
        names = expand(name, variable="the list of hosts")
    except PlatformError as error:
        raise ValueError(f"{error} ({where})") from None
    for one in names:
        yield Host(name=_checked(f"{user}{one}", where), slots=slots)


def _split(text: str) -> Iterator[str]:
    """Split at commas and blanks outside of brackets."""
    return iter(re.split(r"[,\s]+(?![^\[]*\])", text))


def _count(text: str, shown: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) and len(text) < 9):
        raise ValueError(f"found {shown!r} {where}; expected a number of slots of at least 1")
    return int(text)


def _checked(name: str, where: str) -> str:
    # ssh would take a name that begins with a dash for an option.
    if not _NAME.fullmatch(name):
        raise ValueError(f"found {name!r} {where}, which is not the name of a host; {_EXAMPLE}")
    return name


def _merge(hosts: Iterable[Host], source: str) -> tuple[Host, ...]:
    """Join entries of one host: their slots add up, and where none says so each entry is one slot."""
    found: dict[str, Host] = {}
    again: set[str] = set()
    for host in hosts:
        known = found.get(host.name)
        if known is None:
            found[host.name] = host
        else:
            again.add(host.name)
            found[host.name] = Host(name=host.name, slots=(known.slots or 1) + (host.slots or 1))
        if len(found) > MOST_HOSTS:
            raise ValueError(f"{source} names more than {MOST_HOSTS} hosts: {_EXAMPLE}")
    if not again:
        return tuple(found.values())
    return tuple(Host(name=host.name, slots=host.slots or 1) for host in found.values())
