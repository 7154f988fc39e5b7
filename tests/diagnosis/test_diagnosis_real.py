"""Real failures on this machine: who is named, how sure, and which words help."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import wait_until
from replayed import report_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk import FMKManager
    from davincirunsdk.types import FailureReport

PY = sys.executable
MEMORY = Path("/sys/fs/cgroup/memory")

pytestmark = pytest.mark.usefixtures("job_folder")

WAIT = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\nprint('ready', flush=True)\n"
"""Every rank but the culprit waits for what never comes; the culprit goes on when all are there."""
MEET = (
    "open(f'ready-{rank}', 'w').close()\n"
    "while len([name for name in os.listdir() if name.startswith('ready-')]) < 4: time.sleep(0.01)\n"
)


async def report(program: str, count: int = 4, **options: object) -> FailureReport:
    """Run `program` as every rank and return the report."""
    Path("program.py").write_text(program)
    found = await report_of([PY, "program.py"], count, Path("log"), **options)  # type: ignore[arg-type] # passed on
    assert found is not None, "the job has no report"
    return found


def culprit(rank: int, *lines: str) -> str:
    """Write a program whose `rank` does `lines` while the others wait."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"{WAIT}{MEET}if rank == {rank}:\n{body}time.sleep(600)\n"


def holds_one_of(text: str, *words: str) -> None:
    """Check that a report says one of these."""
    assert any(word.lower() in text.lower() for word in words), text


async def test_one_raises_while_the_others_wait() -> None:
    """The exception's rank, its exception from 30 calls down, nothing of the launcher's own code."""
    found = await report(
        "def deep(n):\n"
        "    if n: return deep(n - 1)\n"
        "    raise ValueError('boom-42')\n" + culprit(2, "[print('line', n) for n in range(500)]", "deep(30)")
    )
    assert (found.verdict, found.ranks) == ("root_cause", (2,))
    assert "ValueError: boom-42" in found.text
    assert "/davincirunsdk/" not in found.text.replace(str(Path.cwd()), "")
    assert len(found.text.splitlines()) < 80
    assert sorted(found.stopped_ranks) == [0, 1, 3]


async def test_a_segmentation_fault() -> None:
    """Named with its signal; the stack that Python's fault handler left is shown."""
    found = await report(culprit(1, "import ctypes", "ctypes.string_at(0)"))
    assert (found.verdict, found.ranks) == ("root_cause", (1,))
    assert found.exit_code == 128 + signal.SIGSEGV
    assert "SIGSEGV" in found.text
    assert "string_at" in found.text
    holds_one_of(found.text, "native", "crash")


async def test_an_abort() -> None:
    """Named with its signal."""
    found = await report(culprit(3, "os.abort()"))
    assert (found.verdict, found.ranks) == ("root_cause", (3,))
    assert found.exit_code == 128 + signal.SIGABRT
    assert "SIGABRT" in found.text


async def test_a_rank_killed_from_outside() -> None:
    """SIGKILL by somebody else: the rank is named, and that it left no message."""

    async def kill(manager: FMKManager) -> None:
        wait_until(lambda: len(list(Path().glob("ready-*"))) == 4)
        pid = manager.workers[2].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    found = await report(culprit(9, "pass"), meanwhile=kill)
    assert (found.verdict, found.ranks) == ("root_cause", (2,))
    assert found.exit_code == 128 + signal.SIGKILL
    holds_one_of(found.text, "no message", "no traceback", "nothing")
    assert "SIGKILL" in found.text


async def test_all_ranks_killed_from_outside() -> None:
    """Killed alike is not failed alike: it points outside the job, nobody is the root cause."""

    async def kill(manager: FMKManager) -> None:
        wait_until(lambda: len(list(Path().glob("ready-*"))) == 4)
        for worker in manager.workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)

    found = await report(culprit(9, "pass"), meanwhile=kill, fail_fast=False)
    assert found.verdict == "stopped"
    assert "is the root cause" not in found.text
    holds_one_of(found.text, "outside", "scheduler")


