"""A job on several nodes as one call, from its start to its end."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from davincirunsdk.engines.driver import NodesManager
    from davincirunsdk.types import RunResult

P = ParamSpec("P")
T = TypeVar("T")


def called_like(model: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters and the module of another, for type checkers and for `help`."""

    def give(function: Callable[..., T]) -> Callable[P, T]:
        function.__signature__ = inspect.signature(model).replace(  # type: ignore[attr-defined] # known to inspect
            return_annotation=function.__annotations__["return"]
        )
        function.__module__, function.__qualname__ = model.__module__, function.__name__
        return function

    return give


def calls_of(
    manager: Callable[P, NodesManager],
) -> tuple[Callable[P, Coroutine[Any, Any, RunResult]], Callable[P, RunResult]]:
    """Make `run` and `run_blocking` of an engine.

    Args:
        manager: Describes a job on the engine's nodes.
    """

    @called_like(manager)
    async def run(*arguments: Any, **options: Any) -> RunResult:
        """Run a command on several nodes and wait for its end on all of them.

        Cancelling stops the workers of all nodes with their grace period, then lets the cancellation
        through; `asyncio.timeout` around it works.

        Args:
            *arguments: See `manager`.
            **options: See `manager`.

        Returns:
            The result: workers of all nodes in rank order, paths as they are on the nodes.

        Raises:
            DistributedRuntimeError: A worker failed by itself, or a node was lost.
            PlatformError: The nodes or their devices cannot be had; the text says which and why.
            RankTableError: The nodes' NPUs make no rank table, or are not those of the one that was given.
            WorkerSpawnError: The command cannot be started on one of the nodes.
        """
        async with manager(*arguments, **options) as job:
            return await job.wait()

    @called_like(manager)
    def run_blocking(*arguments: Any, **options: Any) -> RunResult:
        """Do what `run` does in code that is not asynchronous, in a notebook's cell too.

        Ctrl-C stops the workers of all nodes with their grace period, a second one at once, and
        `KeyboardInterrupt` is raised when they are gone. In the main thread of a program that has the
        default action for SIGTERM, that signal does the same and then ends the program.

        Args:
            *arguments: See `manager`.
            **options: See `manager`.

        Returns:
            As `run`.

        Raises:
            DistributedRuntimeError: As `run`, and so for all its other errors.
        """
        from davincirunsdk.background import run_in_background, signals_end_waiting

        job = manager(*arguments, **options)

        async def to_its_end() -> RunResult:
            async with job:
                return await job.wait()

        async def hasten() -> None:
            job.stop(now=True)

        with signals_end_waiting():
            return run_in_background(to_its_end, hasten)

    return run, run_blocking
