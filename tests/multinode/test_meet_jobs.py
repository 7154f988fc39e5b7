"""Real launchers that start apart on this machine and meet: they end as one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
from processes import wait_until

from davincirunsdk import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.timeout(120)

WORKER = str(Path(__file__).parent / "programs" / "worker.py")
NODES = 3


class Launchers:
    """The davincirun processes of one job, by node rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            # The next one is the meeting's.
            self.port = probe.getsockname()[1] - 1

    def start(
        self,
        rank: int,
        *words: str,
        options: tuple[str, ...] = (),
        nnodes: int = NODES,
        launcher: tuple[str, ...] = ("-m", "davincirunsdk"),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the launcher of one node, two workers each; a port in `env` is the platform's."""
        port = () if "MASTER_PORT" in env else ("--master-port", str(self.port))
        with open(self.folder / f"err{rank}", "w") as words_of_it:
            self.running[rank] = subprocess.Popen(
                [
                    sys.executable, *launcher, "--nnodes", str(nnodes), "--node-rank", str(rank),
                    "--master-addr", "127.0.0.1", "--nproc-per-node", "2", "--grace-period", "5",
                    "--log-dir", str(self.folder / f"log{rank}"), *port, *options, *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words_of_it,
                env={**os.environ, **env},
                start_new_session=True,
            )  # fmt: skip

    def start_all(
        self, *words: str, options: tuple[str, ...] = (), env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        for rank in range(NODES):
            self.start(rank, *words, options=options, env=env)

    def ready(self) -> None:
        """Wait until all workers run and all nodes have met."""
        wait_until(
            lambda: self.logs().count("ready rank") == 2 * len(self.running), 40, "all workers are ready"
        )
        host = self.running[0].pid
        wait_until(lambda: met(host, self.port + 1) == len(self.running) - 1, 20, "all nodes have met")

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log*/*-proc-rank-*.txt")))

    def said(self, rank: int) -> str:
        return (self.folder / f"err{rank}").read_text()

    def codes(self, *ranks: int) -> list[int]:
        """Wait for launchers and give their exit codes."""
        return [self.running[rank].wait(40) for rank in ranks or sorted(self.running)]


def met(pid: int, port: int) -> int:
    """Count the connections that a process has accepted at a port."""
    rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except OSError:
            continue
    return sum(
        row.split()[1].endswith(f":{port:04X}")
        and row.split()[3] == "01"
        and f"socket:[{row.split()[9]}]" in own
        for row in rows
    )


@contextmanager
def launchers(folder: Path) -> Iterator[Launchers]:
    made = Launchers(folder)
    try:
        yield made
    finally:
        for process in made.running.values():
            if process.poll() is None:
                process.terminate()
        for process in made.running.values():
            process.wait(30)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launchers]:
    with launchers(tmp_path) as made:
        yield made


def causes(job: Launchers) -> list[str]:
    """The line with the root cause of each report."""
    found = [re.search(r"^job .* failed: (.*)$", job.said(rank), re.MULTILINE) for rank in job.running]
    return [match[1] if match else "none" for match in found]


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_a_failing_rank_ends_all_nodes_with_its_code(job: Launchers, tmp_path: Path, failing: int) -> None:
    """Each launcher prints the same root cause and ends with the rank's own exit code."""
    gate = tmp_path / "gate"
    gate.mkdir()
    job.start_all(WORKER, "--fail", f"{failing}:7", "--when-ready", str(gate))
    assert job.codes() == [7, 7, 7]
    assert job.logs().count("saved on SIGTERM") == 5
    found = causes(job)
    assert found == [found[0]] * 3
    assert f"rank {failing} " in found[0]
    for rank in range(NODES):
        if rank != failing // 2:
            assert f"stopping: rank {failing} failed on node {failing // 2}" in job.said(rank)


def test_the_report_is_in_the_language_that_was_asked_for(job: Launchers, tmp_path: Path) -> None:
    """Where it is judged over all nodes, too."""
    gate = tmp_path / "gate"
    gate.mkdir()
    job.start_all(WORKER, "--fail", "5:7", "--when-ready", str(gate), options=("--lang", "zh"))
    assert job.codes() == [7, 7, 7]
    assert all("失败：rank 5 是根因" in job.said(rank) for rank in range(NODES)), job.said(0)


def test_success_is_shared(job: Launchers) -> None:
    """All end well, and nobody says a word about the meeting but who gets in."""
    job.start_all(WORKER, "--seconds", "1")
    assert job.codes() == [0, 0, 0]
    assert "no meeting" not in "".join(job.said(rank) for rank in range(NODES))


@pytest.mark.parametrize("stopped", [0, 2])
def test_ctrl_c_on_one_node_stops_all(job: Launchers, stopped: int) -> None:
    """One SIGTERM for each rank, and the same exit code on every node."""
    job.start_all(WORKER)
    job.ready()
    os.killpg(job.running[stopped].pid, signal.SIGINT)
    assert job.codes() == [130, 130, 130]
    assert job.logs().count("saved on SIGTERM") == 6
    for rank in range(NODES):
        by = " by SIGINT" if rank == stopped else ""
        assert f"stopped{by}: ranks {2 * rank}, {2 * rank + 1} ended in time" in job.said(rank), job.said(
            rank
        )


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_launcher_is_a_lost_node(job: Launchers, killed: int) -> None:
    """The other nodes know at once, stop and name it; its own workers are ended by its guardian."""
    job.start_all(WORKER)
    job.ready()
    job.running[killed].kill()
    others = [rank for rank in range(NODES) if rank != killed]
    assert job.codes(*others) == [1, 1]
    for rank in others:
        assert re.search(rf"node {killed} is the root cause", job.said(rank)), job.said(rank)
    wait_until(lambda: job.logs().count("saved on SIGTERM") >= 4, what="the others have saved")


def test_a_node_that_starts_late_is_in(job: Launchers, tmp_path: Path) -> None:
    """The others run and wait for nobody; what happens after it came ends it, too."""
    for rank in (0, 1):
        job.start(rank, WORKER, "--fail", "4:9", "--when-ready", str(tmp_path / "log0"))
    wait_until(lambda: job.logs().count("ready rank") == 4, 40, "the first nodes run")
    gate = tmp_path / "gate"
    gate.mkdir()
    job.start(2, WORKER, "--fail", "4:9")
    assert job.codes() == [9, 9, 9]


@pytest.mark.parametrize(
    ("rank", "options", "said"),
    [
        (1, (), "says that it is node 1, and so does"),
        (2, ("--nproc-per-node", "3"), "3 nodes and 9 workers"),
    ],
)
def test_a_node_that_does_not_fit_ends_alone(
    job: Launchers, rank: int, options: tuple[str, ...], said: str
) -> None:
    """It ends with exit code 3 and names both; the others go on."""
    for other in (0, 1):
        job.start(other, WORKER)
    wait_until(lambda: job.logs().count("ready rank") == 4, 40, "the first nodes run")
    wait_until(lambda: met(job.running[0].pid, job.port + 1) == 1, what="they have met")
    with launchers(job.folder / "other") as second:
        second.folder.mkdir()
        second.port = job.port
        second.start(rank, WORKER, options=options)
        assert second.codes() == [3]
        assert said in second.said(rank)
    assert all(one.poll() is None for one in job.running.values())


def test_another_key_is_as_no_meeting(job: Launchers) -> None:
    """Both sides say so in a line; each launcher ends for itself, as before there were meetings."""
    say = "import os,time; print('DAVINCIRUN_MEET_KEY' in os.environ, flush=True); time.sleep(3)"
    for rank, key in enumerate(("s3cret-a", "s3cret-b")):
        job.start(rank, sys.executable, "-c", say, nnodes=2, env={"DAVINCIRUN_MEET_KEY": key})
    assert job.codes() == [0, 0]
    assert "not let in to the meeting: node 1" in job.said(0)
    assert "no meeting of the nodes" in job.said(1)
    # Whoever has the key can stop the job: the workers do not get it, and nobody shows it.
    assert job.logs().split() == ["False"] * 4
    assert "s3cret" not in job.said(0) + job.said(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_that_is_required(job: Launchers, rank: int) -> None:
    """Alone, a launcher fails with exit code 3 and names who did not come; its workers are stopped."""
    job.start(rank, WORKER, options=("--meet", "require", "--meet-timeout", "2"))
    assert job.codes() == [3]
    assert "which --meet requires" in job.said(rank)
    assert job.logs().count("saved on SIGTERM") == 2


MINDCLUSTER = {"MINDX_TASK_ID": "uid", "PROCESS_RECOVER": "on"}
"""A pod of a job that MindCluster starts again after failures."""


def test_healthy_nodes_leave_later_where_mindcluster_recovers_jobs(job: Launchers, tmp_path: Path) -> None:
    """Their workers end at once; the launchers stay, say so, and end with the failed rank's code."""
    gate = tmp_path / "gate"
    gate.mkdir()
    job.start_all(
        WORKER, "--fail", "5:7", "--when-ready", str(gate), options=("--leave-after", "4"), env=MINDCLUSTER
    )
    assert job.codes(2) == [7]
    began = time.monotonic()
    assert job.logs().count("saved on SIGTERM") == 5
    assert job.codes(0, 1) == [7, 7]
    assert time.monotonic() - began > 3
    assert all("this launcher stays 4 s" in job.said(rank) for rank in (0, 1))
    assert "stays" not in job.said(2)


def test_a_launcher_that_stays_leaves_when_it_is_told_to(job: Launchers, tmp_path: Path) -> None:
    """The platform ends the pod with SIGTERM: it goes at once, with the job's own exit code."""
    gate = tmp_path / "gate"
    gate.mkdir()
    job.start_all(
        WORKER, "--fail", "5:7", "--when-ready", str(gate), options=("--leave-after", "600"), env=MINDCLUSTER
    )
    assert job.codes(2) == [7]
    for rank in (0, 1):
        wait_until(lambda rank=rank: "stays 600 s" in job.said(rank), what=f"node {rank} stays")
        job.running[rank].terminate()
    assert job.codes(0, 1) == [7, 7]


def test_a_meeting_of_two_versions_is_none(job: Launchers) -> None:
    """A line says which they are, and each launcher ends by itself; who requires a meeting fails."""
    other = (
        "import sys, davincirunsdk; davincirunsdk.__version__ = '99.9'; from davincirunsdk.cli import main;"
        "sys.exit(main())"
    )
    for options, codes in (((), [0, 0]), (("--meet", "require"), [0, 3])):
        job.start(0, WORKER, "--seconds", "3", nnodes=2)
        job.start(1, WORKER, "--seconds", "3", nnodes=2, options=options, launcher=("-c", other))
        assert job.codes() == codes, [job.said(rank) for rank in (0, 1)]
        assert f"node 0 has davincirunsdk {__version__}, this node 99.9: install one version" in job.said(1)
        assert "no meeting of the nodes" in job.said(1)


def test_ten_thousand_strangers_stop_nothing(job: Launchers, tmp_path: Path) -> None:
    """Scans and garbage at node 0: few connections at a time, few words, and a failure is told as ever."""
    gate = tmp_path / "gate"
    gate.mkdir()
    job.start(0, WORKER, "--fail", "5:7", "--when-ready", str(gate))
    job.start(1, WORKER, "--fail", "5:7", "--when-ready", str(gate))
    wait_until(lambda: met(job.running[0].pid, job.port + 1) == 1, 20, "node 1 is in")
    most = 0
    held: list[socket.socket] = []
    for number in range(10_000):
        stranger = socket.create_connection(("127.0.0.1", job.port + 1), timeout=20)
        held.append(stranger)
        with contextlib.suppress(OSError):
            stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), b"\xff" * 64)[number % 4])
        if len(held) > 64:
            held.pop(0).close()
        if number % 500 == 0:
            most = max(most, met(job.running[0].pid, job.port + 1))
    assert most <= 2 + 8
    job.start(2, WORKER, "--fail", "5:7", "--when-ready", str(gate))
    assert job.codes() == [7, 7, 7]
    for stranger in held:
        stranger.close()
    assert len(job.said(0).splitlines()) < 60, job.said(0)


def test_one_folder_takes_the_files_of_all_nodes(job: Launchers) -> None:
    """A job that the platform names has one name on all nodes, also where they share a disk."""
    shared = job.folder / "shared"
    options = ("--name", "job7", "--log-dir", str(shared), "--report", str(shared / "report.json"))
    gate = job.folder / "gate"
    gate.mkdir()
    job.start_all(WORKER, "--fail", "5:7", "--when-ready", str(gate), options=options)
    assert job.codes() == [7, 7, 7]
    assert sorted(path.name for path in shared.iterdir() if path.name != "latest") == sorted(
        [f"job7-proc-rank-{rank}-device-{rank % 2}.txt" for rank in range(6)]
        + [f"job7-node-{rank}-events.jsonl" for rank in range(3)]
        + ["report.json"]
    )
    explained = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", "--explain", str(shared)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "rank 5 is the root cause, exit code 7" in explained.stdout + explained.stderr


def test_without_a_meeting_each_ends_alone(job: Launchers) -> None:
    """`--meet off` is what there was before: nothing listens, nobody is told."""
    job.start(0, WORKER, "--fail", "0:7", options=("--meet", "off"))
    job.start(1, WORKER, "--seconds", "2", options=("--meet", "off"))
    assert job.codes() == [7, 0]


def test_a_start_that_fails_on_one_node_ends_all(job: Launchers) -> None:
    """That node ends with the code of its own error; the others name it."""
    job.start(0, WORKER)
    job.start(1, WORKER)
    wait_until(lambda: job.logs().count("ready rank") == 4, 40, "the first nodes run")
    program = job.folder / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    job.start(2, str(program))
    codes = job.codes()
    assert codes[2] in (126, 127)
    assert codes[:2] == [1, 1]
    for rank in (0, 1):
        assert re.search("node 2 is the root cause", job.said(rank)), job.said(rank)


@pytest.mark.parametrize("limited", [0, 1])
def test_a_time_limit_on_one_node_is_that_of_all(job: Launchers, limited: int) -> None:
    """All end with 124 and say that the limit was reached, though it was not theirs."""
    for rank in range(NODES):
        job.start(rank, WORKER, options=("--timeout", "3") if rank == limited else ())
    assert job.codes() == [124, 124, 124]
    assert all("time limit of 3 s was reached" in job.said(rank) for rank in range(NODES))
    assert job.logs().count("saved on SIGTERM") == 6


ATTEMPTS = """
import os, signal, sys, time
count, rank = int(os.environ["DAVINCIRUN_RESTART_COUNT"]), int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
os.write(1, f"attempt {count} port {os.environ['MASTER_PORT']}\\n".encode())
if count < FAILING and rank == 5 - count:
    time.sleep(1)
    os.write(2, f"RuntimeError: link {'abc'[count]}\\n".encode())
    os._exit(9)
time.sleep(2 if count >= FAILING else 600)
"""
RESTARTS = ("--max-restarts", "2", "--restart-delay", "0.5")


@pytest.mark.parametrize("platform", [False, True])
def test_all_nodes_start_again_together(job: Launchers, platform: bool) -> None:
    """One attempt number and port on all; what comes to a good end ends well on all."""
    env = {"MASTER_PORT": str(job.port)} if platform else {}
    job.start_all(sys.executable, "-c", ATTEMPTS.replace("FAILING", "2"), options=RESTARTS, env=env)
    assert job.codes() == [0, 0, 0], [job.said(rank) for rank in job.running]
    for rank in range(NODES):
        logs = sorted(path.name for path in (job.folder / f"log{rank}").glob("*-proc-rank-*.txt"))
        assert len(logs) == 6, logs
        assert sum("attempt-0" in name for name in logs) == 2
        assert sum("attempt-1" in name for name in logs) == 2
    found = re.findall(r"attempt (\d) port (\d+)", job.logs())
    assert sorted(count for count, _ in found) == ["0"] * 6 + ["1"] * 6 + ["2"] * 6
    ports = [{port for count, port in found if count == attempt} for attempt in "012"]
    assert [len(one) for one in ports] == [1, 1, 1]
    assert ports[0] == {str(job.port)}
    # The user's stays; a platform's may still be held by what was ended.
    assert len(set().union(*ports)) == (3 if platform else 1)


def test_restarts_that_are_used_up_end_all_nodes(job: Launchers) -> None:
    """The last attempt's root cause and code, the same on all."""
    job.start_all(sys.executable, "-c", ATTEMPTS.replace("FAILING", "3"), options=RESTARTS)
    assert job.codes() == [9, 9, 9]
    assert all("rank 3" in cause for cause in causes(job)), causes(job)
    assert "no restart: " in job.said(0)
    for rank in range(NODES):
        report = job.said(rank).partition(" failed: ")[2]
        assert re.search("attempt 0 ended .* rank 5", report), report
        assert re.search("attempt 1 ended .* rank 4", report), report


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_between_two_attempts_ends_all_nodes(job: Launchers, stopped: int) -> None:
    """Ctrl-C while all wait for the next attempt: nothing is started any more on any node."""
    options = ("--max-restarts", "2", "--restart-delay", "60")
    job.start_all(sys.executable, "-c", ATTEMPTS.replace("FAILING", "1"), options=options)
    wait_until(lambda: all("restart 1 of" in job.said(rank) for rank in range(NODES)), 40, "all wait")
    os.killpg(job.running[stopped].pid, signal.SIGINT)
    assert job.codes() == [130, 130, 130]
    assert job.logs().count("attempt 0") == 6
    assert "attempt 1" not in job.logs()


def test_a_lost_node_is_waited_for_within_its_time(job: Launchers) -> None:
    """A launcher that was killed does not come back by itself: no restart, and a line says why."""
    job.start_all(WORKER, options=(*RESTARTS, "--meet-timeout", "3"))
    job.ready()
    job.running[2].kill()
    assert job.codes(0, 1) == [1, 1]
    assert re.search(r"no restart: node 2 \(.*\) did not come back within 3 s", job.said(0)), job.said(0)
    assert all("node 2 is the root cause" in job.said(rank) for rank in (0, 1))


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_ends_the_wait_for_a_lost_node(job: Launchers, stopped: int) -> None:
    """Ctrl-C on a node while all wait for another one to come back."""
    job.start_all(WORKER, options=RESTARTS)
    job.ready()
    job.running[2].kill()
    wait_until(lambda: "to come back" in job.said(0), 20, "node 0 waits for node 2")
    os.killpg(job.running[stopped].pid, signal.SIGINT)
    assert job.codes(0, 1) == [1, 1]


def test_a_node_that_was_replaced_comes_back(job: Launchers) -> None:
    """The others wait with their workers ended; all begin the next attempt together, under one number."""
    program = ATTEMPTS.replace("FAILING", "1").replace("rank == 5 - count", "False")
    job.start_all(sys.executable, "-c", program, options=RESTARTS)
    wait_until(lambda: job.logs().count("attempt 0") == 6, 40, "all workers run")
    wait_until(lambda: met(job.running[0].pid, job.port + 1) == 2, 20, "all nodes have met")
    job.running[2].kill()
    job.running[2].wait()
    wait_until(lambda: "to come back" in job.said(0), 20, "node 0 waits for node 2")
    (job.folder / "log2").rename(job.folder / "log2-first")
    job.start(2, sys.executable, "-c", program, options=RESTARTS)
    assert job.codes() == [0, 0, 0], [job.said(rank) for rank in job.running]
    last = [path for path in job.folder.glob("log?/*-proc-rank-*.txt") if "attempt" not in path.name]
    assert len(last) == 6
    assert {path.read_text().partition(" port")[0] for path in last} == {"attempt 1"}
