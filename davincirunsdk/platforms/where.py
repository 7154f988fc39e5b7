"""Where we are, as data: what every source says about size and place, and what would come of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import DavinciRunError
from davincirunsdk.platforms import detect, locate, places, rendezvous, sites_of, without_outer_job
from davincirunsdk.platforms.trust import claims_of_site, claims_of_wish, facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.cluster import Cluster, Fact
    from davincirunsdk.options import Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What is known about this place, without anything being started.

    Attributes:
        platform: Name of the platform.
        facts: What each source says about size and place, in order of trust.
        rank_table: The table that a job here would use, None without one.
        named_by: The option or variable that names the table, "" for a known place.
        cluster: What a job here would be; None where that cannot be told.
        problem: Why it cannot, "" where it can.
        notes: Lines for people that a start would give.
    """

    platform: str
    facts: tuple[Fact, ...]
    rank_table: Path | None
    named_by: str
    cluster: Cluster | None
    problem: str
    notes: tuple[str, ...] = ()


async def where(env: Mapping[str, str], wish: Wish, *, root: Path = Path("/")) -> Whereabouts:
    """Find out where we are; a rank table is not waited for.

    Args:
        env: The environment.
        wish: What the user would ask for.
        root: Folder that stands for `/` in all fixed paths.

    Returns:
        What was found. An error becomes its `problem`; then the facts are what each source says.

    Cancellation ends the looking.
    """
    wish = replace(wish, rank_table_timeout=0.0)
    env = without_outer_job(env)
    notes: list[str] = []
    cluster, problem, place = None, "", None
    said: tuple[Fact, ...] = ()
    try:
        sites = await in_thread(lambda: sites_of(env))
        said = facts(
            (
                *claims_of_wish(wish),
                *rendezvous.claims(env),
                *(claim for site in sites for claim in claims_of_site(site)),
            )
        )
        place = await in_thread(lambda: places.find(env, given=wish.rank_table, root=root))
        cluster = await locate(wish, env, notify=notes.append, root=root)
    except DavinciRunError as error:
        problem = str(error)
    return Whereabouts(
        platform=(await in_thread(lambda: detect(env))).NAME,
        facts=cluster.facts if cluster is not None else said,
        rank_table=place.path if place is not None else None,
        named_by=place.named_by if place is not None else "",
        cluster=cluster,
        problem=problem,
        notes=tuple(notes),
    )
