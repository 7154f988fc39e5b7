"""The driver and the agents of a job on several nodes, without an engine: agents in this process as nodes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import is_alive

from davincirunsdk import DistributedRuntimeError, WorkerSpawnError
from davincirunsdk.engines.agent import NodeAgent
from davincirunsdk.engines.driver import NodesManager
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.options import JobOptions
from davincirunsdk.output.start_line import start_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import NodeFacts, NodePlan, NodeReport, NodeStarted
    from davincirunsdk.engines.node import NodeHandle
    from davincirunsdk.errors import DavinciRunError
    from davincirunsdk.types import Event

pytestmark = pytest.mark.usefixtures("job_folder")

WORKER = [sys.executable, str(Path(__file__).parent / "programs" / "worker.py")]


class Here:
    """A placement whose nodes are agents in this process."""

    renewal_timeout = 0.0

    def __init__(self, *agents: NodeAgent) -> None:
        self.agents = agents
        self.closed = 0
        self.given: GivenTable | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        raise AssertionError("there are no other nodes")

    async def open(self, table: GivenTable | None) -> Sequence[NodeHandle]:
        self.given = table
        return self.agents

    async def until_lost(self) -> str:
        return await self.lost

    async def close(self) -> None:
        self.closed += 1


class Fragile(NodeAgent):
    """A node that the engine loses when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = asyncio.Event()

    async def report(self) -> NodeReport:
        """Report until the node is lost."""
        losing = asyncio.ensure_future(self.lost.wait())
        reporting = asyncio.ensure_future(super().report())
        await asyncio.wait({losing, reporting}, return_when=asyncio.FIRST_COMPLETED)
        losing.cancel()
        if self.lost.is_set():
            reporting.cancel()
            raise NodeLostError("its cable was cut")
        return reporting.result()


class Odd(NodeAgent):
    """A node on which a part of the plan is not what it is on the others."""

    def __init__(self, changes: dict[str, object]) -> None:
        super().__init__()
        self._changes = changes

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        """Start what this node makes of the plan."""
        options = replace(plan.options, **self._changes)  # type: ignore[arg-type] # of any field
        return await super().start(replace(plan, options=options), table)


class Silent(NodeAgent):
    """A node that does not say any more how things stand once it was asked to stop."""

    async def stop(self, now: bool = False) -> None:
        """Hear it and do nothing."""


def host(folder: Path, name: str, devices: int, network: str = "") -> NodeAgent:
    """A node with NPUs, as its files show them; with addresses if a network is given."""
    for sub in ("dev", "etc"):
        (folder / name / sub).mkdir(parents=True)
    for number in range(devices):
        (folder / name / "dev" / f"davinci{number}").touch()
    (folder / name / "etc" / "hostname").write_text(f"{name}\n")
    if network:
        lines = [f"address_{number}={network}.{number + 1}" for number in range(devices)]
        (folder / name / "etc" / "hccn.conf").write_text("\n".join(lines) + "\n")
    return NodeAgent(folder / name)


async def test_device_addresses_make_one_rank_table(tmp_path: Path) -> None:
    """Nodes that know their NPUs' addresses start from one v1.0 table, ordered by server id, equal on all."""
    show = "import os; print(os.environ['RANK'], open(os.environ['RANK_TABLE_FILE']).read())"
    placement = Here(host(tmp_path, "b", 2, "192.0.2"), host(tmp_path, "a", 2, "198.51.100"))
    async with NodesManager(placement, [sys.executable, "-c", show]) as job:
        result = await job.wait()
    texts = [worker.log_path.read_text().split(" ", 1) for worker in result.workers]
    assert [rank for rank, _ in texts] == ["0", "1", "2", "3"]
    assert len({table for _, table in texts}) == 1
    table = json.loads(texts[0][1])
    assert (table["version"], table["status"]) == ("1.0", "completed")
    assert [
        (server["server_id"], device["rank_id"], device["device_id"], device["device_ip"])
        for server in table["server_list"]
        for device in server["device"]
    ] == [
        ("a", "0", "0", "198.51.100.1"),
        ("a", "1", "1", "198.51.100.2"),
        ("b", "2", "0", "192.0.2.1"),
        ("b", "3", "1", "192.0.2.2"),
    ]


def write_table(path: Path, rows: Mapping[str, tuple[int, ...]], status: str = "completed") -> None:
    """Write a v1.0 table of devices per server, ranks in this order."""
    ranks = itertools.count()
    servers = [
        {
            "server_id": server,
            "device": [
                {"device_id": str(one), "device_ip": f"29.0.{place}.{one + 1}", "rank_id": str(next(ranks))}
                for one in numbers
            ],
        }
        for place, (server, numbers) in enumerate(rows.items())
    ]
    about = {"version": "1.0", "status": status, "server_count": str(len(servers))}
    path.write_text(json.dumps({**about, "server_list": servers}))


