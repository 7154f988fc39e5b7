"""The one background loop of the process, in which jobs of synchronous code run.

It lives in a thread that starts with the first job. When the script has ended normally, jobs that
nobody waited for are waited for, and those that failed meanwhile are reported; when it has ended by an
exception, they are stopped; survivors of a failure are stopped in any case, when the program's other
threads have ended, too.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from anyio.from_thread import start_blocking_portal

from davincirunsdk.concurrency import call_in_loop
from davincirunsdk.errors import DavinciRunError, DistributedRuntimeError
from davincirunsdk.output import standard
from davincirunsdk.phrases import count
from davincirunsdk.supervision.verdict import INTERNAL_ERROR
from davincirunsdk.types import JobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import FrameType

    from anyio.from_thread import BlockingPortal

    from davincirunsdk.job import JobBody
    from davincirunsdk.types import RunResult

T = TypeVar("T")

_EXIT_THREAD = "davincirun-exit"

COUNTS_AFTER = 1.0
"""Seconds after an interrupt that counted in which no other one counts: wrappers deliver one wish twice."""


class Terminated(BaseException):
    """SIGTERM came while the main thread waited."""


INTERRUPTS = (KeyboardInterrupt, Terminated)


class _Background:
    """The background loop, opened with the first use and closed when the program has ended."""

    def __init__(self) -> None:
        self._told_python = False
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A forked child has neither the thread nor the jobs, and perhaps a lock that nobody frees."""
        self._lock = threading.Lock()
        self._opened: Future[BlockingPortal] | None = None
        self._jobs: list[JobBody] = []
        self._exit_code: int | None = None

    def portal(self) -> BlockingPortal:
        """Open the loop, if that is not done.

        Raises:
            RuntimeError: The program's threads are none, or none can be had.
        """
        _refuse_patched_threads()
        _refuse_after_the_end()
        with self._lock:
            opened = self._opened
            if opened is None:
                opened = Future()
                # Opened and closed in a thread of its own: Ctrl-C while it opens would leave it half made.
                # No atexit handler closes it: those run when no thread can be started any more, which
                # stopping needs. Not a daemon, though the caller may be one.
                threading.Thread(target=self._live, args=[opened], name=_EXIT_THREAD, daemon=False).start()
                self._opened = opened
                self._ask_for_the_end()
        return opened.result()

    def add(self, job: JobBody) -> None:
        """Look after a job at the end of the program."""
        with self._lock:
            self._jobs = [*(other for other in self._jobs if not _is_done_with(other)), job]

    def _ask_for_the_end(self) -> None:
        """Be called in the main thread when the script has ended; only there can signals be dealt with."""
        register = getattr(threading, "_register_atexit", None)
        if register is None or self._told_python:
            return
        try:
            register(self._at_end_of_script)
        except RuntimeError:
            # It ends already.
            return
        self._told_python = True

    def _at_end_of_script(self) -> None:
        with self._lock:
            jobs = [job for job in self._jobs if not _is_done_with(job)]
        if not jobs or _is_interactive():
            return
        failed = getattr(sys, "last_type", None) is not None
        try:
            # A thread of the program may wait for the job.
            _join_others()
        except KeyboardInterrupt:
            failed = True
        for job in jobs:
            if _is_done_with(job) or (failed and job._is_over) or (job._awaited and not failed):
                continue
            if failed:
                workers = count(len(job.workers), "worker")
                say(f"the script has ended by an exception: stopping job {job.job_id} ({workers})")
                with suppress(*INTERRUPTS):
                    end(job)
            else:
                code = _code_of(job)
                self._exit_code = self._exit_code or code

    def _live(self, opened: Future[BlockingPortal]) -> None:
        try:
            with start_blocking_portal("asyncio", name="davincirun-loop") as portal:
                opened.set_result(portal)
                threading.main_thread().join()
                _join_others()
                with self._lock:
                    jobs = self._jobs if self._opened is opened else []
                endings = [portal.start_task_soon(job._end_here) for job in jobs]
                for ending in endings:
                    ending.exception()
        except Exception as error:
            if opened.done():
                raise
            # Such as no thread to be had for the loop; there may be one later.
            with self._lock:
                self._opened = None
            opened.set_exception(error)
        if self._exit_code:
            _exit(self._exit_code)


