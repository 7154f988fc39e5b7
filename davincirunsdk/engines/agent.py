"""One node's part of a job: an `FMKManager` behind calls that an engine can carry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk import __version__
from davincirunsdk.concurrency import in_thread, in_thread_or_here, resolve
from davincirunsdk.engines.messages import LogPiece, NodeFacts, NodeReport, NodeStarted
from davincirunsdk.errors import DavinciRunError, DistributedRuntimeError, PlatformError
from davincirunsdk.host import addresses, devices, ports
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.logs.file import keep_attempt
from davincirunsdk.manager import FMKManager
from davincirunsdk.platforms import places

if TYPE_CHECKING:
    from davincirunsdk.engines.messages import NodePlan
    from davincirunsdk.rank_table import RankTable
    from davincirunsdk.types import Event, LogBlock, RunResult, WorkerStatus

_IDLE = 10.0
"""Seconds after which a report comes though there is nothing to say."""

_MORE_PORTS = 4

_BATCH = 0.1
"""Seconds for which output is collected before it is sent; events do not wait."""


class NodeAgent:
    """Runs on one node, in one event loop, and serves one driver.

    Every call but `report` returns as soon as it has done its work. `report` is called again and
    again; it returns when there is something to tell, at the latest after 10 seconds, so that one
    message is under way per node, whatever the workers print.

    Args:
        root: Folder that stands for `/` where the node's devices are looked for.
        inherits_orphans: This process is the sub-reaper of the job and of nothing else.
    """

    def __init__(self, root: Path = Path("/"), *, inherits_orphans: bool = False) -> None:
        self._root = root
        self._inherits_orphans = inherits_orphans
        self._manager: FMKManager | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_wanted = False
        self._hurry = False
        self._fault: Exception | None = None
        self._departing = ""
        self._no_entry = ""
        self._table_timeout: float | None = 0.0
        self._waits_for = ""
        self._outbox = _Outbox()

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        """Tell what this node has; called once, before `start`.

        Args:
            nproc_per_node: NPUs to use, None for all that Ray or the user left visible.

        Raises:
            PlatformError: This node has NPUs, but fewer than asked for.
        """
        chosen, made = await in_thread(self._look, nproc_per_node)
        if made is not None:
            made = await self._with_addresses(chosen, made)
        return await in_thread(self._facts, chosen, made)

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        """Start this node's workers; called again for another run, when the last has ended.

        Args:
            plan: What to start.
            table: The whole job's rank table as JSON, "" where there is none.

        Returns:
            The workers, or the error for which none was started.
        """
        self._manager, self._outbox = None, _Outbox()
        self._stop_wanted = self._hurry = False
        started: asyncio.Future[NodeStarted] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(plan, table, started), name="davincirun-agent")
        return await started

    async def report(self) -> NodeReport:
        """Wait for news and tell them; called by the driver until a report holds the result."""
        outbox = self._outbox
        await _within(_IDLE, outbox.news)
        if self._fault is not None:
            raise self._fault
        if outbox.news.is_set():
            await _within(_BATCH, outbox.urgent)
        report = outbox.take(self._departing)
        if self._manager is None:
            return report
        return replace(report, workers=self._manager.workers, auxiliaries=self._manager.auxiliaries)

    async def stop(self, now: bool = False) -> None:
        """Begin to stop the workers: SIGTERM and the grace period, or SIGKILL at once."""
        self._hurry = self._hurry or now
        self._stop_wanted = True
        if self._manager is not None:
            self._manager.stop(now=now)

    async def signal(self, number: int) -> None:
        """Pass a signal on to every worker of this node."""
        if self._manager is not None:
            self._manager.signal_workers(number)

    async def ranks_ended(self) -> None:
        """Learn that the workers of all other nodes have ended: what only served them may go."""
        if self._manager is not None:
            self._manager._note_ranks_ended()

    async def sees_file(self, path: str, beginning: bytes) -> bool:
        """Tell whether a file of the driver's is here, too: then both have one file system.

        Args:
            path: The file.
            beginning: Its first bytes, as the driver reads them.
        """

        def look() -> bool:
            try:
                with open(path, "rb") as file:
                    return file.read(len(beginning)) == beginning
            except OSError:
                return False

        return await in_thread(look)

    async def read_log(self, rank: int, start: int, size: int) -> LogPiece:
        """Read a part of a worker's log file.

        Args:
            rank: Of the worker, -1 for an auxiliary process.
            start: Place of the first byte.
            size: Bytes to read.

        Raises:
            PlatformError: There is no such file, or it cannot be read.
        """
        paths = [worker.log_path for worker in self._started() if worker.rank == rank]
        if not paths:
            raise PlatformError(f"no log of rank {rank} is here")

        def read() -> LogPiece:
            with open(paths[0], "rb") as file:
                file.seek(start)
                data = file.read(size)
                return LogPiece(size=os.fstat(file.fileno()).st_size, data=data)

        try:
            return await in_thread(read)
        except OSError as error:
            raise PlatformError(f"{paths[0]} cannot be read: {error.strerror}") from None

    async def set_logs_aside(self, attempt: int) -> None:
        """Put an attempt's number in its log files' names: this node may have other ranks in the next one.

        Args:
            attempt: Number of the attempt that has ended.
        """
        if self._manager is None:
            return
        events = self._manager._events_path
        paths = [*(worker.log_path for worker in self._started()), *([] if events is None else [events])]

        def rename() -> None:
            for path in paths:
                # A file that keeps its name is found all the same.
                with contextlib.suppress(OSError):
                    keep_attempt(path, attempt)

        await in_thread(rename)

    def _started(self) -> tuple[WorkerStatus, ...]:
        return () if self._manager is None else (*self._manager.workers, *self._manager.auxiliaries)

    def reap_orphans(self) -> None:
        """Reap dead children that are not ours to await; called when one has ended."""
        if self._manager is not None and self._inherits_orphans:
            self._manager._reap_orphans()

    async def leave(self, why: str) -> None:
        """Stop because this node is about to be lost, tell the driver at once, and wait until all is gone.

        Args:
            why: In words, for the driver's report.
        """
        self._departing = why
        self._outbox.set_urgent()
        await self.stop()
        if self._task is not None:
            await asyncio.wait({self._task})

    def waits_for(self) -> str:
        """Say what `inspect` is waiting for, "" for nothing."""
        return self._waits_for

    def _look(self, nproc_per_node: int | None) -> tuple[tuple[int, ...], RankTable | None]:
        """Choose the devices, and make their table where there are any."""
        present = devices.npus(self._root)
        usable = devices.visible(os.environ, present)
        if usable and nproc_per_node is not None and nproc_per_node > len(usable):
            raise PlatformError(
                f"found {len(usable)} NPUs on node {addresses.host_name()}; expected at least "
                f"{nproc_per_node}, the nproc_per_node asked for"
            )
        chosen = usable[:nproc_per_node]
        if not chosen:
            return chosen, None
        from davincirunsdk.rank_table.make import make

        return chosen, make(root=self._root, device_ids=chosen, search_path=os.environ.get("PATH"))

    def _facts(self, chosen: tuple[int, ...], made: RankTable | None) -> NodeFacts:
        text = ""
        if made is not None:
            from davincirunsdk.rank_table import dump

            text = dump(made)
        return NodeFacts(
            host=addresses.host_name(),
            address=self.address(),
            port=ports.free_port(),
            devices=len(chosen),
            table=text,
            version=__version__,
            more_ports=tuple({ports.free_port() for _ in range(_MORE_PORTS)}),
        )

    def address(self) -> str:
        """Tell where other nodes reach this one; an engine that knows better says so."""
        own = sorted(address for address in addresses.own() if ":" not in address)
        return own[0] if own else "127.0.0.1"

    async def _with_addresses(self, chosen: tuple[int, ...], made: RankTable) -> RankTable:
        """Take the platform's word for the addresses of NPUs that this node does not tell."""
        if all(row.device_ip is not None for row in made.servers[0].rows):
            return made
        from davincirunsdk.engines.own_entry import own_entry

        def note(text: str) -> None:
            self._waits_for = text

        try:
            entry = await own_entry(chosen, os.environ, self._root, limit=self._table_timeout, notify=note)
        except DavinciRunError as error:
            # One node, or nodes of one super pod, need no more than was found.
            self._no_entry = f": {error}"
            return made
        finally:
            self._waits_for = ""
        return entry if entry is not None and (made.form != "v1.2" or entry.form == "v1.2") else made

    def _refuse_platform_table(self) -> None:
        """Refuse to take ranks from a table that the driver does not know: it counts nodes in its own order.

        Raises:
            PlatformError: There is such a table.
        """
        place = places.find(os.environ, root=self._root)
        if place is not None:
            raise PlatformError(
                f"found rank table {place.path}{f' by {place.named_by}' if place.named_by else ''}, but not "
                f"the addresses of the NPUs of all nodes of this job{self._no_entry}; expected them in such "
                "tables, from hccn_tool or in /etc/hccn.conf on every node, or no table on any: mend or "
                "remove it, or start davincirun on each node without an engine"
            )

    async def _run(self, plan: NodePlan, table: str, started: asyncio.Future[NodeStarted]) -> None:
        result: RunResult | None = None
        folder: Path | None = None
        try:
            if table:
                folder = await in_thread(lambda: Path(tempfile.mkdtemp(prefix="davincirun-")).absolute())
                guardian.watch_folder(folder)
                await in_thread((folder / "hccl.json").write_text, table)
            elif (plan.options.nnodes or 1) > 1:
                await in_thread(self._refuse_platform_table)
            manager = _manager(plan, folder / "hccl.json" if folder is not None else None)
            manager._inherits_orphans = self._inherits_orphans
            async with manager:
                self._manager = manager
                if self._stop_wanted:
                    manager.stop(now=self._hurry)
                resolve(started, NodeStarted(workers=manager.workers, auxiliaries=manager.auxiliaries))
                readers = [
                    asyncio.create_task(self._read_events(manager)),
                    asyncio.create_task(self._read_output(manager, plan)),
                ]
                try:
                    result = await manager.wait()
                except DistributedRuntimeError as error:
                    result = error.result
                await asyncio.wait(readers)
        except Exception as error:
            # The driver has to hear of whatever it is: it waits for an answer, or for reports.
            if started.done():
                self._fault = error
            elif isinstance(error, DavinciRunError):
                started.set_result(NodeStarted(error=error))
            elif isinstance(error, OSError):
                why = PlatformError(f"the rank table cannot be written: {error}")
                started.set_result(NodeStarted(error=why))
            else:
                started.set_exception(error)
        finally:
            if folder is not None:
                await in_thread_or_here(lambda: shutil.rmtree(folder, ignore_errors=True))
                guardian.release_folder(folder)
            self._outbox.end(result)

    async def _read_events(self, manager: FMKManager) -> None:
        async for event in manager.events():
            self._outbox.add_event(event)

    async def _read_output(self, manager: FMKManager, plan: NodePlan) -> None:
        wanted = plan.wanted_ranks
        if wanted is not None and not wanted.intersection(worker.rank for worker in manager.workers):
            return
        stream = manager.log_blocks(wanted)
        told = 0
        async for block in stream:
            if stream.follows_gap:
                left_out, told = stream.dropped - told, stream.dropped
                # The driver cannot tell from the bytes that some are missing.
                notice = f"\n... {left_out} bytes left out here; this node's log files have all\n"
                block = replace(block, data=notice.encode() + block.data)
            await self._outbox.add_block(block, plan.held_bytes, stream.dropped)


