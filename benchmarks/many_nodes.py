"""What the driver of a job on many nodes costs: nodes that only reply, from 4 to 4,096, 8 workers each.

    python benchmarks/many_nodes.py [NODES...]

No process is started. A node answers every call at once and reports as a real agent does: one report
with its workers' starts, then silence until something happens. Every message is pickled and unpickled,
as an engine does, so that its bytes and its time count. Each size runs in a process of its own.

Columns: seconds from the call until all workers are started; from one worker's failure until the last
node has been told to stop, and until the result is there; from a stop by hand until all is over;
messages and KiB to and from the driver for one start and stop; the driver's memory for it.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from davincirunsdk import DistributedRuntimeError, __version__
from davincirunsdk.engines.driver import NodesManager
from davincirunsdk.engines.messages import LogPiece, NodeFacts, NodeReport, NodeStarted
from davincirunsdk.types import Event, JobState, RunResult, WorkerFailure, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import NodePlan
    from davincirunsdk.engines.node import NodeHandle

T = TypeVar("T")

SIZES = (4, 16, 64, 256, 1024, 4096)
PER_NODE = 8


class Wire:
    """Counts what goes over it."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    def carry(self, message: T) -> T:
        data = pickle.dumps(message)
        self.messages += 1
        self.bytes += len(data)
        copy: T = pickle.loads(data)
        return copy


class RepliesOnly:
    """A node without processes; see `NodeHandle`."""

    def __init__(self, wire: Wire, place: int) -> None:
        self._wire = wire
        self._place = place
        self._news = asyncio.Event()
        self._reported = False
        self._workers: tuple[WorkerStatus, ...] = ()
        self._failing: int | None = None
        self.told_to_stop = 0.0

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        self._wire.carry(nproc_per_node)
        table = json.dumps(
            {
                "version": "1.0",
                "server_count": "1",
                "status": "completed",
                "server_list": [
                    {
                        "server_id": f"10.1.{self._place // 256}.{self._place % 256}",
                        "device": [
                            {
                                "device_id": str(number),
                                "device_ip": f"10.{2 + number}.{self._place // 256}.{self._place % 256}",
                                "rank_id": str(number),
                            }
                            for number in range(PER_NODE)
                        ],
                    }
                ],
            }
        )
        facts = NodeFacts(
            host=f"node-{self._place}",
            address=f"10.1.{self._place // 256}.{self._place % 256}",
            port=29500,
            devices=PER_NODE,
            table=table,
            version=__version__,
        )
        return self._wire.carry(facts)

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        # The table goes to every node through the engine's store, so it is counted once, by the caller.
        plan = self._wire.carry(plan)
        first = (plan.options.node_rank or 0) * PER_NODE
        self._workers = tuple(
            WorkerStatus(
                rank=first + number,
                local_rank=number,
                device_id=number,
                pid=1000 + number,
                state=WorkerState.RUNNING,
                exit_code=None,
                started=time.time(),
                ended=None,
                log_path=Path(f"/work/log/job-proc-rank-{first + number}-device-{number}.txt"),
                log_bytes=123456,
                last_output=time.time(),
                last_line="step 100 of 10000  loss 1.2345",
                lost_bytes=0,
                name=f"rank {first + number}",
            )
            for number in range(PER_NODE)
        )
        return self._wire.carry(NodeStarted(workers=self._workers))

    async def report(self) -> NodeReport:
        self._wire.carry(None)
        if not self._reported:
            self._reported = True
            events = tuple(
                Event(kind="started", time=time.time(), rank=w.rank, pid=w.pid) for w in self._workers
            )
            return self._wire.carry(NodeReport(workers=self._workers, events=events))
        await self._news.wait()
        self._news.clear()
        if self._failing is not None and not self.told_to_stop:
            stopping = Event(kind="stopping", time=time.time(), detail=f"rank {self._failing} failed")
            self.told_to_stop = time.monotonic()
            self._news.set()
            return self._wire.carry(NodeReport(workers=self._workers, events=(stopping,)))
        ended = tuple(
            replace(worker, state=WorkerState.STOPPED, exit_code=-15, ended=time.time())
            for worker in self._workers
        )
        if self._failing is not None:
            failed = replace(ended[0], state=WorkerState.FAILED, exit_code=1, last_line="RuntimeError: no")
            ended = (failed, *ended[1:])
        events = tuple(
            Event(kind="exited", time=time.time(), rank=w.rank, exit_code=w.exit_code) for w in ended
        )
        return self._wire.carry(NodeReport(workers=ended, events=events, result=self._result(ended)))

    async def stop(self, now: bool) -> None:
        self._wire.carry(now)
        self.told_to_stop = self.told_to_stop or time.monotonic()
        self._news.set()

    async def signal(self, number: int) -> None:
        self._wire.carry(number)

    async def ranks_ended(self) -> None:
        """There is no scheduler."""

    async def sees_file(self, path: str, beginning: bytes) -> bool:
        return self._wire.carry(True)

    async def read_log(self, rank: int, start: int, size: int) -> LogPiece:
        raise AssertionError("no logs are here")

    async def set_logs_aside(self, attempt: int) -> None:
        self._wire.carry(attempt)

    def fail(self) -> None:
        """Have the first worker fail."""
        self._failing = self._workers[0].rank
        self._news.set()

    def _result(self, ended: tuple[WorkerStatus, ...]) -> RunResult:
        failures: tuple[WorkerFailure, ...] = ()
        if self._failing is not None:
            failed = ended[0]
            failures = (
                WorkerFailure(
                    rank=failed.rank,
                    local_rank=0,
                    node_rank=failed.rank // PER_NODE,
                    node=f"node-{self._place}",
                    device_id=0,
                    pid=failed.pid,
                    exit_code=1,
                    ended=time.time(),
                    log_path=failed.log_path,
                    tail=("Traceback (most recent call last):", "RuntimeError: no"),
                    reason="exit code 1",
                    name=failed.name,
                ),
            )
        return RunResult(
            job_id="job",
            state=JobState.FAILED if failures else JobState.STOPPED,
            exit_code=1 if failures else 143,
            workers=ended,
            auxiliaries=(),
            failures=failures,
            leftovers=(),
            lost_log_bytes=0,
            started=time.time(),
            ended=time.time(),
            log_dir=Path("/work/log"),
        )


