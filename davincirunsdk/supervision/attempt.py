"""The workers of this node together: started in order, stopped together, nothing left of them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import Patience, in_thread, in_thread_or_here, resolve
from davincirunsdk.errors import WorkerSpawnError
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.supervision.worker import Worker, explain
from davincirunsdk.types import Event, Leftover, WorkerState, signal_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from davincirunsdk.cluster import WorkerSpec
    from davincirunsdk.leftovers.process_tree import MarkedProcess, ProcessTree
    from davincirunsdk.logs.pump import LogPump

logger: logging.Logger = logging.getLogger("davincirunsdk")

_SCHEDULER_GRACE = 5.0
"""Seconds that an auxiliary process has to end by itself after the last worker's good end."""

_DRAIN_SILENCE = 1.0
"""Seconds without output after which a pipe held by a stranger is no longer read."""

_DISK_PATIENCE = 10.0
"""Seconds that a write to a stuck disk may take after the last process has ended."""

_LOOK_PATIENCE = 0.5
"""Seconds that SIGKILL waits for a look at all processes: one that is stuck may hold its reader."""

_REVIVALS = 20
"""Starts of the guardian during one job; a Python that cannot run it must not be started for ever."""

_UNKILLABLE_AFTER = 10.0
"""Seconds after SIGKILL until a process counts as stuck in the kernel and is given up."""


