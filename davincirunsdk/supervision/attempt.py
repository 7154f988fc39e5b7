"""The workers of this node together, once: started in order, stopped together, nothing left of them.

One task reads one stream of messages (`messages`) and does everything that follows from them, phase
after phase: start, watch, stop, sweep, drain. Beside it runs a task per worker, from its spawn to its
reaping, one per log pump, and one for the guardian; those only look and post. A phase waits with
`MessageLoop.until`, which deals with every message that comes meanwhile.

To build on it: `prepare.Preparation.attempt(n)` gives what the n-th attempt starts, `Attempt.run` sees
it through, `Attempt.seen` is what `verdict.judge` judges; `rounds` has a restart go through these three
again. Whoever finds a reason to end it (a stall, a time limit, a lost node) calls `Attempt.stop` with
its cause, which is data of `cause`, and finds it again in `Seen.cause`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

from davincirunsdk.concurrency import Patience, in_thread_or_here
from davincirunsdk.errors import WorkerSpawnError, explain
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.leftovers.pass_on import reached_by_sender
from davincirunsdk.leftovers.proc import since_boot
from davincirunsdk.supervision import messages
from davincirunsdk.supervision.cause import (
    AuxiliaryEnded,
    InternalError,
    RanksEnded,
    StartFailed,
    StopWanted,
    Straggling,
    WorkerFailed,
)
from davincirunsdk.supervision.drain import drain
from davincirunsdk.supervision.guardian_watch import GuardianWatch
from davincirunsdk.supervision.last_words import ends_with_exception
from davincirunsdk.supervision.message_loop import MessageLoop
from davincirunsdk.supervision.messages import Inbox
from davincirunsdk.supervision.remains import Remains, log_what_was_ended, say_what_stays
from davincirunsdk.supervision.seen import Seen, WorkerSeen
from davincirunsdk.supervision.spawn import children_are_reaped_by_kernel, spawn_error
from davincirunsdk.supervision.stop import Stop
from davincirunsdk.supervision.worker import Worker
from davincirunsdk.types import Event, Leftover, WorkerState, signal_name

if TYPE_CHECKING:
    import signal
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from davincirunsdk.cluster import WorkerSpec
    from davincirunsdk.logs.pump import LogPump
    from davincirunsdk.supervision.cause import Cause
    from davincirunsdk.supervision.watch import StallWatch

logger: logging.Logger = logging.getLogger("davincirunsdk")

_PEERS_PATIENCE = 1.0
"""Seconds in which the ranks of a job that ends well usually end after the first of them."""

_SCHEDULER_GRACE = 5.0
"""Seconds that an auxiliary process has to end by itself after the job's last worker's good end."""

_SCHEDULER_PATIENCE = 600.0
"""The same where the job has workers on other nodes and nobody says when they have ended."""

_LOOK_PATIENCE = 0.5
"""Seconds that SIGKILL waits for a look at all processes: one that is stuck may hold its reader."""

_RUSH = 0.2
"""Seconds after the start in which workers print their first lines, and nothing else is to be done."""

_UNKILLABLE_AFTER = 10.0
"""Seconds after SIGKILL until a process counts as stuck in the kernel and is given up."""


class Attempt:
    """Supervises the workers of one job on this node. All methods belong to the loop's thread.

    Args:
        specs: What to start, in this order; auxiliary processes come first.
        pumps: One for each.
        mark: The job's mark, which is in every worker's environment.
        grace_period: Seconds between the stop signal and SIGKILL, for all workers together.
        stop_signal: Asks workers to end.
        fail_fast: Stop the others when one ends badly.
        keep_going: A rank that ends badly stops nobody, and is judged with all others at the end.
        straggler_timeout: Seconds that the other ranks have after the first good end, None for any number.
        inherits_orphans: This process is the sub-reaper of the job and of nothing else.
        ranks_elsewhere: The job has workers on other nodes, too; see `note_ranks_ended`.
        emit: Takes every event.
        watch: Watches whether the workers get on, None for nobody.

    Attributes:
        workers: In the order of `specs`.
        fail_fast: As given; may be changed while it runs.
        internal_error: An error of our own that ended it, None without one.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        pumps: Sequence[LogPump],
        *,
        mark: str,
        grace_period: float,
        stop_signal: signal.Signals,
        fail_fast: bool,
        keep_going: bool,
        straggler_timeout: float | None,
        inherits_orphans: bool,
        ranks_elsewhere: bool,
        emit: Callable[[Event], None],
        watch: StallWatch | None = None,
    ) -> None:
        self._stall_watch = watch
        self._alone: bool = False
        self.fail_fast = fail_fast
        self.internal_error: Exception | None = None
        self._keep_going = keep_going
        self._straggler_timeout = straggler_timeout
        self._straggler_timer: asyncio.TimerHandle | None = None
        self._grace_period = grace_period
        self._stop_signal = stop_signal
        self._mark = mark
        self._ranks_elsewhere = ranks_elsewhere
        self._emit = emit
        self._inbox = Inbox(on_cancel=self._stop_cancelled)
        # Not anyio's task group: to load it takes longer than all else that comes before the first worker.
        self._tasks: list[asyncio.Task[None]] = []
        self.workers: list[Worker] = [
            Worker(spec, pump, post=self._inbox.post, on_cancel=self._stop_cancelled)
            for spec, pump in zip(specs, pumps, strict=True)
        ]
        self._stop = Stop(stop_signal, grace_period, post=self._inbox.post, emit=emit, warn=self._warn)
        self._remains = Remains(
            mark,
            self.workers,
            inherits_orphans=inherits_orphans,
            stop_signal=stop_signal,
            deadline=self._stop.until_deadline,
        )
        self._messages = MessageLoop(
            self._inbox,
            self._deal_safely_with,
            dealt=self._tell_guardian,
            deadline=self._stop.until_deadline,
            warn=self._warn,
        )
        self._failed: list[Worker] = []
        self._judged: list[Worker] = []
        self._silent: list[Worker] = []
        self._leftovers: tuple[Leftover, ...] = ()
        self._spawn_error: WorkerSpawnError | None = None

    @property
    def is_stopping(self) -> bool:
        """True once the workers are to end, or have been told so."""
        return self._stop.ordered or self._stop.has_begun

    @property
    def cause(self) -> Cause | None:
        """Why the workers are to end, None while they go on by themselves."""
        return self._stop.cause

    def stop(self, cause: Cause, *, now: bool = False) -> None:
        """End it: the stop signal to all workers, SIGKILL after the grace period.

        Args:
            cause: Why; the first cause is the one that counts.
            now: SIGKILL at once.
        """
        self._stop.order(cause)
        self._inbox.post(messages.StopOrdered(cause=cause, now=now))

    def pass_on(self, number: int) -> None:
        """Pass a signal on to all processes of the workers that handle it.

        Where whoever sent it to us reached them as well, as Slurm does, nothing is passed on: a worker
        would save twice.
        """
        if reached_by_sender(os.environ):
            self._warn(
                f"{signal_name(-number)} is not passed on: Slurm sends it to every process of the step"
            )
        elif self._running():
            self._messages.look(self._remains.pass_on, number, self._remains.tops())

    def note_ranks_ended(self) -> None:
        """Learn that the workers of all other nodes have ended: auxiliary processes are not needed longer."""
        self._ranks_elsewhere = False
        self._inbox.post(messages.Nudge())

    def seen(self) -> Seen:
        """Tell everything that was seen so far, for the verdict."""
        ours = {worker: _look_at(worker) for worker in self.workers}
        return Seen(
            workers=tuple(ours.values()),
            failed=tuple(ours[worker] for worker in self._failed),
            cause=self._stop.cause,
            stop_began=self._stop.began,
            stop_wanted=self._stop.wanted,
            leftovers=self._leftovers,
        )

    async def run(self, *, started: Callable[[], None], decided: Callable[[], Awaitable[None]]) -> None:
        """Start all workers and see them to their end.

        Cancelling stops the job with its grace period; the cancellation goes on when nothing is
        left of it.

        Args:
            started: Called when all run.
            decided: Awaited beside the supervision when the outcome is known before the end, which
                can be without `fail_fast`.

        Raises:
            WorkerSpawnError: A worker could not be started; the ones before it have been ended.
            Exception: An error of our own, bare; the workers have been ended.
        """
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decided: Callable[[], Awaitable[None]] | None = decided
        self._guardian_watch = GuardianWatch(
            post=self._inbox.post, warn=self._warn, on_cancel=self._stop_cancelled, over=self._over
        )
        waits = Patience(self._stop_cancelled)
        try:
            await self._start_all(started)
            await self._watch()
            await self._see_stop_through()
            await self._sweep()
            await self._drain()
        except Exception as error:
            await self._end_at_once(error)
        finally:
            self._over.set_result(None)
            if self._straggler_timer is not None:
                self._straggler_timer.cancel()
            self._let_reap(self.workers)
            for worker in self.workers:
                worker.give_up()
                if not worker.begun:
                    worker.pump.discard()
                elif not worker.pump_ended:
                    worker.give_up_output()
            # Nobody begins a further task; what one may have failed by has been posted.
            await waits.wait(asyncio.gather(*self._tasks, return_exceptions=True))
        await waits.wait(in_thread_or_here(guardian.release, self._mark))
        self._remains.close()
        self._inbox.close()
        if self.internal_error is not None:
            raise self.internal_error
        if self._spawn_error is not None:
            raise self._spawn_error
        if self._inbox.cancellation is not None:
            raise self._inbox.cancellation
        waits.settle()

    # The phases, in their order.

    async def _start_all(self, started: Callable[[], None]) -> None:
        guarded = self._messages.look(guardian.watch, self._mark, self._grace_period, self._stop_signal)
        reaped = self._messages.look(children_are_reaped_by_kernel)
        await self._messages.until(lambda: guarded.done() and reaped.done(), self._stop.until_deadline)
        if reaped.done() and reaped.result():
            self._warn(
                "SIGCHLD is ignored in this process, so the kernel may throw the exit codes of workers away "
                "(Linux before 6.15 does); set it to signal.SIG_DFL before the start to have them"
            )
        if guarded.done() and isinstance(error := guarded.exception(), OSError):
            text = f"the guardian cannot be started: {explain(error)}"
            self._fail_start(WorkerSpawnError(text, errno=error.errno))
        elif guarded.done():
            guarded.result()
        for worker in self.workers:
            if self.is_stopping:
                # No start after a stop.
                break
            if not self._begin(worker):
                continue
            await self._messages.until(lambda worker=worker: worker.settled, self._stop.until_deadline)  # type: ignore[misc]
            if not worker.settled:
                worker.give_up()
        if not guarded.done():
            self._warn("the guardian does not start: the system holds it up")
        self._begin_task(self._guarded, self._guardian_watch.watch)
        self._begin_task(self._guarded, self._load)
        if self._spawn_error is None and not self.is_stopping:
            started()
            if self._stall_watch is not None:
                self._begin_task(self._guarded, self._stall_watch.watch, self, self._over)

    async def _watch(self) -> None:
        """Wait until all ranks have ended, and what serves them after its time, or until a stop."""
        ranks = [worker for worker in self.workers if not worker.spec.auxiliary]
        await self._messages.until(lambda: self.is_stopping or not any(worker.running for worker in ranks))
        if self._failed or self.is_stopping or not self._running():
            return
        if self._ranks_elsewhere:
            self._warn(
                f"the workers of this node have ended; {self._running()[0].spec.name} is kept for those of "
                f"the other nodes until it ends by itself, at most {_SCHEDULER_PATIENCE:g} s"
            )
            limit = time.monotonic() + _SCHEDULER_PATIENCE
            await self._messages.until(
                lambda: self.is_stopping or not self._running() or not self._ranks_elsewhere, limit
            )
        if not self._ranks_elsewhere:
            limit = time.monotonic() + _SCHEDULER_GRACE
            await self._messages.until(lambda: self.is_stopping or not self._running(), limit)

    async def _see_stop_through(self) -> None:
        """See a stop through: the grace period, then SIGKILL."""
        if self._running() and not self.is_stopping:
            self._begin_stop(RanksEnded(), now=False)
        await self._messages.until(lambda: not self._stop.ordered or self._stop.has_begun)
        if not self.is_stopping:
            return
        await self._messages.until(lambda: not self._stop.spared, self._stop.until_deadline)
        strays = self._messages.look(self._remains.ending().stop)
        await self._messages.until(lambda: not self._running(), self._stop.until_deadline)
        # A descendant without the mark is found through its parent: it has to be seen before that is killed.
        limit = time.monotonic() + _LOOK_PATIENCE
        await self._messages.until(lambda: not self._running() or strays.done(), limit)
        for worker in self._running():
            if self._stop.kill(worker):
                detail = f"SIGKILL after the grace period of {self._grace_period:g} s"
                self._note("killing", worker, detail=detail)
        limit = time.monotonic() + _UNKILLABLE_AFTER
        await self._messages.until(lambda: not self._running(), limit)
        for worker in self._running():
            self._warn(
                f"{worker.spec.name}, pid {worker.pid}, does not end after SIGKILL: it is stuck in the kernel"
            )
            worker.give_up()
            worker.give_up_output()
        await self._messages.result_of(strays, None)

    async def _sweep(self) -> None:
        """End what outlived the workers."""
        if not self.fail_fast and not self.is_stopping:
            self._tell_decided()
            await self._remains.outlast(self._messages, lambda: self.is_stopping)
        by_itself = not self.is_stopping
        self._stop.begin_grace_period()
        ending = self._remains.ending()
        found = await self._messages.result_of(self._messages.look(ending.end), ())
        say_what_stays(ending, self._warn)
        self._leftovers = tuple(Leftover(pid=process.pid, command=process.command) for process in found)
        for process in found:
            self._emit(
                Event(
                    kind="leftover",
                    time=time.time(),
                    pid=process.pid,
                    detail=f"{process.command} outlived its worker and was ended",
                )
            )
        # A worker that got our stop signal may take its time with its helpers: only those of a job
        # that ended by itself are worth a word.
        if by_itself:
            log_what_was_ended(found)

    async def _drain(self) -> None:
        await drain(self._messages, self.workers, self._warn)

    # What follows from a message.

    def _tell_guardian(self) -> None:
        """Pass on what has been dealt with, for all at once: siblings that are told need the processors."""
        if self._judged:
            judged, self._judged = self._judged, []
            self._let_reap(judged)
        if self._silent:
            silent, self._silent = self._silent, []
            guardian.release_workers(self._mark, [worker.pid for worker in silent if worker.pid is not None])

    def _let_reap(self, workers: Sequence[Worker]) -> None:
        ended = [worker.pid for worker in workers if worker.ended is not None and worker.pid is not None]
        guardian.note_exits(self._mark, ended)
        for worker in workers:
            worker.deal_with_end()

    def _deal_safely_with(self, message: messages.Message) -> None:
        try:
            self._deal_with(message)
        except Exception as error:
            if self.internal_error is not None:
                raise
            self._break(error)

    def _deal_with(self, message: messages.Message) -> None:
        match message:
            case messages.Exited(worker=worker):
                try:
                    self._judge_exit(worker)
                finally:
                    self._judged.append(worker)
            case messages.Spawned(worker=worker):
                self._note("started", worker)
                self._messages.look(worker.be_guarded)
                if self._stop.has_begun:
                    self._stop.tell_late(worker)
            case messages.SpawnFailed(error=error):
                self._fail_start(error)
            case messages.StopOrdered(cause=cause, now=now):
                self._begin_stop(cause, now=now)
            case messages.TracebackWaited(worker=worker):
                self._stop.tell_late(worker)
            case messages.GuardianEnded():
                self._begin_task(self._guarded, self._guardian_watch.revive)
            case messages.Broken(error=error):
                self._break(error)
            case messages.PumpEnded(worker=worker):
                self._silent.append(worker)
            case messages.Nudge():
                pass

    def _judge_exit(self, worker: Worker) -> None:
        """Judge an end in the moment it is known: siblings are told before anything else is done."""
        self._stop.spared.discard(worker)
        if worker.state is WorkerState.RUNNING:
            if worker.exit_code == 0 or (
                worker.exit_code is None and not ends_with_exception(worker.pump.tail())
            ):
                worker.state = WorkerState.SUCCEEDED
            elif worker.spec.auxiliary and all(
                other.ended is not None for other in self.workers if not other.spec.auxiliary
            ):
                # The ranks are through: how it ends no longer matters.
                worker.state = WorkerState.STOPPED
            else:
                worker.state = WorkerState.FAILED
                self._failed.append(worker)
                failed = AuxiliaryEnded if worker.spec.auxiliary else WorkerFailed
                if self._keep_going and not worker.spec.auxiliary:
                    self._say_goes_on(worker)
                elif self.fail_fast:
                    self._begin_stop(failed(name=worker.spec.name), now=False)
                else:
                    self._tell_decided()
        elif worker.state is WorkerState.STOPPING or worker.exit_code not in (-9, None):
            worker.state = WorkerState.STOPPED
        self._note("exited", worker, detail=signal_name(worker.exit_code) or "")
        if worker.state is WorkerState.SUCCEEDED and not worker.spec.auxiliary and not self._alone:
            # One that waits for it in a collective hangs for half an hour otherwise before anything is said.
            self._alone = True
            self._begin_task(self._guarded, self._tell_who_is_alone)
            self._give_stragglers_time(worker)
        if worker.exit_code is None and worker.state is WorkerState.SUCCEEDED:
            self._warn(
                f"{worker.spec.name} has ended, its exit code is not known: this process reaps or ignores "
                "all its children; it counts as success, for its output does not end with an error"
            )

    def _say_goes_on(self, worker: Worker) -> None:
        # Those that are still to be started go on, too.
        going = [one for one in self.workers if one.ended is None and not one.spec.auxiliary]
        if going and not self.is_stopping:
            how = signal_name(worker.exit_code) or f"exit code {worker.exit_code}"
            others = "the other goes on" if len(going) == 1 else f"{len(going)} others go on"
            self._warn(f"{worker.spec.name} failed ({how}); {others}")

    def _give_stragglers_time(self, first: Worker) -> None:
        if self._straggler_timeout is not None:
            self._straggler_timer = asyncio.get_running_loop().call_later(
                self._straggler_timeout, self._stop_stragglers, first
            )

    def _stop_stragglers(self, first: Worker) -> None:
        running = tuple(worker.spec.rank for worker in self._running() if not worker.spec.auxiliary)
        if running and not self.is_stopping:
            assert self._straggler_timeout is not None
            self.stop(Straggling(seconds=self._straggler_timeout, first=first.spec.rank, ranks=running))

    def _begin_stop(self, cause: Cause, *, now: bool) -> None:
        if not self._stop.has_begun:
            self._remains.stop_tick = since_boot()
        self._stop.begin(cause, self._running(), now=now)
        self._remains.hasten()
        guardian.note_stop(self._mark, self._stop.deadline)

    def _fail_start(self, error: WorkerSpawnError) -> None:
        if error.errno == errno.ETIMEDOUT:
            # It was given up because the job is to end: that has its cause already.
            self._warn(str(error))
        else:
            self._spawn_error = self._spawn_error or error
            self._begin_stop(StartFailed(reason=str(error)), now=False)

    def _stop_cancelled(self) -> None:
        self.stop(StopWanted(reason="the job was cancelled"))

    def _tell_decided(self) -> None:
        if self._decided is not None:
            self._begin_task(self._guarded, self._decided)
            self._decided = None

    # Errors of our own.

    async def _guarded(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task of the group: an error in it must not cancel those that look after workers."""
        try:
            await task(*args)
        except Exception as error:
            self._inbox.post(messages.Broken(error=error))

    async def _tend(self, worker: Worker) -> None:
        try:
            await worker.run()
        except Exception as error:
            self._inbox.post(messages.Broken(error=error))
            await worker.end_unwatched()
            self._inbox.post(messages.Nudge())

    def _break(self, error: Exception) -> None:
        """End the workers in order after an error of our own, which `run` then raises."""
        if self.internal_error is not None:
            return
        self.internal_error = error
        cause = InternalError.of(error)
        self._begin_stop(cause, now=False)
        self._emit(Event(kind="internal_error", time=time.time(), detail=cause.traceback))
        logger.error("internal error, the workers are ended:\n%s", cause.traceback)

    async def _end_at_once(self, error: Exception) -> None:
        """End everything with as little of our own as possible: what should do it is broken."""
        with contextlib.suppress(Exception):
            self._break(error)
        self._stop.deadline = -math.inf
        for worker in self._running():
            worker.kill()
        swept = self._messages.look(self._remains.end_at_once)
        swept.add_done_callback(lambda future: future.exception())
        limit = time.monotonic() + _UNKILLABLE_AFTER
        timer = asyncio.get_running_loop().call_later(_UNKILLABLE_AFTER, self._messages.look_again)
        while time.monotonic() < limit and (self._running() or not swept.done()):
            await self._inbox.filled()
            for message in self._inbox.posted():
                if isinstance(message, messages.Exited):
                    self._let_reap([message.worker])
        timer.cancel()

    # Tasks and looks beside the supervisor.

    def _begin_task(
        self, task: Callable[..., Coroutine[Any, Any, None]], *args: object, name: str | None = None
    ) -> None:
        """Begin a task beside the supervisor; `run` waits for its end and cancels none."""
        self._tasks.append(asyncio.get_running_loop().create_task(task(*args), name=name))

    def _begin(self, worker: Worker) -> bool:
        """Start its pump and itself; False where there is no thread for the pump."""
        worker.begun = True
        try:
            output = worker.pump.start()
        except OSError as error:
            worker.pump_ended = True
            self._fail_start(spawn_error(worker.spec, error))
            return False
        self._begin_task(self._guarded, worker.carry, output, name=f"davincirun-{worker.spec.name}-log")
        self._begin_task(self._tend, worker, name=f"davincirun-{worker.spec.name}")
        return True

    async def _load(self) -> None:
        """Load what a failure will need while all is well: the package may be moved or upgraded meanwhile.

        Not in the rush of the start, for it takes a while; a verdict can do without.
        """
        waits = Patience(self._stop_cancelled)
        await waits.within(_RUSH, self._over)
        if self._over.done():
            return
        loaded = self._messages.look(_load_what_the_end_needs, self._ranks_elsewhere)
        await waits.until_any(loaded, self._over)
        if loaded.done() and not isinstance(loaded.exception(), ImportError | OSError):
            loaded.result()

    async def _tell_who_is_alone(self) -> None:
        """Say that ranks are left whose peers have ended well, if they show no sign of work."""
        await Patience(self._stop_cancelled).within(_PEERS_PATIENCE, self._over)
        if not self._over.done():
            # Here, for most jobs are over by now and need not load it.
            from davincirunsdk.supervision.watch import tell_who_is_alone

            await tell_who_is_alone(self, self._over, self._emit)

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.running]

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


def _look_at(worker: Worker) -> WorkerSeen:
    tail = worker.pump.tail()
    return WorkerSeen(
        status=worker.status(),
        auxiliary=worker.spec.auxiliary,
        tail=tail,
        times=worker.pump.tail_times(len(tail)),
        plog_root=worker.spec.env.get("ASCEND_PROCESS_LOG_PATH", ""),
    )


def _load_what_the_end_needs(several_nodes: bool) -> None:
    import davincirunsdk.diagnosis.judge

    if several_nodes:
        import davincirunsdk.diagnosis.parcel  # noqa: F401
