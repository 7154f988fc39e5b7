"""One agent on each of several hosts, reached by ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import Patience, in_thread, shield
from davincirunsdk.engines.ssh_node import CLOSE_PATIENCE, SshNode
from davincirunsdk.errors import PlatformError
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.phrases import some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from davincirunsdk.engines.calls import Greeting
    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.node import NodeHandle

_AT_A_TIME = 32
"""Connections that are made at the same time: sshd drops some of more than that, and so do jump hosts."""

_NOTICE_AFTER = 3.0
"""Seconds until a word is said about hosts that have not answered."""


class SshPlacement:
    """One agent on each of several hosts, behind one ssh each.

    Args:
        hosts: Their names.
        program: Words of the ssh to use.
        python: Python on the hosts.
        greeting: What every agent is told first.
        notify: Takes a line when hosts have to be waited for.
    """

    renewal_timeout: float = 0.0

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        program: Sequence[str],
        python: str,
        greeting: Greeting,
        notify: Callable[[str], None],
    ) -> None:
        self._program = tuple(program)
        self._python = python
        self._greeting = greeting
        self._notify = notify
        outer = os.environ.get(JOB_MARK)
        own = secrets.token_hex(8)
        self._mark = f"{outer}/{own}" if outer else own
        self._nodes = [SshNode(host, greeting) for host in hosts]

    async def open(self, table: GivenTable | None = None) -> Sequence[NodeHandle]:
        """Reach all hosts, start the agents and hear what they found.

        Args:
            table: None: the user named the hosts, so no table is taken.

        Returns:
            One handle per host, in their order.

        Raises:
            PlatformError: Hosts cannot be used; its text has a line for each. Nothing is left on any.
        """
        try:
            await in_thread(lambda: guardian.watch(self._mark, CLOSE_PATIENCE))
            errors = await self._open_all()
            if errors:
                raise PlatformError(_joined(errors, len(self._nodes)))
        except BaseException:
            await self.close()
            raise
        return self._nodes

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        """Refuse: the user named the hosts, and there are no others.

        Args:
            bound: Not looked at.

        Raises:
            PlatformError: Always.
        """
        raise PlatformError("other hosts than those that were named cannot be had")

    async def until_lost(self) -> str:
        """Wait for ever: the hosts have nothing in common that could be lost."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """End all agents and their links; a cancellation waits for it, a few seconds at most."""
        waits = Patience(lambda: None)
        closing = asyncio.gather(*(node.close() for node in self._nodes))
        with shield():
            await waits.wait(asyncio.ensure_future(closing))
            await waits.wait(in_thread(lambda: guardian.release(self._mark)))
        waits.settle()

    async def _open_all(self) -> dict[str, str]:
        """Open all nodes, some at a time; return errors by host."""
        places = asyncio.Semaphore(_AT_A_TIME)
        environment = {**os.environ, JOB_MARK: self._mark}

        async def open_one(node: SshNode) -> None:
            async with places:
                await node.open(self._program, self._python, environment)

        tasks = {asyncio.ensure_future(open_one(node)): node.host for node in self._nodes}
        try:
            _, pending = await asyncio.wait(tasks, timeout=_NOTICE_AFTER)
            if pending:
                waiting = [tasks[task] for task in tasks if task in pending]
                self._notify(f"waiting for {some_of(waiting)}")
                await asyncio.wait(pending)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
        errors: dict[str, str] = {}
        for task, host in tasks.items():
            error = task.exception()
            if isinstance(error, PlatformError):
                errors[host] = str(error)
            elif error is not None:
                raise error
        return errors


def _joined(errors: Mapping[str, str], hosts: int) -> str:
    if len(errors) == 1 and hosts == 1:
        ((host, why),) = errors.items()
        return f"host {host}: {why}"
    lines = [f"  {host}: {why}" for host, why in errors.items()]
    return "\n".join([f"{len(errors)} of {hosts} hosts cannot be used:", *lines])