async def test_a_limit_on_address_space() -> None:
    """What `ulimit -v` gives Python is a MemoryError; the words speak of the host's memory."""
    found = await report(
        culprit(
            0,
            "import resource",
            "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))",
            "data = bytearray(1 << 30)",
        )
    )
    assert (found.verdict, found.ranks) == ("root_cause", (0,))
    assert "MemoryError" in found.text
    holds_one_of(found.text, "host memory", "memory limit", "ulimit", "container's limit")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A control group with 64 MiB, as that of a container."""
    assert (MEMORY / "cgroup.procs").exists(), "this test needs root and the memory control group, version 1"
    group = MEMORY / f"davincirun-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the control group is empty")
    group.rmdir()


async def test_a_limit_of_a_control_group(memory: Path) -> None:
    """The kernel kills one rank for memory: the rank is named, and memory as the likely reason."""
    found = await report(
        culprit(
            1,
            f"open('{memory}/cgroup.procs', 'w').write(str(os.getpid()))",
            "data = [bytearray(1 << 20) for _ in range(300)]",
        )
    )
    assert (found.verdict, found.ranks) == ("root_cause", (1,))
    assert found.exit_code == 128 + signal.SIGKILL
    holds_one_of(found.text, "memory")


async def test_an_import_error_on_all_ranks() -> None:
    """All that got as far as the error are named together."""
    found = await report(f"{WAIT}{MEET}import a_module_that_nobody_has\n", fail_fast=False)
    assert found.verdict == "failed_alike"
    assert sorted(found.ranks) == [0, 1, 2, 3]
    assert "No module named 'a_module_that_nobody_has'" in found.text
    holds_one_of(found.text, "install")


async def test_an_import_error_on_all_ranks_with_fail_fast() -> None:
    """Whoever has printed the error before it is stopped has failed alike; others are not named."""
    found = await report(f"{WAIT}{MEET}import a_module_that_nobody_has\n")
    printed = {
        int(path.name.split("-rank-")[1].split("-")[0])
        for path in Path("log").glob("*-rank-*.txt")
        if "ModuleNotFoundError" in path.read_text()
    }
    assert set(found.ranks) <= printed
    assert found.verdict == ("failed_alike" if len(found.ranks) > 1 else "root_cause")


async def test_a_wrong_argument_on_all_ranks() -> None:
    """What argparse says on every rank."""
    found = await report(
        f"{WAIT}{MEET}import argparse\nargparse.ArgumentParser().parse_args(['--batch', '3'])\n",
        fail_fast=False,
    )
    assert found.verdict == "failed_alike"
    assert found.exit_code == 2
    assert "unrecognized arguments: --batch 3" in found.text


async def test_the_exception_of_a_task_group_and_its_cause() -> None:
    """Chained exceptions within one: the first is quoted, too."""
    found = await report(
        culprit(
            0,
            "try:",
            "    {}['missing-key']",
            "except KeyError as error:",
            "    raise RuntimeError('cannot restore') from error",
        )
    )
    assert (found.verdict, found.ranks) == ("root_cause", (0,))
    assert "missing-key" in found.text
    assert "cannot restore" in found.text


async def test_a_silent_exit_and_loud_victims() -> None:
    """Who leaves without a word is named, not the one that says most."""
    found = await report(
        f"{WAIT}{MEET}"
        "import socket\n"
        "if rank == 3:\n"
        "    here = socket.socket(socket.AF_UNIX)\n"
        "    here.bind('meeting'); here.listen()\n"
        "    peers = [here.accept() for _ in range(3)]\n"
        "    os._exit(1)\n"
        "while not os.path.exists('meeting'): time.sleep(0.01)\n"
        "peer = socket.socket(socket.AF_UNIX)\n"
        "while peer.connect_ex('meeting'): time.sleep(0.01)\n"
        "if not peer.recv(1):\n"
        "    raise ConnectionError('connection closed by peer')\n",
        fail_fast=False,
    )
    assert (found.verdict, found.ranks[0]) == ("root_cause", 3)


TORCH = (
    "import datetime, os, signal, sys, time\n"
    "import torch\n"
    "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))\n"
    "rank = dist.get_rank()\n"
    "data = torch.ones(4)\n"
    "dist.all_reduce(data)\n"
    "print('step 1', flush=True)\n"
)


@pytest.mark.torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fail_fast", [True, False])
async def test_torch_rank_dies_in_an_all_reduce(fail_fast: bool) -> None:
    """The peers' errors of gloo are effects."""
    found = await report(
        TORCH + "if rank == 2: os._exit(9)\nfor _ in range(99): dist.all_reduce(data)\n", fail_fast=fail_fast
    )
    assert (found.verdict, found.ranks) == ("root_cause", (2,))
    assert found.exit_code == 9