async def test_a_table_of_the_user_s_gives_devices_and_ranks(tmp_path: Path) -> None:
    """Nodes in the table's order, each with the devices and ranks of its rows."""
    table = tmp_path / "table.json"
    write_table(table, {"b": (1, 3), "a": (0,)})
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")
    show = f"import os; print(*(os.environ[name] for name in {names}))"
    placement = Here(host(tmp_path, "b", 4), host(tmp_path, "a", 4))
    options = JobOptions.of([sys.executable, "-c", show], rank_table=table)
    async with NodesManager.from_options(placement, options) as job:
        result = await job.wait()
    assert placement.given is not None
    assert [node.name for node in placement.given.nodes] == ["b", "a"]
    told = [worker.log_path.read_text().split() for worker in result.workers]
    assert told == [["0", "3", "0", "0"], ["1", "3", "0", "1"], ["2", "3", "1", "0"]]
    assert [worker.npu_id for worker in result.workers] == [1, 3, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"found device 6 of b, where NPUs 0-3 can be used .*; device 5 of a, where NPUs 0-3"),
        ({"nnodes": 3}, r"found 2 nodes; expected 3, the nnodes asked for"),
        ({"nproc_per_node": 2}, r"found 1 device of a; expected 2, the nproc_per_node asked for"),
    ],
)
async def test_a_table_that_does_not_fit_starts_nothing(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """One error says all that does not fit, before a worker is started anywhere."""
    table = tmp_path / "table.json"
    write_table(table, {"b": (1, 6), "a": (5,)})
    placement = Here(host(tmp_path, "b", 4), host(tmp_path, "a", 4))
    job = NodesManager.from_options(placement, JobOptions.of(WORKER, rank_table=table, **options))
    with pytest.raises(RankTableError, match=said):
        async with job:
            pass
    assert not Path("log").exists()


async def test_nodes_without_addresses_meet_at_node_0(tmp_path: Path) -> None:
    """Without addresses of NPUs there is no table, and a word on it; all ranks get the same master."""
    told: list[str] = []
    placement = Here(host(tmp_path, "a", 2), host(tmp_path, "b", 2))
    async with NodesManager(placement, [*WORKER, "--seconds", "0"], notify=told.append) as job:
        result = await job.wait()
    places = [worker.log_path.read_text().split(" node ")[0].split("master ")[1] for worker in result.workers]
    assert len(places) == 4
    assert len(set(places)) == 1
    assert len(told) == 1
    assert "without a rank table" in told[0]


async def test_addresses_may_come_from_the_platform_s_tables(tmp_path: Path) -> None:
    """Where a container lacks hccn_tool and its file, the job's table has what the nodes' own tables say."""
    for name, network in (("a", "198.51.100"), ("b", "192.0.2")):
        host(tmp_path, name, 2)
        row = '{{"device_id": "{0}", "rank_id": "{0}", "device_ip": "{1}.{0}"}}'.format
        devices = f"{row(0, network)}, {row(1, network)}"
        (tmp_path / name / "user" / "config").mkdir(parents=True)
        (tmp_path / name / "user" / "config" / "jobstart_hccl.json").write_text(
            f'{{"status": "completed", "version": "1.0", "server_list": [{{"server_id": "10.0.0.{name}", '
            f'"device": [{devices}]}}]}}'
        )
    show = "import os; print(open(os.environ['RANK_TABLE_FILE']).read())"
    placement = Here(NodeAgent(tmp_path / "b"), NodeAgent(tmp_path / "a"))
    async with NodesManager(placement, [sys.executable, "-c", show]) as job:
        result = await job.wait()
    (text,) = {worker.log_path.read_text() for worker in result.workers}
    assert [
        (server["server_id"], device["rank_id"], device["device_ip"])
        for server in json.loads(text)["server_list"]
        for device in server["device"]
    ] == [
        ("10.0.0.a", "0", "198.51.100.0"),
        ("10.0.0.a", "1", "198.51.100.1"),
        ("10.0.0.b", "2", "192.0.2.0"),
        ("10.0.0.b", "3", "192.0.2.1"),
    ]


async def test_a_platform_s_table_of_other_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table in which these nodes are not to be found gives no ranks, though it has as many nodes."""
    table = tmp_path / "hccl.json"
    row = '{{"device_id": "0", "rank_id": "{}", "device_ip": "192.0.2.{}"}}'.format
    servers = ", ".join(f'{{"server_id": "s{n}", "device": [{row(n, n + 1)}]}}' for n in range(2))
    table.write_text(f'{{"status": "completed", "version": "1.0", "server_list": [{servers}]}}')
    monkeypatch.setenv("RANK_TABLE_FILE", str(table))
    placement = Here(host(tmp_path, "a", 1), host(tmp_path, "b", 1))
    with pytest.raises(PlatformError, match=r"found rank table .*hccl.json by RANK_TABLE_FILE") as caught:
        async with NodesManager(placement, WORKER):
            pass
    assert "to be this host" in str(caught.value)
    assert placement.closed == 1
    assert not Path("log").exists() or not list(Path("log").glob("*-proc-rank-*"))


async def test_nodes_with_different_devices_are_refused(tmp_path: Path) -> None:
    """Different numbers of NPUs are an error that lists them; nothing is started, all is given back."""
    placement = Here(host(tmp_path, "a", 2), host(tmp_path, "b", 4))
    with pytest.raises(PlatformError, match=r"different numbers of NPUs: 2 on .*, 4 on"):
        async with NodesManager(placement, WORKER):
            pass
    assert placement.closed == 1
    assert not Path("log").exists()


async def test_a_command_that_one_node_cannot_start_ends_all(tmp_path: Path) -> None:
    """The error keeps its kind and names the node; the other node's workers are gone."""
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nexit 0\n")
    placement = Here(NodeAgent(), NodeAgent())
    with pytest.raises(WorkerSpawnError, match=r"node \d \(.*\): command .* is not executable") as caught:
        async with NodesManager(placement, [script], nproc_per_node=1):
            pass
    assert caught.value.errno == 13
    assert placement.closed == 1


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"command": ("no-such-command",)}, WorkerSpawnError, "command not found: 'no-such-command'"),
        ({"log_dir": Path("/dev/null/log")}, PlatformError, "/dev/null/log"),
    ],
    ids=["command not there", "log folder not writable"],
)
async def test_a_start_that_fails_on_one_node_of_four_ends_all(
    changes: dict[str, object], kind: type[DavinciRunError], said: str
) -> None:
    """The error names the node, and the workers that the other three had started are gone with it."""
    nodes = [NodeAgent(), NodeAgent(), Odd(changes), NodeAgent()]
    placement = Here(*nodes)
    job = NodesManager(placement, WORKER, nproc_per_node=2)
    with pytest.raises(kind) as caught:
        async with job:
            pass
    assert re.match(r"node \d \(.*\): ", str(caught.value))
    assert said in str(caught.value)
    assert placement.closed == 1
    assert not [worker for worker in job.workers if worker.pid is not None and is_alive(worker.pid)]