class _Outbox:
    """What waits to be reported. All of it belongs to the loop's thread."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.urgent = asyncio.Event()
        self._room = asyncio.Event()
        self._events: list[Event] = []
        self._blocks: list[LogBlock] = []
        self._held = 0
        self._dropped = 0
        self._result: RunResult | None = None

    def add_event(self, event: Event) -> None:
        self._events.append(event)
        self.set_urgent()

    async def add_block(self, block: LogBlock, bound: int, dropped: int) -> None:
        """Add output when there is room for it; the stream that it comes from is bounded, too."""
        while self._held and self._held + len(block.data) > bound:
            self._room.clear()
            await self._room.wait()
        self._blocks.append(block)
        self._held += len(block.data)
        self._dropped = dropped
        self.news.set()

    def end(self, result: RunResult | None) -> None:
        self._result = result
        self.set_urgent()

    def set_urgent(self) -> None:
        self.news.set()
        self.urgent.set()

    def take(self, departing: str) -> NodeReport:
        report = NodeReport(
            events=tuple(self._events),
            blocks=tuple(self._blocks),
            dropped=self._dropped,
            result=self._result,
            departing=departing,
        )
        self._events, self._blocks, self._held = [], [], 0
        self.news.clear()
        self.urgent.clear()
        self._room.set()
        return report


def _manager(plan: NodePlan, table: Path | None) -> FMKManager:
    # One meeting is enough: the driver's.
    options = replace(plan.options, meet="off")
    if table is not None:
        options = replace(options, rank_table=table, nproc_per_node=None)
    return FMKManager.from_options(options)


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
