"""What a platform says about this job, and what a platform is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from davincirunsdk.errors import PlatformError
from davincirunsdk.host.ports import PORTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the platform's variables say, as far as they say it.

    Attributes:
        title: Name of the platform for people.
        said_by: The variables that `nnodes`, `node_rank`, `nproc_per_node`, `master_addr` and
            `master_port` come from.
        hosts: Names or addresses of all nodes in node rank order, () if not told.
        nnodes: Number of nodes, None if not told.
        node_rank: Place of this node, None if not told.
        nproc_per_node: Workers of this node, None if not told.
        master_addr: Host or address of node 0, None if not told.
        master_port: Port that all nodes agree on, None if not told.
        log_dir: The platform's folder for worker logs, None if it has none.
        writes_table: True where the platform writes a rank table while the job starts, so that a
            missing one is worth waiting for.
        pods: True where the nodes are pods, whose names are known only once they have started.
        hint: What to tell the user whose table never comes.
        objection: Why the place must not be relied upon: what was found and what to write instead;
            "" if it may.
        offer: True where it speaks of nodes that could be used, and not of launchers that it has
            started on each: then every wish for other nodes is a choice, not a contradiction.
        scheduler_elsewhere: True where MindSpore's scheduler runs apart from all workers.
        reach: Finds an address for a host's name that need not be known to the resolver; may block.
    """

    title: str = ""
    said_by: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    nnodes: int | None = None
    node_rank: int | None = None
    nproc_per_node: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    log_dir: Path | None = None
    writes_table: bool = False
    pods: bool = False
    hint: str = ""
    objection: str = ""
    offer: bool = False
    scheduler_elsewhere: bool = False
    reach: Callable[[str], str] = field(default=str, compare=False)


class Platform(Protocol):
    """A kind of place to run in."""

    @property
    def NAME(self) -> str:
        """Name for `Cluster.platform`."""

    def is_present(self, env: Mapping[str, str]) -> bool:
        """Tell from the environment alone whether we run there."""

    def site(self, env: Mapping[str, str]) -> Site:
        """Read the platform's variables; raise `PlatformError` where they contradict themselves."""


def whole(env: Mapping[str, str], name: str, *, most: int | None = None, least: int = 0) -> int | None:
    """Read a whole number from a variable.

    Args:
        env: The environment.
        name: The variable.
        most: Largest value that makes sense.
        least: Smallest value that makes sense.

    Returns:
        The number, None if the variable is unset or empty.

    Raises:
        PlatformError: It holds something else. The value is not repeated: it may be a secret in the
            wrong place.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if value < least or (most is not None and value > most):
        span = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise PlatformError(
            f"found no such number in the environment variable {name}; expected a whole number {span}: "
            "correct or unset it"
        )
    return value


def first_set(env: Mapping[str, str], *names: str) -> str:
    """Name the first of some variables that is set and not empty, "" if none is."""
    return next((name for name in names if env.get(name, "").strip()), "")


def names(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Read a comma list from a variable, blanks and empty parts left out."""
    return tuple(part.strip() for part in env.get(name, "").split(",") if part.strip())


def shared_port(key: str) -> int:
    """Derive a port from a text that all nodes of the job have and other jobs have not."""
    import hashlib

    return PORTS[int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % len(PORTS)]
