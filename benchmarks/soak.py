"""Soak: kill supervisors at random moments and count what is left; or run jobs without end in one process.

    python benchmarks/soak.py [ROUNDS] [--lanes N] [--seed S]
    python benchmarks/soak.py --jobs 1000

Each round starts `davincirun` with four workers: one that obeys SIGTERM, one that is deaf to it, one
with a deaf helper in another session, one with a deaf daemon that forked twice. The supervisor gets
SIGKILL 0 to 400 ms after its start, 0 to 400 ms after the moment in which it made its log folder,
which is just before the first worker, or 0.4 to 2 s after its start. In every second round the guardian
is killed in the same moment, with neither having time to act. Everything that has the round's variable
in its environment and is alive a grace period and 3 s later is counted, and apart from that the
guardians that have not left by then; one that is there 10 s after the kill counts as left over.

`--jobs` starts and ends jobs in one process in every way (success, failure, command not found, stop,
kill, cancellation, leaving the block), with readers of lines and events that come before or after the
start and leave before or at the end, and compares descriptors, threads, tasks, children and memory with
those after the first 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from davincirunsdk import DavinciRunError, FMKManager, JobState

KINDS = ("obedient", "deaf", "setsid", "double-fork-setsid")
WORKER = Path(__file__).parents[1] / "tests" / "workers" / "kinds.py"
GRACE = 1.0
LIMIT = GRACE + 3.0
GROWTH = 4096
"""KiB that the allocator may keep more of after the jobs than before; a thousand leaks show as more."""
VARIABLE = "SOAK_OF_DAVINCIRUN"


def main() -> None:
    """Read the arguments, run, print the figures; exit 1 when something was left."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("rounds", nargs="?", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=4, help="rounds or jobs at the same time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--jobs", type=int, help="run so many jobs in one process instead")
    options = parser.parse_args()
    if options.jobs is not None:
        sys.exit(asyncio.run(run_jobs(options.jobs, options.lanes)))
    sys.exit(kill_supervisors(options.rounds, options.lanes, options.seed))


def kill_supervisors(rounds: int, lanes: int, seed: int) -> int:
    """Run the rounds and print what was left."""
    chance = random.Random(seed)
    moments = [
        (
            number % 5 in (1, 3),
            chance.uniform(0.4, 2.0) if number % 5 == 4 else chance.uniform(0, 0.4),
            number % 2 == 1,
        )
        for number in range(rounds)
    ]
    began = time.monotonic()
    left, times, started, late = [], [], 0, 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(lanes) as pool:
        runs = pool.map(lambda number: one_round(Path(folder) / str(number), *moments[number]), range(rounds))
        for number, (processes, records, clean_after, guardian_late) in enumerate(runs):
            started += records > 0
            late += guardian_late
            times.append(clean_after)
            if processes:
                left.append(number)
                since = "its log folder" if moments[number][0] else "its start"
                print(f"round {number}: {moments[number][1]:.3f} s after {since}: {processes}", flush=True)
            if number % 100 == 99:
                print(f"{number + 1} rounds, {len(left)} with something left", flush=True)
    print(
        f"{rounds} rounds in {time.monotonic() - began:.0f} s (seed {seed}), {started} had workers that ran: "
        f"{len(left)} left something {LIMIT:g} s after the kill; workers gone after "
        f"{statistics.median(times):.2f} s (median), {max(times):.2f} s (longest); "
        f"{late} guardians needed more than {LIMIT:g} s"
    )
    return 1 if left else 0


def one_round(
    folder: Path, from_log_folder: bool, moment: float, with_guardian: bool
) -> tuple[list[str], int, float, bool]:
    """Start a supervisor, kill it, and look.

    Args:
        folder: The round's own; its name is the variable's value.
        from_log_folder: Count the moment from the making of the log folder, not from the start.
        moment: Seconds until the kill.
        with_guardian: Kill its guardian in the same moment.

    Returns:
        What is left, how many processes had recorded themselves, seconds until no process of the job
        was left, whether the guardian took longer than the limit.
    """
    records = folder / "records"
    records.mkdir(parents=True)
    command = [sys.executable, "-S", "-E", str(WORKER), str(records), ",".join(KINDS)]
    options = ["--nproc-per-node", str(len(KINDS)), "--echo", "none", "--log-dir", str(folder / "log")]
    options += ["--grace-period", str(GRACE)]
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "davincirunsdk", *options, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, VARIABLE: folder.name},
        start_new_session=True,
    )
    while from_log_folder and not (folder / "log").exists() and supervisor.poll() is None:
        time.sleep(0.001)
    time.sleep(moment)
    if with_guardian:
        kill_together(psutil.Process(supervisor.pid))
    supervisor.kill()
    killed = time.monotonic()
    supervisor.wait()
    while True:
        workers, guardians = marked(folder.name)
        took = time.monotonic() - killed
        if not workers or took >= LIMIT:
            break
        time.sleep(0.05)
    guardian_late = False
    while guardians and time.monotonic() < killed + 10.0:
        guardian_late = time.monotonic() > killed + LIMIT
        time.sleep(0.05)
        later, guardians = marked(folder.name)
        # None may come up after all seemed gone.
        workers.extend(process for process in later if process not in workers)
    names = []
    for process in (*workers, *guardians):
        try:
            names.append(f"{process.pid} {' '.join(process.cmdline()[-2:])}")
            process.kill()
        except psutil.Error:
            continue
    return names, len(list(records.glob("[!.]*"))), took, guardian_late