async def test_a_lost_node_is_the_root_cause() -> None:
    """The report blames the node, says what the engine said, and counts the other node's ranks as stopped."""
    fragile, steady = Fragile(), NodeAgent()
    async with NodesManager(Here(steady, fragile), WORKER, nproc_per_node=2) as job:
        fragile.lost.set()
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
    error = caught.value
    assert (error.exit_code, error.root_cause.name, error.root_cause.rank) == (1, "node 1", -1)
    assert "node 1 is the root cause, lost" in str(error)
    assert "its cable was cut" in str(error)
    assert [worker.state.value for worker in job.workers[:2]] == ["STOPPED", "STOPPED"]
    await fragile.stop()
    await fragile.leave("the test is over")


class Renewing(Here):
    """A placement that has other nodes in place of lost ones, as long as there are some."""

    renewal_timeout = 5.0

    def __init__(self, *rounds: Sequence[NodeAgent]) -> None:
        super().__init__(*rounds[0])
        self.rounds = list(rounds[1:])

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        """Give the next nodes."""
        assert bound <= self.renewal_timeout
        if not self.rounds:
            raise PlatformError("found no 1 to 2 nodes")
        return self.rounds.pop(0)


async def lose(job: NodesManager, node: Fragile) -> None:
    """Lose a node when its workers have started, and let it end them as a lost one does."""
    async for event in job.events():
        if event.kind == "started" and event.rank == 3:
            break
    node.lost.set()
    await node.stop()
    await node.leave("it is lost")


