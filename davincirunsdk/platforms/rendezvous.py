"""Where the workers of a job meet: address and port of node 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.platforms.site import whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.options import Wish
    from davincirunsdk.platforms.site import Site

LOOPBACK = "127.0.0.1"

TORCH_PORT = 29500
"""torchrun's own default, for several nodes of which nobody told the port."""


def address(wish: Wish, env: Mapping[str, str], site: Site, nnodes: int) -> str | None:
    """Tell the address: the wish's, else the environment's, else the platform's.

    Returns:
        The address; this host for one node alone; None if several nodes were not told.
    """
    wanted = wish.master_addr or env.get("MASTER_ADDR")
    if wanted:
        return wanted
    if nnodes == 1:
        return LOOPBACK
    return site.reach(site.master_addr) if site.master_addr else None


def port(
    wish: Wish, env: Mapping[str, str], site: Site, nnodes: int, *, fallback: int = TORCH_PORT
) -> int | None:
    """Tell the port: the wish's, else the environment's, else the platform's.

    Returns:
        The port; None (any free one will do) for one node alone; the fallback if several nodes were
        not told, as they must all come to the same.
    """
    wanted = wish.master_port or whole(env, "MASTER_PORT", least=1, most=65535)
    if wanted or nnodes == 1:
        return wanted
    return site.master_port or fallback