def kill_together(supervisor: psutil.Process) -> None:
    """Stop a supervisor and its guardian, so that neither acts between the two kills."""
    pair = [supervisor]
    try:
        supervisor.suspend()
        pair += [child for child in supervisor.children() if is_guardian(child)][:1]
        for process in pair:
            process.suspend()
        for process in pair:
            process.kill()
    except psutil.NoSuchProcess:
        # It was too early for one of them.
        return


def marked(value: str) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """List living processes with the round's variable: those of the job, and guardians."""
    wanted = f"{VARIABLE}={value}".encode()
    workers: list[psutil.Process] = []
    guardians: list[psutil.Process] = []
    for pid in psutil.pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    (guardians if is_guardian(process) else workers).append(process)
        except (psutil.Error, OSError):
            continue
    return workers, guardians


def is_guardian(process: psutil.Process) -> bool:
    """Tell a guardian or its standby from what they end."""
    return process.cmdline()[1:4] == ["-I", "-S", "-c"]


async def run_jobs(count: int, lanes: int) -> int:
    """Run jobs, some at the same time, and print what they cost for good."""
    warm_up = max(20, count // 20)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        async def run(numbers: range) -> None:
            async def lane(first: int) -> None:
                for number in numbers[first::lanes]:
                    await one_job(number, Path(folder) / str(first))

            await asyncio.gather(*map(lane, range(lanes)))

        await run(range(warm_up))
        before = await stock()
        await run(range(count))
        after = await stock()
    print(
        f"{count} jobs, {lanes} at a time, after {warm_up} for warming up, {time.monotonic() - began:.0f} s"
    )
    for name, value in after.items():
        print(f"{name:12} {before[name]:10} -> {value:10}")
    allowed = {name: before[name] + (GROWTH if name == "memory KiB" else 0) for name in after}
    return 0 if all(after[name] <= allowed[name] for name in after) else 1


async def one_job(number: int, log_dir: Path) -> None:
    """Start and end a job; the way depends on the number."""
    python = [sys.executable, "-S", "-E", "-c"]
    sleeper = [*python, "import time; print('asleep', flush=True); time.sleep(600)"]
    way = number % 7
    short = {
        0: [*python, "print('line\\n' * 1000)"],
        1: [*python, "print('line'); raise SystemExit(3)"],
        2: ["no-such-command-anywhere"],
    }
    command = short.get(way, sleeper)
    manager = FMKManager(command, log_dir=log_dir, keep_logs=1, nproc_per_node=2, grace_period=5)

    async def read() -> None:
        async with manager.logs() as lines:
            async for _ in lines:
                if number % 2:
                    break

    async def follow() -> None:
        async with manager.events() as events:
            async for _ in events:
                if number % 3:
                    break

    readers = [asyncio.create_task(read())] if number % 4 < 2 else []

    async def run() -> None:
        async with manager:
            readers.append(asyncio.create_task(follow()))
            if number % 4 >= 2:
                readers.append(asyncio.create_task(read()))
            if way == 3:
                await manager.stop()
            elif way == 4:
                await manager.stop(now=True)
            elif way != 5:
                await manager.wait()

    task = asyncio.create_task(run())
    if way == 6:
        await asyncio.sleep(0.001 * (number % 100))
        task.cancel()
    try:
        await task
    except DavinciRunError:
        assert way in (1, 2), way
    except asyncio.CancelledError:
        assert way == 6, way
    if manager.state is JobState.PENDING:
        # Cancelled before its start: there is no end to wait for.
        for reader in readers:
            reader.cancel()
    for end in await asyncio.gather(*readers, return_exceptions=True):
        assert end is None or isinstance(end, asyncio.CancelledError), end


async def stock() -> dict[str, int]:
    """Count what a job could leave in this process."""
    await asyncio.sleep(1.0)
    me = psutil.Process()
    return {
        "descriptors": me.num_fds(),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "children": len(me.children(recursive=True)),
        "memory KiB": me.memory_info().rss // 1024,
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