async def test_an_attempt_after_the_loss_of_a_node_is_on_the_nodes_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has their ranks and its own number; logs of all attempts are kept, and the result tells of both."""
    monkeypatch.setattr("davincirunsdk.engines.driver.LAST_OF_LOST", 0.0)
    steady, fragile = NodeAgent(), Fragile()
    shown = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    source = (
        f"import os, time; print(*(os.environ[name] for name in {shown}), flush=True)\n"
        "time.sleep(600 * (os.environ['WORLD_SIZE'] == '4'))"
    )
    job = NodesManager(
        Renewing([steady, fragile], [NodeAgent()]),
        [sys.executable, "-c", source],
        nproc_per_node=2,
        max_restarts=1,
        restart_delay=0.1,
        grace_period=0.5,
        name="lossy",
    )
    async with job:
        await lose(job, fragile)
        result = await job.wait()
    assert [worker.log_path.read_text().split() for worker in result.workers] == [
        ["0", "2", "1"],
        ["1", "2", "1"],
    ]
    first, second = result.attempts
    assert (first.exit_code, second.exit_code, second.number) == (1, 0, 1)
    assert "node 1, ranks 2, 3 were there: its cable was cut" in first.reason
    # The lost node's files are on a disk that the driver sees.
    names = [path.name.partition("-proc-")[2] for path in Path("log").glob("lossy*-proc-rank-*")]
    assert sorted(name for name in names if "-attempt-0" in name) == [
        f"rank-{rank}-device-{rank % 2}-attempt-0.txt" for rank in range(4)
    ]
    assert sorted(name for name in names if "-attempt-" not in name) == [
        "rank-0-device-0.txt",
        "rank-1-device-1.txt",
    ]


async def test_without_other_nodes_the_loss_is_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing is said, and report and exit code are those of the attempt that lost the node."""
    monkeypatch.setattr("davincirunsdk.engines.driver.LAST_OF_LOST", 0.0)
    fragile = Fragile()
    job = NodesManager(
        Renewing([NodeAgent(), fragile]),
        WORKER,
        nproc_per_node=2,
        max_restarts=1,
        restart_delay=0.1,
        grace_period=0.5,
    )
    async with job:
        await lose(job, fragile)
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
    assert "its cable was cut" in caught.value.root_cause.reason
    assert caught.value.result is not None
    assert [attempt.number for attempt in caught.value.result.attempts] == [0]
    assert "no restart: found no 1 to 2 nodes" in caplog.text


async def test_a_stop_ends_the_wait_for_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that do not come are not waited for after a stop; the job has been stopped, not failed."""
    monkeypatch.setattr("davincirunsdk.engines.driver.LAST_OF_LOST", 0.0)
    fragile, waited_for = Fragile(), asyncio.Event()

    class Slow(Renewing):
        renewal_timeout = 600.0

        async def renew(self, bound: float) -> Sequence[NodeHandle]:
            waited_for.set()
            await asyncio.sleep(bound)
            raise AssertionError("not reached: the wait is cancelled")

    job = NodesManager(
        Slow([NodeAgent(), fragile]),
        WORKER,
        nproc_per_node=2,
        max_restarts=1,
        restart_delay=0.1,
        grace_period=0.5,
    )
    async with job:
        await lose(job, fragile)
        await waited_for.wait()
        began = time.monotonic()
        await job.stop()
        assert time.monotonic() - began < 10
        assert str(job.state) == "STOPPED"


async def test_logs_of_other_disks_are_brought_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of one node are here, so only the other's come; head and tail of a longer one."""
    monkeypatch.setattr("davincirunsdk.engines.collect_logs._MOST_OF_FILE", 80_000)
    monkeypatch.setattr("davincirunsdk.engines.collect_logs._PIECE", 7_000)
    source = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '2': sys.stdout.write('first\\n' + 'x' * 100_000 + '\\nlast\\n')\n"
        "if os.environ['RANK'] == '3': print('short')\n"
        "sys.stdout.flush(); time.sleep(0.5); sys.exit(3 * (os.environ['RANK'] == '2'))"
    )
    far = Odd({"log_dir": tmp_path / "far"})

    async def see_nothing(path: str, beginning: bytes) -> bool:
        # It is the events file of the driver that tells.
        assert path.endswith("-nodes-events.jsonl")
        assert beginning
        return False

    monkeypatch.setattr(far, "sees_file", see_nothing)
    job = NodesManager(
        Here(NodeAgent(), far),
        [sys.executable, "-c", source],
        nproc_per_node=2,
        name="far",
        collect_logs=True,
        keep_going=True,
    )
    with pytest.raises(DistributedRuntimeError):
        async with job:
            await job.wait()
    assert "logs of ranks 2, 3 were brought to " in caplog.text
    assert "of rank 2 head and tail, 78 KiB each" in caplog.text
    assert Path("log/far-proc-rank-3-device-1.txt").read_text() == "short\n"
    text = Path("log/far-proc-rank-2-device-0.txt").read_text()
    whole = (tmp_path / "far" / "far-proc-rank-2-device-0.txt").read_text()
    head, note, tail = text.partition(f"\n... {len(whole) - 80_000} bytes left out here; the file on the")
    assert note
    assert (head, tail.partition(" node has all\n")[2]) == (whole[:10_000], whole[-70_000:])


