"""A plain machine, or anything that tells nothing: one node unless the options say more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.platforms.site import Site

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "host"


def is_present(env: Mapping[str, str]) -> bool:
    """A plain machine is what is left when no other platform shows."""
    del env
    return True


def site(env: Mapping[str, str]) -> Site:
    """Tell nothing: MASTER_ADDR and the like are read for every platform alike."""
    del env
    return Site()