def _refuse_patched_threads() -> None:
    """Refuse threads that are none: the loop would run in the thread that waits for it.

    Raises:
        RuntimeError: A library has replaced them.
    """
    module = getattr(_thread.start_new_thread, "__module__", None) or "_thread"
    if module != "_thread":
        raise RuntimeError(
            f"{module.partition('.')[0]} has replaced this program's threads, in which the job would run; "
            "nothing was started: patch with thread=False, or start the job as a program of its own: "
            "subprocess.run(['davincirun', 'python', 'train.py'])"
        )


def _refuse_after_the_end() -> None:
    """Refuse an `atexit` handler: the loop would end at once, and Python 3.12 starts no thread there.

    Raises:
        RuntimeError: It is one.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() and not thread.is_alive():
        raise RuntimeError(
            "the program is ending, so no job can be started from here (an atexit handler?); nothing was "
            "started: start it before the script's end, or as a program of its own: "
            "subprocess.run(['davincirun', 'python', 'train.py'])"
        )


def _is_done_with(job: JobBody) -> bool:
    """Tell whether a job has ended, and somebody knows how, if not well."""
    return job._is_over and (job._outcome.told or job.error is None)


def _is_interactive() -> bool:
    """Tell whether a person types here: then a job that nobody waited for ends with the session."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def _code_of(job: JobBody) -> int:
    """Wait for a job at the end of the script.

    Returns:
        What the process is to end with.
    """
    try:
        loop = _loop_of(job)
        with signals_end_waiting(lambda: call_in_loop(loop, job._request_stop)) as settle:
            workers = count(len(job.workers), "worker")
            try:
                if job._is_over:
                    say(f"job {job.job_id} had failed, and nobody waited for it")
                    job._outcome.take()
                say(
                    f"the script has ended, and nobody waits for job {job.job_id} ({workers}): waiting for "
                    f"its end; Ctrl-C or `kill {os.getpid()}` stops it"
                )
                asyncio.run_coroutine_threadsafe(job._wait_here(), loop).result()
                settle()
            finally:
                end(job)
    except DistributedRuntimeError as error:
        say(str(error), alone=True)
        return error.exit_code
    except DavinciRunError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"SIGINT: job {job.job_id} was stopped")
        return 128 + signal.SIGINT
    except Exception as error:
        say(f"error: {type(error).__name__}: {error}")
        return INTERNAL_ERROR
    say(f"job {job.job_id} has ended: {job.state}")
    return 0 if job.state is JobState.SUCCEEDED else 143


def say(text: str, *, alone: bool = False) -> None:
    """Say something about a job on standard error, for a script that shows its output."""
    try:
        print(text if alone else f"davincirunsdk: {text}", file=sys.stderr, flush=True)  # noqa: T201 # see the module
    except (OSError, ValueError, AttributeError):
        # Nobody can be told.
        return


def _exit(code: int) -> None:
    """End the process with another code than the script's own, after all that is done at its end."""
    atexit._run_exitfuncs()
    standard.flush()
    os._exit(code)


def _join_others() -> None:
    """Wait until the program's threads have ended: the interpreter waits for them as well."""
    while others := [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        # Ctrl-C in the moment of the first may have let a second of ours start: they wait for nobody's end.
        and not thread.daemon
        and thread.name != _EXIT_THREAD
        and thread.is_alive()
    ]:
        others[0].join()


background: _Background = _Background()


def wait(job: JobBody, *, destroy: bool) -> RunResult:
    """Wait for a job from a thread without a loop, or beside one.

    Args:
        job: The job, which was started.
        destroy: Leave nothing of it when the waiting ends, in whatever way.
    """
    with signals_end_waiting():
        interrupted = False
        try:
            if job._is_over:
                # Perhaps with its loop: `asyncio.run` is over.
                return job._outcome.take()
            return asyncio.run_coroutine_threadsafe(job._wait_here(), _loop_of(job)).result()
        except INTERRUPTS:
            interrupted = True
            raise
        finally:
            if destroy:
                end(job, interrupted=interrupted)