async def test_a_node_that_never_answers_a_stop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grace period and some seconds after a stop, a node that says nothing counts as lost."""
    monkeypatch.setattr("davincirunsdk.engines.joint_attempt._SLACK", 0.5)
    silent = Silent()
    async with NodesManager(Here(NodeAgent(), silent), WORKER, nproc_per_node=1, grace_period=0.5) as job:
        await job.stop()
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
    assert "did not say in time that its workers are gone" in caught.value.root_cause.reason
    await NodeAgent.stop(silent)
    await silent.leave("the test is over")


async def test_a_failure_stops_the_other_node_before_its_own_grace_period_is_over() -> None:
    """The other nodes do not wait for the end of the failed node's workers that are deaf to SIGTERM."""
    code = (
        "import os, signal, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "signal.signal(15, signal.SIG_IGN if rank == 1 else signal.SIG_DFL)\n"
        "time.sleep(0.5)\n"
        "sys.exit(9) if rank == 0 else time.sleep(600)\n"
    )
    with pytest.raises(DistributedRuntimeError) as caught:
        async with NodesManager(
            Here(NodeAgent(), NodeAgent()), [sys.executable, "-c", code], nproc_per_node=2, grace_period=3
        ) as job:
            await job.wait()
    ended = {worker.rank: worker.ended or 0.0 for worker in job.workers}
    assert caught.value.exit_code == 9
    assert max(ended[2], ended[3]) < ended[0] + 2 < ended[1]


async def test_output_of_ranks_that_nobody_wants_stays_on_the_nodes() -> None:
    """With `collect`, only the ranks asked for are brought here; the log files have all."""
    async with NodesManager(
        Here(NodeAgent(), NodeAgent()), [*WORKER, "--seconds", "0"], nproc_per_node=2, collect="1-2"
    ) as job:
        ranks = {line.rank async for line in job.logs()}
        result = await job.wait()
    assert ranks == {1, 2}
    assert all(worker.log_path.read_text().startswith("ready") for worker in result.workers)


async def test_a_flood_is_bounded_on_its_way_and_says_what_it_left_out() -> None:
    """Ranks that write faster than a reader reads lose lines of the display, counted; log files lose none."""
    code = "import sys\nfor i in range(600000): sys.stdout.write(f'line {i:060d}\\n')"
    size = 600000 * 66
    async with NodesManager(Here(NodeAgent()), [sys.executable, "-c", code], nproc_per_node=1) as job:
        stream = job.log_blocks()
        result = await job.wait()
        shown = sum([len(block.data) async for block in stream])
    assert result.workers[0].log_path.stat().st_size == size
    assert 0 < shown < 8 << 20
    assert stream.dropped + job.dropped >= size - shown


async def test_cancelling_the_start_leaves_nothing() -> None:
    """A job cancelled while it starts has stopped its workers when the cancellation comes out."""
    placement = Here(NodeAgent(), NodeAgent())

    async def run() -> None:
        async with NodesManager(placement, WORKER, nproc_per_node=2) as job:
            await job.wait()

    for delay in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3):
        task = asyncio.create_task(run())
        await asyncio.sleep(delay)
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 10


async def test_the_events_of_all_nodes_are_in_one_file(tmp_path: Path) -> None:
    """One line each, with the node it is from; the nodes' own files are beside it where they share a disk."""
    placement = Here(host(tmp_path, "a", 2), host(tmp_path, "b", 2))
    async with NodesManager(placement, [*WORKER, "--seconds", "0"]) as job:
        result = await job.wait()
        seen = [event async for event in job.events()]
    (path,) = Path("log").glob("*-nodes-events.jsonl")
    assert path.name == f"{job.job_id}-nodes-events.jsonl"
    about, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert about["about"]["launcher"] == os.getpid()
    assert about["about"]["mark"], "what davincirunctl names the job by beside others of its name"
    assert [(line["kind"], line.get("rank")) for line in lines] == [
        (event.kind, event.rank) for event in seen
    ]
    assert {line["rank"] for line in lines if line["kind"] == "started"} == {0, 1, 2, 3}
    assert {line["node"] for line in lines} == set(job.nodes)
    assert (lines[-1]["kind"], lines[-1]["exit_code"]) == ("finished", result.exit_code)


