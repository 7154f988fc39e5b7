"""Who may come to a meeting of launchers: challenge, proof and place; nobody is heard before."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from davincirunsdk import __version__
from davincirunsdk.engines.wire import Message, encode
from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEY_VARIABLE = "DAVINCIRUN_MEET_KEY"

MOST_BYTES = 4096
"""Size of a message from somebody who is not known yet."""

PATIENCE = 5.0
"""Seconds for one step of the admission."""

_NONCE = 32


class Challenge(Message, frozen=True, kw_only=True):
    """Node 0's first word to whoever connects."""

    nonce: bytes
    version: str


class Introduction(Message, frozen=True, kw_only=True):
    """Who wants to come in.

    Attributes:
        job: Name of the job, "" where only each host's own name would stand for it.
        node_rank: Place of the node.
        nnodes: Nodes of the job.
        world_size: Workers of the job.
        host: Name of the host, for people.
        version: Of this package.
        nonce: What node 0 has to prove its knowledge of the key with.
        proof: Made of the challenge, all of the above and the key.
    """

    job: str
    node_rank: int
    nnodes: int
    world_size: int
    host: str
    version: str
    nonce: bytes
    proof: bytes = b""


class Welcome(Message, frozen=True, kw_only=True):
    """The node is in; its proof says that this is node 0 of the same job."""

    host: str
    proof: bytes


class Declined(Message, frozen=True, kw_only=True):
    """The node is not let in.

    Attributes:
        why: In words, for its user.
        clash: The two do not fit into one job, so that the one that came later must end.
        later: It may be let in when it asks again.
    """

    why: str
    clash: bool = False
    later: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a launcher says of itself, and the key that it proves it with.

    Attributes:
        job: See `Introduction`, as for all but the key.
        node_rank: See there.
        nnodes: See there.
        world_size: See there.
        host: See there.
        key: Shared by the launchers of the job, b"" without one. Never shown.
    """

    job: str
    node_rank: int
    nnodes: int
    world_size: int
    host: str
    key: bytes

    def __repr__(self) -> str:
        """Without the key."""
        return f"<node {self.node_rank} of {self.nnodes}, {self.host}>"

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.node_rank} ({self.host})"


def challenge() -> Challenge:
    """Make one that was never used."""
    return Challenge(nonce=secrets.token_bytes(_NONCE), version=__version__)


def introduce(own: Identity, asked: Challenge) -> Introduction:
    """Answer a challenge."""
    bare = Introduction(
        job=own.job,
        node_rank=own.node_rank,
        nnodes=own.nnodes,
        world_size=own.world_size,
        host=own.host,
        version=__version__,
        nonce=secrets.token_bytes(_NONCE),
    )
    return msgspec.structs.replace(bare, proof=_prove(own.key, b"guest", asked.nonce, encode(bare)))


def welcome(own: Identity, guest: Introduction) -> Welcome:
    """Let a node in."""
    return Welcome(host=own.host, proof=_prove(own.key, b"host", guest.nonce, own.host.encode()))


def is_welcome_genuine(own: Identity, introduction: Introduction, answer: Welcome) -> bool:
    """Tell whether whoever answered knows the key."""
    expected = _prove(own.key, b"host", introduction.nonce, answer.host.encode())
    return hmac.compare_digest(expected, answer.proof)


def is_genuine(own: Identity, asked: Challenge, guest: Introduction) -> bool:
    """Tell whether whoever came knows the key."""
    bare = msgspec.structs.replace(guest, proof=b"")
    expected = _prove(own.key, b"guest", asked.nonce, encode(bare))
    return hmac.compare_digest(expected, guest.proof)


def contradiction(own: Identity, guest: Introduction) -> str:
    """Say why a node cannot be of this job, naming both sides; "" if it can."""
    there = f"node {guest.node_rank} ({guest.host})"
    if own.job and guest.job and own.job != guest.job:
        return (
            f"{there} is of job {guest.job}, {own.name} of job {own.job}: give each job a port of its own "
            "with --meet-port (meet_port)"
        )
    if (own.nnodes, own.world_size) != (guest.nnodes, guest.world_size):
        return (
            f"{there} has a job of {guest.nnodes} nodes and {guest.world_size} workers, {own.name} one of "
            f"{own.nnodes} nodes and {own.world_size} workers: start all nodes with the same sizes"
        )
    if not 0 < guest.node_rank < own.nnodes:
        return (
            f"{guest.host} says that it is node {guest.node_rank}, and so does {own.host}: give each node a "
            "rank of its own with --node-rank (node_rank)"
            if guest.node_rank == own.node_rank
            else f"{guest.host} says that it is node {guest.node_rank} of {own.nnodes} nodes"
        )
    return ""


def read_key(env: Mapping[str, str], path: Path | None) -> bytes:
    """Read the key that all launchers of a job share; blocks shortly.

    Args:
        env: The environment.
        path: File that holds it, None for the variable's.

    Returns:
        The key, b"" without one.

    Raises:
        PlatformError: The file cannot be read or is empty.
    """
    if path is None:
        return os.fsencode(env.get(KEY_VARIABLE, "").strip())
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise PlatformError(
            f"meet_key_file {path} cannot be read: {error.strerror}; expected a file with the same text on "
            "all nodes"
        ) from None
    if not key:
        raise PlatformError(f"meet_key_file {path} is empty; expected the same text on all nodes")
    return key


def _prove(key: bytes, side: bytes, nonce: bytes, text: bytes) -> bytes:
    parts = (b"davincirun meeting", side, nonce, text)
    return hmac.new(key, b"".join(hashlib.sha256(part).digest() for part in parts), "sha256").digest()
