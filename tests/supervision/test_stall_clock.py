"""What counts as a sign of progress, and how long its absence is borne."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from processes import wait_until

from davincirunsdk.host.activity import Activity, look_at
from davincirunsdk.supervision.watch import StallClock

Marks = dict[int, tuple[int, int | None]]


def activity(io: int = 0, cpu: float = 0.0, *, stopped: bool = False, pid: int = 1) -> Activity:
    """Return what a rank with one process does."""
    return Activity(io={pid: io}, cpu=cpu, stopped=stopped)


class Job:
    """A job of two ranks under a clock of 60 s that looks every 6 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = StallClock(60.0, 0.0)
        self.printed = {0: 0, 1: 0}
        self.steps: dict[int, int | None] = {0: None, 1: None}
        self.activities: dict[int, Activity] | None = {0: activity(), 1: activity()}
        self.look(0.0)

    def look(self, seconds: float) -> bool:
        """Take looks for so long; tell whether the job has stalled by then."""
        end = self.now + seconds
        while True:
            marks: Marks = {rank: (size, self.steps[rank]) for rank, size in self.printed.items()}
            self.clock.look(self.now, marks, self.activities, expected=6.0)
            if self.now >= end:
                return self.clock.left(self.now) <= 0
            self.now += 6.0


@pytest.fixture
def job() -> Job:
    """A job that has made its first step."""
    made = Job()
    made.steps = {0: 1, 1: 1}
    made.look(0.0)
    return made


def test_silence_is_a_stall(job: Job) -> None:
    """No output, no step, no byte, no processor time."""
    assert not job.look(54.0)
    assert job.look(12.0)


def test_before_the_first_step_three_times_as_long() -> None:
    """A graph is compiled, data is indexed: nobody knows for how long."""
    fresh = Job()
    assert not fresh.look(168.0)
    assert fresh.look(18.0)


@pytest.mark.parametrize("sign", ["output", "step", "io", "helper", "end"])
def test_any_rank_gives_the_sign(job: Job, sign: str) -> None:
    """One rank's sign is the job's."""
    assert not job.look(54.0)
    assert job.activities is not None
    if sign == "output":
        job.printed[1] += 1
    elif sign == "step":
        job.steps[1] = 2
    elif sign == "io":
        job.activities[1] = activity(io=1)
    elif sign == "helper":
        job.activities[1] = Activity(io={1: 0, 2: 100}, cpu=0.0, stopped=False)
    else:
        del job.printed[1]
    assert not job.look(54.0)
    assert job.look(12.0)


def test_processor_time_only_delays(job: Job) -> None:
    """A rank that spins in a collective looks like one that computes: it gets three times as long."""
    for _ in range(29):
        assert job.activities is not None
        job.activities[0] = activity(cpu=job.activities[0].cpu + 6.0)
        assert not job.look(6.0)
    assert job.look(12.0)


def test_a_little_processor_time_does_not_delay(job: Job) -> None:
    """Threads that wake up now and then are no work."""
    for _ in range(9):
        assert job.activities is not None
        job.activities[0] = activity(cpu=job.activities[0].cpu + 0.1)
        assert not job.look(6.0)
    assert job.look(12.0)


def test_where_nothing_can_be_seen_output_counts(job: Job) -> None:
    """A sick driver holds up every look at a process."""
    job.activities = None
    assert not job.look(54.0)
    job.printed[0] += 1
    assert not job.look(54.0)
    assert job.look(12.0)


def test_a_pause_of_the_launcher_is_not_counted(job: Job) -> None:
    """A machine that was suspended for an hour has not stalled."""
    job.now += 3600.0
    assert not job.look(0.0)
    assert not job.look(48.0)
    assert job.look(18.0)


def test_stopped_ranks_are_known(job: Job) -> None:
    """The kernel tells who is stopped."""
    job.activities = {0: activity(), 1: activity(stopped=True)}
    job.look(6.0)
    assert job.clock.stopped == (1,)


def test_look_at_real_processes() -> None:
    """Bytes and processor time of a process and of one below it in a session of its own, and a stop."""
    inner = (
        "import sys; print('ready', flush=True); sys.stdin.read(1); open('/dev/null', 'w').write('x' * 5000)"
    )
    words = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(process.pid).children()
        before = look_at([process.pid])[process.pid]
        assert set(before.io) == {process.pid, child.pid}
        assert before.cpu > 0
        assert not before.stopped
        process.stdin.write(b"x")
        process.stdin.flush()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: look_at([process.pid])[process.pid].stopped)
        after = look_at([process.pid])[process.pid]
        assert after.cpu >= before.cpu
        process.kill()
    assert look_at([process.pid]) == {}