async def test_a_driver_that_cannot_write_events_goes_on() -> None:
    """The events file is a help for later: without it the job runs, and a word is said."""
    told: list[str] = []
    job = NodesManager(Here(NodeAgent()), [*WORKER, "--seconds", "0"], nproc_per_node=1, notify=told.append)
    (Path("log") / f"{job.job_id}-nodes-events.jsonl").mkdir(parents=True)
    async with job:
        await job.wait()
    assert [text for text in told if "events of all nodes cannot be written" in text]


async def test_a_log_limit_holds_on_every_node() -> None:
    """Each worker's file on each node keeps head and tail."""
    program = "print('first');print('x' * 100_000);print('last')"
    command = [sys.executable, "-c", program]
    placement = Here(NodeAgent(), NodeAgent())
    async with NodesManager(placement, command, nproc_per_node=1, log_limit=10_000) as job:
        result = await job.wait()
    for worker in result.workers:
        text = worker.log_path.read_text()
        assert len(text) < 11_000
        assert (text[:6], text[-5:]) == ("first\n", "last\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "2", "--node-rank", "1"], "--node-rank has no use with --engine"),
        (["--nnodes", "2", "--devices", "0"], "--devices has no use with --engine"),
        (["--nnodes", "2:3", "--rank-table", "x.json"], "--nnodes is 2:3, but a rank table names its nodes"),
        ([], "--engine ray needs --nnodes"),
        (["--nnodes", "2", "--resource", "CPU"], "--nproc-per-node is missing"),
    ],
)
def test_options_without_sense_beside_an_engine_are_refused(options: list[str], said: str) -> None:
    """What an engine settles itself cannot be given, and what it cannot know has to be: exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", "--engine", "ray", *options, "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


async def test_the_scheduler_serves_all_nodes_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 keeps it while others run, hears from the driver of their end, and stops it then."""
    monkeypatch.setattr("davincirunsdk.supervision.attempt._SCHEDULER_GRACE", 0.3)
    program = (
        "import os, sys, time\n"
        "open(os.environ['MS_ROLE'], 'w').close()\n"
        "if os.environ['MS_ROLE'] == 'MS_SCHED': time.sleep(600)\n"
        "while os.environ['RANK'] == '1' and not os.path.exists('go'): time.sleep(0.02)\n"
    )
    command = [sys.executable, "-c", program]
    async with NodesManager(
        Here(NodeAgent(), NodeAgent()), command, framework="mindspore", nproc_per_node=1
    ) as job:
        async for event in job.events():
            if event.kind == "exited" and event.rank == 0:
                break
        await asyncio.sleep(1.0)
        assert {str(one.state) for one in job.auxiliaries} == {"RUNNING"}
        Path("go").touch()
        result = await asyncio.wait_for(job.wait(), 20)
    assert (str(result.state), result.exit_code) == ("SUCCEEDED", 0)
    assert [str(one.state) for one in result.auxiliaries] == ["STOPPED"]


async def test_a_bad_worker_ends_no_other_node_when_they_keep_going(tmp_path: Path) -> None:
    """The evaluation on the other node goes on to its end, and the report has the bad one."""
    source = "import os, time; bad = os.environ['RANK'] == '0'; time.sleep(0 if bad else 0.5); exit(3 * bad)"
    placement = Here(host(tmp_path, "a", 2), host(tmp_path, "b", 2))
    async with NodesManager(placement, [sys.executable, "-c", source], keep_going=True) as job:
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
    assert (caught.value.exit_code, [one.rank for one in caught.value.failures]) == (3, [0])
    assert [worker.exit_code for worker in job.workers] == [3, 0, 0, 0]


async def test_a_straggler_on_another_node(tmp_path: Path) -> None:
    """The first good end counts for the ranks of all nodes."""
    source = "import os, time; time.sleep(600 * (os.environ['RANK'] in '23'))"
    placement = Here(host(tmp_path, "a", 2), host(tmp_path, "b", 2))
    async with NodesManager(placement, [sys.executable, "-c", source], straggler_timeout=0.5) as job:
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
    assert caught.value.exit_code == 124
    assert "ranks 2-3 still ran 0.5 s after rank" in caught.value.report.text


class LostAtStart(NodeAgent):
    """A node that is lost while its workers are started."""

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        """Be lost."""
        raise NodeLostError("its power failed")


