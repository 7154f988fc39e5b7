"""One run of the command: the job, what is said about it, its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.cli.signals import Signals
from davincirunsdk.cli.spelling import with_options
from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import DistributedRuntimeError
from davincirunsdk.output.start_line import start_line
from davincirunsdk.phrases import count, ranks
from davincirunsdk.types import JobState, Verdict, WorkerState, readable_time, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.cli.words import Words
    from davincirunsdk.protocol import Job
    from davincirunsdk.types import Event, RunResult, WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

_POST_STOP = Path("/usr/local/Ascend/driver/tools/docker_stop_post_sys.sh")
"""ModelArts' own script, to be run after a job."""

_SILENT = 10.0
"""Seconds without output after which a rank is worth a line when somebody stops the job."""

_MOST_SILENT = 10
"""Lines about silent ranks."""

_POST_STOP_TIME = 60.0
"""Seconds that it may take."""


class Run:
    """Runs a job to its end.

    Args:
        words: Takes what is said.
        quiet: Say nothing but errors and the failure report.
        verbose: Say more: pids, log files, every end.
        grace_period: Seconds that workers have after a stop signal.
        started: Called when all workers run.
    """

    def __init__(
        self,
        words: Words,
        *,
        quiet: bool,
        verbose: bool,
        grace_period: float,
        started: Callable[[Job], None] | None = None,
    ) -> None:
        self._words = words
        self._quiet = quiet
        self._verbose = verbose
        self._grace_period = grace_period
        self._started = started

    async def run(self, job: Job, reap: Callable[[], object] | None) -> int:
        """Start the job and see it to its end.

        Args:
            job: The job, not started yet.
            reap: Called when a child of this process has ended that may be an orphan of the job.

        Returns:
            The exit code.
        """
        task = asyncio.current_task()
        assert task is not None
        signals = Signals(job, self._words, grace_period=self._grace_period, stop=task.cancel)
        signals.handle()
        if reap is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, reap)
        try:
            async with job:
                if self._started is not None:
                    self._started(job)
                self._say_started(job)
                result = await job.wait()
        except DistributedRuntimeError as error:
            return self._failed(job, error, signals.first)
        except asyncio.CancelledError:
            if signals.first is None:
                raise
            found = job.error
            if isinstance(found, DistributedRuntimeError) and found.report.verdict is not Verdict.STOPPED:
                # The signal came while a failure was being dealt with: that stays the cause.
                return self._failed(job, found, signals.first)
            return self._say_stopped(job, signals.first)
        finally:
            await _run_post_stop_script()
            signals.ignore()
        self._say_ended(result)
        return result.exit_code

    def on_event(self, event: Event) -> None:
        """Say with `--verbose` how each worker ended, in the moment in which it does."""
        if self._verbose and event.kind == "exited":
            name = "scheduler" if event.rank == -1 else f"rank {event.rank}"
            how = signal_name(event.exit_code) or f"exit code {event.exit_code}"
            self._say(f"{name}, pid {event.pid}, ended: {how}")

    def _failed(self, job: Job, error: DistributedRuntimeError, first: signal.Signals | None) -> int:
        codes = {one.exit_code for one in error.failures}
        if first is not None and codes and codes <= {-first, 128 + first}:
            # Slurm and systemd signal every process of a job: workers may have ended by it before us.
            return self._say_stopped(job, first)
        self._words.show_report(error.report.text)
        return error.exit_code

    def _say_stopped(self, job: Job, first: signal.Signals) -> int:
        if all(worker.state is WorkerState.PENDING for worker in job.workers):
            self._say(f"stopped by {first.name} before a worker was started")
        else:
            self._say_how_workers_ended(f"stopped by {first.name}", job.workers)
        return 128 + first

    def _say_how_workers_ended(self, why: str, workers: Sequence[WorkerStatus]) -> None:
        ended: dict[WorkerState, list[int]] = {}
        for worker in workers:
            ended.setdefault(worker.state, []).append(worker.rank)
        told = {
            WorkerState.STOPPED: "ended in time",
            WorkerState.FAILED: "ended badly",
            WorkerState.KILLED: "killed",
            WorkerState.SUCCEEDED: "had ended well before",
            WorkerState.PENDING: "not started",
        }
        parts = [f"{ranks(ended[state])} {words}" for state, words in told.items() if state in ended]
        self._say(f"{why}: {'; '.join(parts)}")
        for line in _silent_ranks(workers):
            self._say(line)

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._words.say(text)

    def _say_started(self, job: Job) -> None:
        self._say(start_line(job))
        if self._verbose:
            for fact in job.facts:
                self._say(with_options(str(fact)))
            for worker in (*job.workers, *job.auxiliaries):
                self._say(
                    f"{worker.name}: pid {worker.pid}, device {worker.device_id}, log {worker.log_path}"
                )

    def _say_ended(self, result: RunResult) -> None:
        if result.state is JobState.SUCCEEDED:
            workers = count(len(result.workers), "worker")
            self._say(f"{workers} succeeded in {result.ended - result.started:.1f} s")
        elif result.state is JobState.STOPPED:
            # By a wish that came to the launcher of another node.
            self._say_how_workers_ended("stopped", result.workers)
        if result.lost_log_bytes:
            short = [worker.rank for worker in result.workers if worker.lost_bytes]
            of = f" of {ranks(short)}" if short else ""
            self._words.say(
                f"warning: {result.lost_log_bytes} bytes of output could not be written to log files{of}"
            )


def _silent_ranks(workers: Sequence[WorkerStatus]) -> list[str]:
    """Say which ranks were silent when the job was stopped: it may have been stopped because it hung."""
    silent = []
    for worker in workers:
        since = worker.last_output or worker.started
        if since is None or worker.ended is None or worker.state is WorkerState.SUCCEEDED:
            continue
        if (span := worker.ended - since) >= _SILENT:
            said = f": {worker.last_line}" if worker.last_line else ", no output at all"
            silent.append((span, f"{worker.name} was silent for {readable_time(span)}{said}"))
    silent.sort(key=lambda one: -one[0])
    lines = [line for _, line in silent[:_MOST_SILENT]]
    return lines + [f"and {len(silent) - _MOST_SILENT} more"] * (len(silent) > _MOST_SILENT)


async def _run_post_stop_script() -> None:
    """Run what ModelArts wants run after a job; whatever becomes of it is not the job's end."""
    if "MA_JOB_DIR" not in os.environ and "BATCH_JOB_ID" not in os.environ:
        return
    words = ["/bin/sh", str(_POST_STOP)]
    try:
        if await in_thread(_POST_STOP.exists):
            await in_thread(
                lambda: subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_POST_STOP_TIME, check=False)
            )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s did not end well: %s", _POST_STOP, error)
