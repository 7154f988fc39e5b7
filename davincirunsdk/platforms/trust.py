"""Whom to believe about the size of the job and the place of this node.

The order of trust: what the user wrote for this job (command line, then DAVINCIRUN_* variables and the
file named by --config, which are other ways to write the same options), the engine that started us, the
rank table, the platform (ModelArts, AscendJob, Volcano, Slurm), the names of other launchers (PET_*, then
OMPI_COMM_WORLD_*). The first that speaks is believed. One that says otherwise is no detail: two nodes would
take the same ranks, or some none. So a contradiction is an error that names both, unless the user allows
it, or has made a choice that a platform leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from davincirunsdk.cluster import Fact
from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from davincirunsdk.options import Wish
    from davincirunsdk.platforms.site import Site

WORDS = {
    "nnodes": "number of nodes",
    "node_rank": "node rank",
    "nproc_per_node": "workers per node",
    "master_addr": "address of node 0",
    "master_port": "port of the rendezvous",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one source says about one thing.

    Attributes:
        name: A key of `WORDS`.
        value: What it says.
        source: Who says it, for people: option or variable.
    """

    name: str
    value: int | str
    source: str

    def __str__(self) -> str:
        return f"{WORDS[self.name]} {self.value} from {self.source}"


def facts(said: Iterable[Claim]) -> tuple[Fact, ...]:
    """Turn claims in order of trust into facts: the first about each thing is the one believed."""
    believed: dict[str, Claim] = {}
    result = []
    for claim in said:
        first = believed.setdefault(claim.name, claim)
        result.append(
            Fact(
                name=WORDS[claim.name],
                value=str(claim.value),
                source=claim.source,
                believed=first is claim,
                agrees=first.value == claim.value,
            )
        )
    return tuple(result)


def claims_of_wish(wish: Wish) -> tuple[Claim, ...]:
    """List what the user wrote."""
    values = {name: getattr(wish, name) for name in WORDS}
    return tuple(
        Claim(name=name, value=value, source=f"--{name.replace('_', '-')} ({name})")
        for name, value in values.items()
        if value is not None
    )


def claims_of_site(site: Site) -> tuple[Claim, ...]:
    """List what a platform says."""
    values = {name: getattr(site, name) for name in WORDS}
    return tuple(
        Claim(
            name=name,
            value=value,
            source=f"{site.title} ({site.said_by[name]})" if name in site.said_by else site.title,
        )
        for name, value in values.items()
        if value is not None
    )


def settle(name: str, claims: Iterable[Claim], *, ignore: bool) -> Claim | None:
    """Believe the first of the claims about one thing.

    Args:
        name: A key of `WORDS`.
        claims: In order of trust.
        ignore: True if the user allows contradictions.

    Returns:
        The claim, None if nobody says anything.

    Raises:
        PlatformError: Another says otherwise.
    """
    said = [claim for claim in claims if claim.name == name]
    if not said:
        return None
    other = next((claim for claim in said if claim.value != said[0].value), None)
    if other is not None and not ignore:
        raise PlatformError(
            f"found {said[0]}, but {other}; expected both to agree, for ranks would be started twice or not "
            "at all: leave the wrong one out, or let the first count with --ignore-platform (ignore_platform)"
        )
    return said[0]


def relied_upon(
    sites: tuple[Site, ...], wish: Wish, *, table: str, ignore: bool, notify: Callable[[str], None]
) -> tuple[Site, ...]:
    """Leave the places aside that the user's choice has made meaningless, and refuse those that mislead.

    Args:
        sites: What the platforms say, in order of trust.
        wish: What the user asked for.
        table: The rank table, "" without one.
        ignore: True if the user allows contradictions.
        notify: Takes a line for each that is left aside.

    Returns:
        The sites, without size and place where these do not count.

    Raises:
        PlatformError: A platform has started us in a way that cannot be meant.
    """
    alone = wish.nnodes == 1 and wish.node_rank is None
    chosen = bool(table) or wish.nnodes is not None or wish.node_rank is not None
    result = []
    for site in sites:
        if alone or (site.offer and (chosen or not site.objection)):
            if site.nnodes not in (None, 1) and (alone or chosen):
                instead = "rank table" if wish.nnodes is None and wish.node_rank is None else "option"
                place = "" if site.node_rank is None else f", of which this is node {site.node_rank}"
                notify(
                    f"the {instead} says which nodes are the job's; left aside: the {site.nnodes} nodes of "
                    f"{site.title}{place}"
                )
            result.append(without_place(site))
        elif site.objection:
            if not ignore:
                raise PlatformError(site.objection)
            result.append(without_place(site))
        else:
            result.append(site)
    return tuple(result)


def without_place(site: Site) -> Site:
    """Keep of a platform what is true of this node alone."""
    return replace(
        site,
        hosts=(),
        nnodes=None,
        node_rank=None,
        nproc_per_node=None,
        master_addr=None,
        master_port=None,
        scheduler_elsewhere=False,
    )
