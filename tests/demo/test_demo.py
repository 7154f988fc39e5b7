"""The demo trains for real under the launcher, and says clearly what is wrong when it cannot."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from demo_job import DemoOutcome, run_demo, run_python

from davincirunsdk.demo import digits, network
from davincirunsdk.demo.__main__ import main
from davincirunsdk.demo.all_reduce import AllReduce
from davincirunsdk.demo.numpy_backend import NumpyBackend
from davincirunsdk.demo.place import DemoError, Place, read_place
from davincirunsdk.demo.training import compare_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLACE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MS_ROLE")


@pytest.fixture(scope="module")
def four_workers(tmp_path_factory: pytest.TempPathFactory) -> DemoOutcome:
    return run_demo(["--nproc-per-node", "4", "--log-dir", str(tmp_path_factory.mktemp("log"))])


@pytest.fixture
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Workers:
    """Threads that play the ranks of one job, each with its own connections."""

    def __init__(self, port: int, timeout: float = 10) -> None:
        self._port = port
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(8)
        self._made: list[AllReduce] = []

    def place(self, rank: int, world_size: int, master_addr: str = "127.0.0.1") -> Place:
        return Place(rank=rank, world_size=world_size, master_addr=master_addr, master_port=self._port)

    def join(self, rank: int, world_size: int, master_addr: str = "127.0.0.1") -> Future[AllReduce]:
        def connect() -> AllReduce:
            made = AllReduce(self.place(rank, world_size, master_addr), timeout=self._timeout)
            self._made.append(made)
            return made

        return self._threads.submit(connect)

    def all(self, world_size: int) -> list[AllReduce]:
        return [future.result() for future in [self.join(rank, world_size) for rank in range(world_size)]]

    def sums(self, members: list[AllReduce], vectors: list[network.Array]) -> list[Future[network.Array]]:
        return [self._threads.submit(member, vector) for member, vector in zip(members, vectors, strict=True)]

    def run(self, call: Callable[[], None]) -> Future[None]:
        return self._threads.submit(call)

    def close(self) -> None:
        self._threads.shutdown()
        for made in self._made:
            made.close()


@pytest.fixture
def workers(port: int) -> Iterator[Workers]:
    made = Workers(port)
    yield made
    made.close()


@pytest.fixture
def hasty_workers(port: int) -> Iterator[Workers]:
    made = Workers(port, timeout=0.6)
    yield made
    made.close()


def test_four_workers_reach_the_accuracy(four_workers: DemoOutcome) -> None:
    """Four workers under the launcher end well and recognise at least 93 % of the test images."""
    assert four_workers.exit_code == 0, four_workers
    assert four_workers.accuracy is not None, four_workers
    assert four_workers.accuracy >= 0.93


def test_four_workers_end_with_the_same_weights(four_workers: DemoOutcome) -> None:
    """Every one of the four ranks prints its checksum, and all are the same."""
    assert sorted(four_workers.checksums) == [0, 1, 2, 3], four_workers
    assert len(set(four_workers.checksums.values())) == 1, four_workers


def test_the_loss_falls(four_workers: DemoOutcome) -> None:
    """The loss ends far below where guessing blindly would leave it, which is where it starts."""
    losses = four_workers.losses
    assert losses[0] == pytest.approx(np.log(10), abs=0.5), four_workers
    assert losses[-1] < losses[0] / 10, four_workers


def test_only_rank_0_reports_progress(four_workers: DemoOutcome) -> None:
    """Progress and accuracy are rank 0's lines; every line carries the rank that the launcher saw."""
    for line in four_workers.stdout.splitlines():
        if "loss" in line or "accuracy" in line:
            assert line.startswith("[rank 0] "), line
        if "checksum" in line:
            prefix, text = line.split("] ")
            assert text.startswith(prefix.removeprefix("[") + " of 4: "), line


@pytest.mark.usefixtures("no_place")
def test_one_worker_learns_what_four_learn(four_workers: DemoOutcome) -> None:
    """Started alone without any variable, it shows the four workers' losses: no image is lost or doubled."""
    alone = run_python("-m", "davincirunsdk.demo")
    assert alone.exit_code == 0, alone
    assert alone.stdout.startswith("rank 0 of 1: ")
    assert alone.losses == pytest.approx(four_workers.losses, abs=2e-3)
    assert alone.accuracy == pytest.approx(four_workers.accuracy, abs=0.01)


def test_fail_shows_the_culprit(tmp_path: Path) -> None:
    """With --fail 2 the job fails with rank 2's own exit code, and the report names rank 2 and its error."""
    outcome = run_demo(["--nproc-per-node", "4", "--log-dir", str(tmp_path)], "--fail", "2")
    assert outcome.exit_code == 1, outcome
    assert outcome.accuracy is None
    first_rank = outcome.stderr.index("rank ")
    assert outcome.stderr[first_rank:].startswith("rank 2"), outcome
    assert "RuntimeError: rank 2 fails on purpose in step 221 of 440 (--fail 2)" in outcome.stderr, outcome