@pytest.mark.torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fail_fast", [True, False])
async def test_torch_rank_raises_before_an_all_reduce(fail_fast: bool) -> None:
    """The exception is quoted, not the peers' complaint about the connection."""
    found = await report(
        TORCH
        + "if rank == 1: raise ValueError('labels run to 11')\nfor _ in range(99): dist.all_reduce(data)\n",
        fail_fast=fail_fast,
    )
    assert (found.verdict, found.ranks) == ("root_cause", (1,))
    assert "labels run to 11" in found.text


@pytest.mark.torch
@pytest.mark.timeout(120)
async def test_torch_monitored_barrier() -> None:
    """Rank 0 names the rank that did not come: a suspect, found by its name."""
    found = await report(
        TORCH + "if rank == 2: time.sleep(600)\n"
        "dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))\ntime.sleep(600)\n"
    )
    assert found.verdict == "suspects"
    assert found.ranks[0] == 2
    assert "is the root cause" not in found.text


@pytest.mark.torch
@pytest.mark.timeout(120)
async def test_torch_hang_in_a_collective() -> None:
    """Time-outs of the others; the one that hangs printed nothing and still ran."""
    found = await report(TORCH + "if rank == 1: time.sleep(600)\ndist.all_reduce(data)\ntime.sleep(600)\n")
    assert found.verdict == "suspects"
    assert found.ranks[0] == 1
    assert "is the root cause" not in found.text


@pytest.mark.torch
@pytest.mark.timeout(120)
async def test_torch_data_loader_is_killed() -> None:
    """One of a rank's loaders is killed, as by the memory killer: the rank, and memory, are named."""
    found = await report(
        "import os, signal, time\n"
        "import torch.utils.data\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, at):\n"
        "        if at == 9 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return at\n"
        "for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2): pass\n"
        "time.sleep(600)\n",
        count=2,
    )
    assert (found.verdict, found.ranks) == ("root_cause", (1,))
    assert "DataLoader worker" in found.text
    holds_one_of(found.text, "memory")


@pytest.mark.mindspore
@pytest.mark.timeout(300)
async def test_mindspore_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback is quoted; neither the peer nor the scheduler is to blame."""
    monkeypatch.setenv("GLOG_v", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    found = await report(
        "import mindspore as ms\n"
        "from mindspore.communication import get_rank, init\n"
        "ms.set_context(mode=ms.PYNATIVE_MODE, device_target='CPU')\n"
        "init()\n"
        "import numpy as np\n"
        "data = ms.Tensor(np.ones(4, np.float32))\n"
        "reduce = ms.ops.AllReduce()\n"
        "reduce(data)\n"
        "print('step 1', flush=True)\n"
        "if get_rank() == 1:\n"
        "    raise ValueError('the shape of the label is wrong')\n"
        "for _ in range(99): reduce(data)\n",
        count=2,
        framework="mindspore",
    )
    assert (found.verdict, found.ranks) == ("root_cause", (1,))
    assert "the shape of the label is wrong" in found.text
