"""More than one node from one call: an engine places one agent per node and carries the messages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from davincirunsdk.engines import ray, ssh

__all__ = ["ray", "ssh"]


def __getattr__(name: str) -> object:
    # Lazy, so that `davincirunsdk.engines.ray` needs no import of its own and the command stays quick.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