def end(job: JobBody, *, interrupted: bool = False) -> None:
    """Stop what is left and wait until it is gone; another interrupt that counts hastens it.

    Args:
        job: The job.
        interrupted: True when it ends because of an interrupt.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    if job._home.loop is None or job._is_over:
        return
    latest: BaseException | None = None
    now = False
    while True:
        try:
            asyncio.run_coroutine_threadsafe(job._end_here(now), _loop_of(job)).result()
        except INTERRUPTS as again:
            latest, now = again, interrupted
            interrupted = True
        else:
            break
    if latest is not None:
        raise latest


def _loop_of(job: JobBody) -> asyncio.AbstractEventLoop:
    assert job._home.loop is not None
    return job._home.loop


@contextmanager
def signals_end_waiting(at_once: Callable[[], object] | None = None) -> Iterator[Callable[[], None]]:
    """Let Ctrl-C and SIGTERM end the waiting inside, where the program leaves both to their defaults.

    A further one raises only when it counts: what wrappers deliver twice, and a key held down, must not
    tear the ending that the first has begun. SIGTERM's default action comes at the end of the outermost
    block, when job and cache folder are gone.

    Args:
        at_once: Called by the handler before it raises: what it raises is lost where Python happens to
            be inside a callback that lets no exception out.

    Yields:
        What raises an interrupt that was lost so.
    """
    raised: list[type[BaseException]] = []
    kinds: dict[signal.Signals, type[BaseException]] = {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            kinds[signal.SIGTERM] = Terminated
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            kinds[signal.SIGINT] = KeyboardInterrupt
    counted = -COUNTS_AFTER

    def raise_if_it_counts(number: int, frame: FrameType | None) -> None:
        nonlocal counted
        now = time.monotonic()
        if now - counted >= COUNTS_AFTER:
            counted = now
            raised.append(kinds[signal.Signals(number)])
            if at_once is not None:
                at_once()
            raise raised[-1]

    def settle() -> None:
        if raised:
            raise raised[0]

    before = {number: signal.signal(number, raise_if_it_counts) for number in kinds}
    try:
        yield settle
    except Terminated:
        if signal.SIGTERM not in kinds:
            raise
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Call(Generic[T]):
    """A coroutine in the background loop that can be ended from outside, whether it has begun or not.

    The portal's own futures will not do: cancelling one waits for nothing and does not reach a start,
    which shields itself from cancel scopes, and an interrupt may come before there is a future.

    Args:
        function: Makes the coroutine.
        hasten: Makes one that hastens its end.
    """

    def __init__(
        self, function: Callable[[], Awaitable[T]], hasten: Callable[[], Awaitable[None]] | None
    ) -> None:
        self._function = function
        self._hasten = hasten
        self._task: asyncio.Future[T] | None = None
        self._unwanted = False

    async def run(self) -> T:
        if self._unwanted:
            raise asyncio.CancelledError
        self._task = asyncio.ensure_future(self._function())
        await asyncio.wait({self._task})
        return self._task.result()

    async def end(self, hasten: bool) -> None:
        """Cancel it and wait for its end; after this it cannot begin any more."""
        self._unwanted = True
        if self._task is None:
            return
        self._task.cancel()
        if hasten and self._hasten is not None:
            await self._hasten()
        await asyncio.wait({self._task})


def run_in_background(
    function: Callable[[], Awaitable[T]], hasten: Callable[[], Awaitable[None]] | None = None
) -> T:
    """Run a coroutine function in the background loop; Ctrl-C cancels it and waits for its end.

    Args:
        function: Makes the coroutine.
        hasten: Makes one that hastens the end, for every further Ctrl-C.
    """
    call = _Call(function, hasten)
    portal = background.portal()
    try:
        return portal.start_task_soon(call.run).result()
    except INTERRUPTS:
        _insist(lambda again: portal.start_task_soon(call.end, again).result())
        raise


def _insist(end: Callable[[bool], None]) -> None:
    """Call `end` until it returns; its argument is true after a further interrupt."""
    again = False
    while True:
        try:
            end(again)
        except INTERRUPTS:
            again = True
        else:
            return