@pytest.mark.parametrize("others", [0, 1])
async def test_a_node_lost_while_it_starts_is_an_error_that_names_it(others: int) -> None:
    """One word on which node and why, the workers of others are gone; so on a job of that node alone."""
    placement = Here(LostAtStart(), *(NodeAgent() for _ in range(others)))
    job = NodesManager(placement, WORKER, nproc_per_node=1)
    with pytest.raises(PlatformError, match=r"node 0 \(.*\) was lost while .*: its power failed; look at"):
        async with job:
            pass
    assert placement.closed == 1
    assert not [worker for worker in job.workers if worker.pid is not None and is_alive(worker.pid)]


async def test_a_fault_of_ours_at_a_node_s_start_ends_the_job() -> None:
    """An error that nobody foresaw comes out as it is, within moments, and the other node's workers end."""
    nodes = [NodeAgent(), Odd({"env": {"A=B": "1"}})]
    placement = Here(*nodes)
    job = NodesManager(placement, WORKER, nproc_per_node=1)

    async def run() -> None:
        async with job:
            await job.wait()

    with pytest.raises(ValueError, match="illegal environment variable name"):
        await asyncio.wait_for(run(), 20)
    assert placement.closed == 1
    assert not [worker for worker in job.workers if worker.pid is not None and is_alive(worker.pid)]


@pytest.mark.parametrize("kind", [LookupError, OSError, PlatformError])
async def test_a_fault_of_ours_on_a_running_node_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """A supervisor that breaks on one node is heard of, instead of reports for ever without a result."""
    broken = NodeAgent()
    async with NodesManager(Here(NodeAgent(), broken), WORKER, nproc_per_node=1) as job:

        async def fail() -> None:
            raise kind("nobody foresaw it")

        assert broken._manager is not None
        monkeypatch.setattr(broken._manager, "_judge", lambda _: fail())
        await broken._manager.stop()
        with pytest.raises(kind, match="nobody foresaw it"):
            await asyncio.wait_for(job.wait(), 20)
    assert not [worker for worker in job.workers if worker.pid is not None and is_alive(worker.pid)]


async def test_giving_the_nodes_back_is_no_part_of_the_outcome(caplog: pytest.LogCaptureFixture) -> None:
    """A success stays one when the engine fails afterwards, and all is written before the engine is asked."""
    seen: list[str] = []

    class Broken(Here):
        async def close(self) -> None:
            (events,) = Path("log").glob("*-nodes-events.jsonl")
            seen.append(json.loads(events.read_text().splitlines()[-1])["kind"])
            raise ConnectionError("the head is gone")

    async with NodesManager(Broken(NodeAgent()), [*WORKER, "--seconds", "0"], nproc_per_node=1) as job:
        result = await job.wait()
    assert (str(result.state), result.exit_code, seen) == ("SUCCEEDED", 0, ["finished"])
    assert "could not be given back: ConnectionError: the head is gone" in caplog.text


async def test_a_lost_engine_stops_all_nodes_and_is_the_cause() -> None:
    """The workers get their grace period, and the report blames what all nodes need, no node."""
    placement = Here(NodeAgent(), NodeAgent())
    async with NodesManager(placement, WORKER, nproc_per_node=2) as job:
        placement.lost.set_result("the head at 192.0.2.1 could not be reached")
        with pytest.raises(DistributedRuntimeError) as caught:
            await job.wait()
    error = caught.value
    assert (error.exit_code, error.root_cause.rank, error.root_cause.name) == (1, -1, "the cluster")
    assert str(error.report.verdict) == "node_lost"
    assert "the cluster was lost" in str(error)
    assert "the head at 192.0.2.1 could not be reached" in str(error)
    assert {str(worker.state) for worker in job.workers} == {"STOPPED"}


async def test_an_engine_lost_before_a_restart_ends_the_job() -> None:
    """No attempt begins without what all nodes need; the failure before stays the cause."""
    placement = Here(NodeAgent(), NodeAgent())
    kinds: list[str] = []

    def hear(event: Event) -> None:
        kinds.append(event.kind)
        if event.kind == "restarting":
            placement.lost.set_result("the head at 192.0.2.1 could not be reached")

    command = ["sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 600"]
    options = {"nproc_per_node": 1, "max_restarts": 1, "restart_delay": 5.0}
    with pytest.raises(DistributedRuntimeError) as caught:
        async with NodesManager(placement, command, on_event=hear, **options) as job:  # type: ignore[arg-type] # of many kinds
            await asyncio.wait_for(job.wait(), 20)
    assert kinds.count("restarting") == 1
    assert (caught.value.root_cause.rank, caught.value.exit_code) == (1, 7)
    assert caught.value.result is not None
    assert len(caught.value.result.attempts) == 1