class Simulated:
    """A placement of such nodes."""

    renewal_timeout = 0.0

    def __init__(self, count: int) -> None:
        self.wire = Wire()
        self.nodes = [RepliesOnly(self.wire, place) for place in range(count)]

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        raise AssertionError("there are no other nodes")

    async def open(self, table: GivenTable | None) -> Sequence[NodeHandle]:
        return self.nodes

    async def until_lost(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        return


async def measure(count: int) -> dict[str, float]:
    process = psutil.Process()
    before = process.memory_info().rss
    placement = Simulated(count)
    began = time.perf_counter()
    async with NodesManager(placement, ["python", "train.py"]) as job:
        started = time.perf_counter() - began
        began = time.perf_counter()
        await job.stop()
        stopped = time.perf_counter() - began
        await job.wait()
    memory = process.memory_info().rss - before
    messages, size = placement.wire.messages, placement.wire.bytes

    placement = Simulated(count)
    async with NodesManager(placement, ["python", "train.py"]) as job:
        await asyncio.sleep(0.2)
        moment = time.monotonic()
        placement.nodes[count // 2].fail()
        try:
            await job.wait()
        except DistributedRuntimeError:
            judged = time.monotonic() - moment
    told = max(node.told_to_stop for node in placement.nodes) - moment
    return {
        "start": started,
        "told": told,
        "judged": judged,
        "stop": stopped,
        "messages": messages,
        "kib": size / 1024,
        "mib": memory / (1 << 20),
    }


COLUMNS = (
    ("start s", "start", 9, 3),
    ("told s", "told", 8, 3),
    ("judged s", "judged", 10, 3),
    ("stop s", "stop", 8, 3),
    ("messages", "messages", 10, 0),
    ("KiB", "kib", 8, 0),
    ("MiB", "mib", 7, 1),
)


def main(sizes: Sequence[int]) -> None:
    """Print a row per size, and the growth from the first to the last."""
    print(f"{'nodes':>6}{'workers':>9}" + "".join(f"{title:>{width}}" for title, _, width, _ in COLUMNS))
    rows = {}
    for size in sizes:
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(size)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        row = rows[size] = json.loads(done.stdout)
        figures = "".join(f"{row[name]:>{width}.{places}f}" for _, name, width, places in COLUMNS)
        print(f"{size:>6}{size * PER_NODE:>9}{figures}")
    first, last = min(rows), max(rows)
    if first < last:
        growth = ", ".join(
            f"{name} {rows[last][name] / rows[first][name]:.0f}x"
            for name in ("start", "stop", "messages", "kib")
            if rows[first][name]
        )
        print(f"growth from {first} to {last} nodes, {last / first:g}x: {growth}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(asyncio.run(measure(int(sys.argv[2])))))
    else:
        main([int(word) for word in sys.argv[1:]] or SIZES)