@pytest.mark.usefixtures("no_place")
def test_same_seed_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs with one seed end with the same weights to the last bit; another seed gives others."""
    checksums = []
    for seed in ("3", "3", "4"):
        assert main(["--epochs", "1", "--seed", seed]) == 0
        outcome = DemoOutcome(exit_code=0, stdout=capsys.readouterr().out, stderr="")
        checksums.append(outcome.checksums[0])
    assert checksums[0] == checksums[1] != checksums[2]


@pytest.mark.usefixtures("no_place")
@pytest.mark.parametrize(
    ("package", "extra", "options"),
    [
        ("numpy", "demo", []),
        ("sklearn", "demo", []),
        ("torch", "torch", ["--backend", "torch"]),
        ("mindspore", "mindspore", ["--backend", "mindspore"]),
    ],
)
def test_missing_package(
    package: str, extra: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is not there gives exit code 1 and one line with the command that installs it."""
    for entry in Path(np.__file__).parents[1].iterdir():
        if not entry.name.startswith(package):
            (tmp_path / entry.name).symlink_to(entry)
    project = Path(digits.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{project}")
    outcome = run_python("-S", "-m", "davincirunsdk.demo", *options)
    assert outcome.exit_code == 1, outcome
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert repr(package) in line
    assert f"pip install 'davincirunsdk[{extra}]'" in line


@pytest.mark.parametrize(
    "option", [["--epochs", "0"], ["--seed", "-1"], ["--fail", "x"], ["--backend", "tf"]]
)
def test_wrong_option(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An option out of range is a usage error that names the option and shows what was found."""
    with pytest.raises(SystemExit) as exit_info:
        main(option)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert option[0] in error
    assert repr(option[1]) in error


@pytest.mark.usefixtures("no_place")
def test_fail_names_a_rank_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that the job does not have cannot be told to fail."""
    assert main(["--fail", "1"]) == 1
    assert "--fail 1" in capsys.readouterr().err


@pytest.mark.usefixtures("no_place")
def test_scheduler_without_mindspore(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process started as MindSpore's scheduler does not train alone by mistake with another backend."""
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    assert main([]) == 1
    assert "--framework mindspore" in capsys.readouterr().err


def test_place_from_variables() -> None:
    """The place is what the launcher's variables say, and rank 0 of 1 without them."""
    env = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    assert read_place(env) == Place(rank=2, world_size=4, master_addr="node-0", master_port=29500)
    assert read_place({}) == Place(rank=0, world_size=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", None),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", None),
        ("MASTER_ADDR", None),
        ("MASTER_PORT", "70000"),
        ("MASTER_PORT", None),
    ],
)
def test_wrong_variable(name: str, value: str | None) -> None:
    """A variable that is missing or out of range is named, together with what was expected."""
    env = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    del env[name]
    if value is not None:
        env[name] = value
    with pytest.raises(DemoError, match=rf"^{name} is .*expected") as error_info:
        read_place(env)
    assert value is None or repr(value) in str(error_info.value)


@pytest.mark.parametrize("world_size", [1, 3, 4, 100])
def test_parts_make_up_the_batch(world_size: int) -> None:
    """In every step the parts of all workers are one batch, each image once, the same for any world size."""
    count = 3 * digits.BATCH_SIZE + 7
    images = digits.Images(
        pixels=np.zeros((count, network.PIXELS), np.float32), labels=np.arange(count, dtype=np.int32)
    )

    def batches(size: int) -> list[list[int]]:
        shares = [
            [part.labels for part in digits.parts(images, rank=rank, world_size=size, epochs=2, seed=5)]
            for rank in range(size)
        ]
        return [sorted(np.concatenate(step).tolist()) for step in zip(*shares, strict=True)]

    assert len(batches(world_size)) == 2 * 3
    assert all(len(set(batch)) == digits.BATCH_SIZE for batch in batches(world_size))
    assert batches(world_size) == batches(1)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_reduce_sums(workers: Workers, world_size: int) -> None:
    """Every worker gets the sum of all vectors, the same to the last bit, call after call."""
    members = workers.all(world_size)
    draw = np.random.default_rng(0)
    for size in (1, 2410, 300_000):
        vectors = [draw.standard_normal(size).astype(np.float32) for _ in members]
        sums = [future.result() for future in workers.sums(members, vectors)]
        np.testing.assert_allclose(sums[0], np.sum(vectors, axis=0), atol=1e-5)
        assert len({total.tobytes() for total in sums}) == 1


def test_vanished_worker_is_named(workers: Workers) -> None:
    """A worker that leaves in the middle is named by rank 0; nobody hangs."""
    members = workers.all(3)
    members[2].close()
    futures = workers.sums(members[:2], [np.ones(4, np.float32)] * 2)
    with pytest.raises(DemoError, match=r"rank 0 of 3: rank 2 left"):
        futures[0].result(timeout=5)
    members[0].close()
    with pytest.raises(DemoError, match=r"rank 1 of 3: rank 0 left"):
        futures[1].result(timeout=5)


def test_silent_worker_is_named(hasty_workers: Workers) -> None:
    """A worker that does not answer within the timeout is named, with the timeout."""
    members = hasty_workers.all(2)
    (future,) = hasty_workers.sums(members[:1], [np.ones(4, np.float32)])
    with pytest.raises(DemoError, match=r"no answer from rank 1 within 0.6 s"):
        future.result(timeout=5)


def test_different_lengths_are_told(workers: Workers) -> None:
    """Vectors of different lengths are an error that shows both lengths, not a wrong sum."""
    members = workers.all(2)
    futures = workers.sums(members, [np.ones(4, np.float32), np.ones(3, np.float32)])
    with pytest.raises(DemoError, match=r"rank 1 sent 3 numbers where 4 were expected"):
        futures[0].result(timeout=5)
    members[0].close()
    with pytest.raises(DemoError):
        futures[1].result(timeout=5)


def test_missing_workers_are_listed(hasty_workers: Workers) -> None:
    """Rank 0 does not wait for ever: it lists the ranks that did not come."""
    present = hasty_workers.join(1, 4)
    with pytest.raises(DemoError, match=r"no connection from ranks \[2, 3\] within 0.6 s"):
        hasty_workers.join(0, 4).result(timeout=5)
    present.exception(timeout=5)


def test_missing_rank_0_is_told(hasty_workers: Workers, port: int) -> None:
    """Another rank does not try for ever: it names the address where rank 0 should have been."""
    with pytest.raises(
        DemoError, match=rf"rank 1 of 2: cannot reach rank 0 at 127.0.0.1:{port} within 0.6 s"
    ):
        hasty_workers.join(1, 2).result(timeout=5)


def test_rank_0_may_be_late(workers: Workers) -> None:
    """Workers that come before rank 0 listens try again until it does."""
    early = workers.join(1, 2)
    time.sleep(0.2)  # not to wait for anything: rank 0 shall really be later than the first attempts
    members = [workers.join(0, 2).result(timeout=10), early.result(timeout=10)]
    sums = workers.sums(members, [np.ones(2, np.float32)] * 2)
    assert [future.result(timeout=5).tolist() for future in sums] == [[2, 2], [2, 2]]


@pytest.mark.parametrize("master_addr", ["localhost", "192.0.2.1"])
def test_master_address_may_be_a_name_or_a_service(workers: Workers, master_addr: str) -> None:
    """Rank 0 listens behind a name, and also if the master address belongs to a service in front of it."""
    joining = [workers.join(0, 2, master_addr), workers.join(1, 2)]
    members = [future.result(timeout=15) for future in joining]
    sums = workers.sums(members, [np.ones(2, np.float32)] * 2)
    assert [future.result(timeout=5).tolist() for future in sums] == [[2, 2], [2, 2]]


def test_strangers_do_no_harm(workers: Workers, port: int) -> None:
    """Something else that connects to the port and talks nonsense, or leaves, is no worker."""
    rank_0 = workers.join(0, 2)
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b""):
        with _connect(port) as stranger:
            stranger.sendall(greeting)
    members = [rank_0, workers.join(1, 2)]
    sums = workers.sums([member.result(timeout=10) for member in members], [np.ones(2, np.float32)] * 2)
    assert [future.result(timeout=5).tolist() for future in sums] == [[2, 2], [2, 2]]