async def test_a_stop_at_once_that_overtakes_the_start_is_one() -> None:
    """Workers deaf to SIGTERM of a node that starts later are killed, not given their grace period."""

    class Late(NodeAgent):
        def __init__(self) -> None:
            super().__init__()
            self.deaf, self.asked, self.returned = asyncio.Event(), asyncio.Event(), False

        async def start(self, plan: NodePlan, table: str) -> NodeStarted:
            started = await super().start(plan, table)
            assert self._manager is not None
            async for _ in self._manager.logs():
                break
            self.deaf.set()
            await self.asked.wait()
            self.returned = True
            return started

        async def stop(self, now: bool = False) -> None:
            self.asked.set()
            if self.returned:
                await super().stop(now)

    late = Late()
    job = NodesManager(Here(late), [*WORKER, "--deaf"], nproc_per_node=1, grace_period=60)
    starting = asyncio.ensure_future(job.__aenter__())
    await asyncio.wait_for(late.deaf.wait(), 10)
    job._request_stop(now=True)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 20)
    assert [worker.exit_code for worker in job.workers] == [-9]


async def test_a_full_disk_of_a_node_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The line names node and file while the job still runs, and the event says it, too."""
    program = (
        "import os, time\nprint('x' * 5000, flush=True)\nwhile not os.path.exists('go'): time.sleep(.02)"
    )
    Path("log").mkdir()
    (Path("log") / f"{os.uname().nodename}-proc-rank-0-device-0.txt").symlink_to("/dev/full")
    async with NodesManager(Here(NodeAgent()), [sys.executable, "-c", program], nproc_per_node=1) as job:
        async for event in job.events():
            if event.kind == "warning":
                break
        said = [record.getMessage() for record in caplog.records if "node 0 (" in record.getMessage()]
        Path("go").touch()
        await job.wait()
    assert "proc-rank-0-device-0.txt" in event.detail
    assert any("proc-rank-0-device-0.txt" in text for text in said), said


async def test_other_versions_are_named_with_their_hosts() -> None:
    """Which hosts have which version is what the reader has to know."""

    class Old(NodeAgent):
        async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
            return replace(await super().inspect(nproc_per_node), version="0.1.9", host="atlas07")

    with pytest.raises(PlatformError, match=r"found davincirunsdk 0\.1\.9 on atlas07, and .* here"):
        async with NodesManager(Here(NodeAgent(), Old()), WORKER, nproc_per_node=1):
            pass


async def test_all_nodes_lost_before_the_start_are_named() -> None:
    """What is wrong with one node often is with others: all come in one message."""

    class Gone(NodeAgent):
        def __init__(self, host: str) -> None:
            super().__init__()
            self._host = host

        async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
            raise NodeLostError(f"{self._host}: no package there")

    with pytest.raises(
        PlatformError, match=r"2 of 3 nodes cannot take part: a: no package there; b: no package there"
    ):
        async with NodesManager(Here(Gone("a"), NodeAgent(), Gone("b")), WORKER, nproc_per_node=1):
            pass


async def test_the_start_line_tells_where_the_logs_of_all_nodes_are() -> None:
    """It names the host once, and the files of this job, which has one name on all nodes."""
    nodes = [NodeAgent(), NodeAgent()]
    command = [*WORKER, "--seconds", "0"]
    async with NodesManager(Here(*nodes), command, nproc_per_node=1) as job:
        line = start_line(job)
        await job.wait()
    names = [f"{job.job_id}-proc-rank-{rank}-device-0.txt" for rank in (0, 1)]
    assert [worker.log_path.name for worker in job.workers] == names
    for place in ("node-0", "node-1", "nodes"):
        assert Path("log", f"{job.job_id}-{place}-events.jsonl").is_file()
    assert f"{job.job_id}-proc-rank-*.txt" in line
    assert line.count("logs: ") == 1
    assert line.count(f" on {os.uname().nodename}") == 1


async def test_a_node_whose_only_worker_failed_ends_the_others() -> None:
    """It has nobody to stop, and may say nothing of a stop: its result is enough."""

    class Terse(NodeAgent):
        async def report(self) -> NodeReport:
            report = await super().report()
            return replace(report, events=tuple(one for one in report.events if one.kind != "stopping"))

    command = ["sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 600"]
    with pytest.raises(DistributedRuntimeError) as caught:
        async with NodesManager(Here(NodeAgent(), Terse()), command, nproc_per_node=1) as job:
            await asyncio.wait_for(job.wait(), 20)
    assert (caught.value.root_cause.rank, caught.value.exit_code) == (1, 7)
