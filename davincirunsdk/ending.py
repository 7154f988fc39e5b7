"""What a manager's calls return in a loop: a coroutine whose work has begun already."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

T = TypeVar("T")


class Ending(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that begins to wait when it is awaited, and gives no warning when it never is.

    Args:
        wait: Makes what is awaited; None when there is nothing to wait for.
    """

    def __init__(self, wait: Callable[[], Awaitable[T]] | None) -> None:
        self._wait = wait
        self._steps: Generator[Any, Any, T] | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait."""
        return self._generator()

    def send(self, value: Any) -> Any:
        """Go on; see `Coroutine.send`."""
        return self._running().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise inside; see `Coroutine.throw`."""
        return self._running().throw(*error)

    def close(self) -> None:
        """End it without waiting."""
        if self._steps is not None:
            self._steps.close()

    def _running(self) -> Generator[Any, Any, T]:
        if self._steps is None:
            self._steps = self._generator()
        return self._steps

    def _generator(self) -> Generator[Any, Any, T]:
        if self._wait is None:
            return None  # type: ignore[return-value] # only where T is None
        return (yield from self._wait().__await__())


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something")