def test_other_job_on_the_port(hasty_workers: Workers) -> None:
    """A worker of a job of another size is an error that says so."""
    rank_0, other = hasty_workers.join(0, 2), hasty_workers.join(2, 3)
    with pytest.raises(DemoError, match=r"calls itself rank 2 of 3.*do two jobs share this port"):
        rank_0.result(timeout=5)
    assert isinstance(other.exception(timeout=5), DemoError)


def test_port_in_use(workers: Workers, port: int) -> None:
    """A port that is taken is an error of rank 0 that names the address and the option to change it."""
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(DemoError, match=rf"127.0.0.1:{port} \(Address already in use\).*--master-port"),
    ):
        workers.join(0, 2).result(timeout=5)


def test_different_weights_are_found(workers: Workers, port: int) -> None:
    """Workers whose weights differ end with an error that lists every worker's checksum."""

    def work(rank: int) -> None:
        place = workers.place(rank, 2)
        backend = NumpyBackend(place, seed=rank)
        try:
            compare_checksums(backend, place, backend.weights().checksum())
        finally:
            backend.close()

    listing = ", ".join(f"rank {seed} {network.initial(seed).checksum():08x}" for seed in range(2))
    for future in [workers.run(lambda: work(0)), workers.run(lambda: work(1))]:
        with pytest.raises(RuntimeError, match=listing):
            future.result(timeout=10)


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
