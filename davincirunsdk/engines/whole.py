"""A job on several nodes as one call, from its start to its end."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.engines.driver import NodesManager
    from davincirunsdk.types import RunResult

P = ParamSpec("P")
T = TypeVar("T")


def called_like(model: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of another, for type checkers and for `help`."""

    def give(function: Callable[..., T]) -> Callable[P, T]:
        function.__signature__ = inspect.signature(model).replace(  # type: ignore[attr-defined] # known to inspect
            return_annotation=function.__annotations__["return"]
        )
        return function

    return give


async def to_its_end(job: NodesManager) -> RunResult:
    """Start a job and wait for its end; cancelling stops it with its grace period."""
    async with job:
        return await job.wait()


def to_its_end_blocking(job: NodesManager) -> RunResult:
    """Do the same in code that is not asynchronous; see `ray.run_blocking` for signals."""
    from davincirunsdk.background import run_in_background, signals_end_waiting

    async def hasten() -> None:
        job.stop(now=True)

    with signals_end_waiting():
        return run_in_background(lambda: to_its_end(job), hasten)