class WorkerGroup:
    """Supervises the workers of one job on this node. All methods belong to the loop's thread.

    Args:
        specs: What to start, in this order; auxiliary processes come first.
        pumps: One for each.
        mark: The job's mark, which is in every worker's environment.
        grace_period: Seconds between SIGTERM and SIGKILL, for all workers together.
        fail_fast: Stop the others when one ends badly.
        inherits_orphans: This process is the sub-reaper of the job and of nothing else.
        emit: Takes every event.

    Attributes:
        workers: In the order of `specs`.
        failed: Workers that ended badly by themselves, the first one first.
        leftovers: Processes that outlived their workers.
        stop_began: Wall-clock second of the first SIGTERM, None before.
        stop_requested: True once somebody wanted the job to end before its workers did.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        pumps: Sequence[LogPump],
        *,
        mark: str,
        grace_period: float,
        fail_fast: bool,
        inherits_orphans: bool,
        emit: Callable[[Event], None],
    ) -> None:
        self.workers: list[Worker] = [
            Worker(spec, pump, on_exit=self._on_exit, on_cancel=self.request_stop)
            for spec, pump in zip(specs, pumps, strict=True)
        ]
        self.failed: list[Worker] = []
        self.stop_began: float | None = None
        self.leftovers: tuple[Leftover, ...] = ()
        self.stop_requested: bool = False
        self.fail_fast = fail_fast
        self._grace_period = grace_period
        self._mark = mark
        self._inherits_orphans = inherits_orphans
        self._emit = emit
        self._deadline = math.inf
        self._known_tree: ProcessTree | None = None
        self._change: asyncio.Future[None] | None = None
        self._spawn_error: WorkerSpawnError | None = None

    def is_stopping(self) -> bool:
        """Tell whether SIGTERM has been sent to the workers."""
        return self._deadline < math.inf

    async def run(self, *, started: Callable[[], None], decided: Callable[[], Awaitable[None]]) -> None:
        """Start all workers and see them to their end.

        Cancelling stops the job with its grace period; the cancellation goes on when nothing is
        left of it.

        Args:
            started: Called when all run.
            decided: Called when the outcome is known before the end, without `fail_fast`.

        Raises:
            WorkerSpawnError: A worker could not be started; the ones before it have been ended.
        """
        waits = Patience(self.request_stop)
        tasks: list[asyncio.Task[None]] = []
        guarded = _GuardianWatch()
        try:
            await self._start_all(waits, tasks)
            guarded.begin()
            if self._spawn_error is None:
                started()
            await self._supervise(waits, decided)
            await self._stop(waits)
            await self._sweep(waits, decided)
            await self._drain(waits)
        except BaseException:
            # An error of ours must not leave the workers alone.
            self.request_stop(now=True, reason="an error in the supervisor")
            for worker in self._running():
                worker.kill()
            raise
        finally:
            for task in tasks:
                await waits.until_any(task)
            guarded.end()
            await waits.wait(in_thread_or_here(guardian.release, self._mark))
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if self._spawn_error is not None:
            raise self._spawn_error
        waits.settle()

    def request_stop(self, *, now: bool = False, reason: str = "stop was asked for") -> None:
        """Stop the job: SIGTERM to all, SIGKILL after the grace period.

        Args:
            now: SIGKILL at once.
            reason: In words, for the events.
        """
        self.stop_requested = True
        self._begin_stop(now=now, reason=reason)

    async def _start_all(self, waits: Patience, tasks: list[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await waits.wait(in_thread(guardian.watch, self._mark))
        except OSError as error:
            self._spawn_error = WorkerSpawnError(
                f"the guardian cannot be started: {explain(error)}", errno=error.errno
            )
            self._begin_stop(now=False, reason=str(self._spawn_error))
        for worker in self.workers:
            if self.is_stopping():
                # No start after a stop.
                worker.pump.discard()
                continue
            ready: asyncio.Future[None] = loop.create_future()
            task = loop.create_task(worker.run(ready), name=f"davincirun-{worker.spec.name}")
            task.add_done_callback(self._wake)
            tasks.append(task)
            try:
                await waits.wait(ready)
            except WorkerSpawnError as error:
                self._spawn_error = error
                self._begin_stop(now=False, reason=str(error))
                continue
            self._note("started", worker)
            if self.is_stopping() and worker.running:
                # The stop came while it was being started.
                worker.terminate()

    async def _supervise(self, waits: Patience, decided: Callable[[], Awaitable[None]]) -> None:
        """Wait until all workers have ended or a stop began."""
        while not self.is_stopping() and any(not worker.spec.auxiliary for worker in self._running()):
            if self.failed:
                await decided()
            await self._next_change(waits, math.inf)
        if not self.is_stopping() and not self.failed:
            limit = time.monotonic() + _SCHEDULER_GRACE
            while self._running() and not self.is_stopping() and time.monotonic() < limit:
                await self._next_change(waits, limit)

    async def _stop(self, waits: Patience) -> None:
        """See a stop through: the grace period, then SIGKILL."""
        if self._running():
            self._begin_stop(now=False, reason="the workers have ended")
        if not self.is_stopping():
            return
        strays = in_thread_or_here(self._terminate_strays)
        strays.add_done_callback(self._wake)
        while self._running() and time.monotonic() < self._deadline:
            await self._next_change(waits, self._deadline)
        # A descendant without the mark is found through its parent: it has to be seen before that is killed.
        limit = time.monotonic() + _LOOK_PATIENCE
        while self._running() and not strays.done() and time.monotonic() < limit:
            await self._next_change(waits, limit)
        for worker in self._running():
            worker.kill()
            self._note(
                "killing", worker, detail=f"SIGKILL after the grace period of {self._grace_period:g} s"
            )
        limit = time.monotonic() + _UNKILLABLE_AFTER
        while self._running() and time.monotonic() < limit:
            await self._next_change(waits, limit)
        for worker in self._running():
            self._warn(
                f"{worker.spec.name}, pid {worker.pid}, does not end after SIGKILL: it is stuck in the kernel"
            )
            worker.abandon()
        await waits.wait(strays)

    def _terminate_strays(self) -> None:
        """Ask those descendants to end that no signal to a process group has reached."""
        told = [worker.pid for worker in self.workers if worker.told and worker.pid is not None]
        self._tree().terminate(told_groups=told, sessions=self._sessions())

    async def _sweep(self, waits: Patience, decided: Callable[[], Awaitable[None]]) -> None:
        """End what outlived the workers."""
        if not self.fail_fast and not self.is_stopping():
            # The caller wants survivors kept: say how it ended and wait until they are not wanted.
            await decided()
            if await waits.wait(in_thread_or_here(self._survivors)):
                while not self.is_stopping():
                    await self._next_change(waits, math.inf)
        if not self.is_stopping():
            self._deadline = time.monotonic() + self._grace_period
        sessions = self._sessions()
        found = await waits.wait(in_thread_or_here(self._end_strays, sessions))
        # A worker that got our SIGTERM may take its time with its helpers: only those of a job
        # that ended by itself are worth a word.
        self.leftovers = tuple(Leftover(pid=process.pid, command=process.command) for process in found)
        for process in found:
            self._emit(
                Event(
                    kind="leftover",
                    time=time.time(),
                    pid=process.pid,
                    detail=f"{process.command} outlived its worker and was ended",
                )
            )
        if found:
            logger.warning(
                "%d processes outlived their workers and were ended: %s",
                len(found),
                ", ".join(f"{process.pid} ({process.command})" for process in found[:8]),
            )

    def _end_strays(self, sessions: dict[int, float]) -> tuple[MarkedProcess, ...]:
        return self._tree().end(lambda: self._deadline, sessions=sessions)

    def _survivors(self) -> list[MarkedProcess]:
        return self._tree().find(self._sessions())

    def _tree(self) -> ProcessTree:
        # psutil is loaded when there is something to look for, not while workers wait for their start.
        from davincirunsdk.leftovers.process_tree import ProcessTree

        if self._known_tree is None:
            self._known_tree = ProcessTree(
                self._mark, guardian=guardian.pid if self._inherits_orphans else None
            )
        return self._known_tree

    def _sessions(self) -> dict[int, float]:
        return {
            worker.pid: worker.ended if worker.ended is not None else math.inf
            for worker in self.workers
            if worker.pid is not None
        }

    async def _drain(self, waits: Patience) -> None:
        """Wait for the last output, but not for a stranger that holds a pipe or a disk that is stuck."""
        seen: dict[Worker, int] = {}
        quiet_since = time.monotonic()
        while pending := [
            worker for worker in self.workers if worker.pid is not None and not worker.pump_ended
        ]:
            sizes = {worker: worker.pump.file.size + worker.pump.file.lost for worker in pending}
            now = time.monotonic()
            if sizes != seen:
                seen, quiet_since = sizes, now
            for worker in pending:
                if now - quiet_since >= (_DISK_PATIENCE if worker.pump.writing else _DRAIN_SILENCE):
                    if worker.pump.writing:
                        worker.abandon()
                        self._warn(
                            f"the disk of {worker.spec.log_path} is stuck: the end of its output is lost"
                        )
                    else:
                        worker.pump.give_up()
            await self._next_change(waits, now + _DRAIN_SILENCE / 2)

    def _on_exit(self, worker: Worker) -> None:
        """Judge an end in the moment it is known: siblings are told before anything else is done."""
        if worker.state is WorkerState.RUNNING:
            if worker.exit_code == 0:
                worker.state = WorkerState.SUCCEEDED
            elif worker.spec.auxiliary and all(
                other.ended is not None for other in self.workers if not other.spec.auxiliary
            ):
                # The ranks are through: how it ends no longer matters.
                worker.state = WorkerState.STOPPED
            else:
                worker.state = WorkerState.FAILED
                self.failed.append(worker)
                if self.fail_fast:
                    self._begin_stop(now=False, reason=f"{worker.spec.name} failed")
                    worker.terminate_rest()
        elif worker.state is WorkerState.STOPPING or worker.exit_code not in (-9, None):
            worker.state = WorkerState.STOPPED
        self._note("exited", worker, detail=signal_name(worker.exit_code) or "")
        self._wake()

    def _begin_stop(self, *, now: bool, reason: str) -> None:
        limit = time.monotonic() + (0.0 if now else self._grace_period)
        if not self.is_stopping():
            self._deadline = limit
            self.stop_began = time.time()
            for worker in self._running():
                worker.terminate()
            self._emit(Event(kind="stopping", time=time.time(), detail=reason))
        self._deadline = min(self._deadline, limit)
        self._wake()

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.running]

    async def _next_change(self, waits: Patience, limit: float) -> None:
        """Wait for an exit or a request, at most until the monotonic second `limit`."""
        loop = asyncio.get_running_loop()
        change = self._change = loop.create_future()
        timer = None
        if limit < math.inf:
            timer = loop.call_later(max(0.0, limit - time.monotonic()), resolve, change, None)
        try:
            await waits.wait(change)
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self, _: object = None) -> None:
        if self._change is not None:
            resolve(self._change, None)

    def _note(self, kind: str, worker: Worker, detail: str = "") -> None:
        self._emit(
            Event(
                kind=kind,
                time=time.time(),
                rank=worker.spec.rank,
                pid=worker.pid,
                exit_code=worker.exit_code,
                detail=detail,
            )
        )

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._emit(Event(kind="warning", time=time.time(), detail=text))


class _GuardianWatch:
    """Has the guardian started again when somebody ends it while workers run."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self._ended = False
        self._revivals = 0

    def begin(self) -> None:
        pid = guardian.pid()
        if pid is None:
            return
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            # Ended and reaped already, by a host program that reaps everything.
            self._revive()
        except (AttributeError, OSError):
            # Kernels before 5.3: the guardian is looked at when the next job starts.
            return
        else:
            asyncio.get_running_loop().add_reader(self._handle, self._revive)

    def end(self) -> None:
        self._ended = True
        self._let_go()

    def _let_go(self) -> None:
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def _revive(self) -> None:
        self._let_go()
        self._revivals += 1
        if self._revivals > _REVIVALS:
            logger.warning("the guardian ends again and again: if this process is killed, workers may stay")
            return
        in_thread_or_here(guardian.revive).add_done_callback(self._revived)

    def _revived(self, revival: asyncio.Future[None]) -> None:
        if (error := revival.exception()) is not None:
            logger.warning("the guardian was ended and cannot be started again: %s", error)
        elif not self._ended:
            self.begin()
