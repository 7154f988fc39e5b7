"""The documented blocking API: in a script, in threads, inside a running loop, after a fork."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import davincirunsdk
from davincirunsdk import (
    DistributedRuntimeError,
    FMKManager,
    blocking,
    set_random_ms_cache_dir,
    start_and_wait_distributed_train,
    start_distributed_train,
    wait_distributed_train,
)

PY = sys.executable

pytestmark = pytest.mark.usefixtures("job_folder")


def run_script(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program of its own."""
    return subprocess.run(
        [PY, "-c", text],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )


def test_a_loop_that_cannot_begin_is_an_error(job_folder: Path) -> None:
    """Whatever the reason, such as a library of another version: the call does not wait for it for ever."""
    text = (
        "import davincirunsdk\nfrom davincirunsdk import background\n"
        "background.start_blocking_portal = lambda *words: None\n"
        "for _ in range(2):\n"
        "    try: davincirunsdk.start_distributed_train(['true'], nproc_per_node=1)\n"
        "    except TypeError as error: print('told')\n"
    )
    assert run_script(text, job_folder).stdout == "told\ntold\n"


def test_success_is_0_and_failure_1_or_an_error() -> None:
    """The return values and the error are those of the documentation."""
    assert start_and_wait_distributed_train(["true"], nproc_per_node=2) == 0
    assert start_and_wait_distributed_train(["false"], nproc_per_node=2, raise_exception=False) == 1
    with pytest.raises(DistributedRuntimeError):
        start_and_wait_distributed_train(["false"], nproc_per_node=2)
    manager = start_distributed_train(["true"], nproc_per_node=1)
    assert wait_distributed_train(manager) == 0
    assert wait_distributed_train(manager, True, False) == 0


def test_start_returns_a_running_job_that_destroy_ends() -> None:
    """`start` gives the manager at once; `destroy` blocks until nothing is left."""
    manager = start_distributed_train(["sleep", "600"], nproc_per_node=2)
    assert isinstance(manager, FMKManager)
    assert manager.state == "RUNNING"
    manager.destroy()
    assert manager.state == "STOPPED"
    assert wait_distributed_train(manager) == 1


def test_relative_log_dir_is_the_callers(job_folder: Path) -> None:
    """`log_dir` is seen from the caller's folder whatever `work_dir` is; the command from `work_dir`."""
    work = job_folder / "work"
    work.mkdir()
    script = work / "train.sh"
    script.write_text("#!/bin/sh\npwd\n")
    script.chmod(0o755)
    assert start_and_wait_distributed_train(["./train.sh"], "work", "logs/deep", nproc_per_node=1) == 0
    assert next((job_folder / "logs" / "deep").glob("*.txt")).read_text() == f"{work}\n"


def test_survivors_are_kept_until_destroy() -> None:
    """With `destroy_when_finished=False` a failure ends the waiting and nobody else."""
    program = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    manager = start_distributed_train([PY, "-c", program], nproc_per_node=2)
    with pytest.raises(DistributedRuntimeError):
        wait_distributed_train(manager, destroy_when_finished=False)
    assert [str(worker.state) for worker in manager.workers] == ["RUNNING", "FAILED"]
    manager.destroy()
    assert [str(worker.state) for worker in manager.workers] == ["STOPPED", "FAILED"]
    assert manager.state == "FAILED"


def test_threads_may_call_it_side_by_side() -> None:
    """From threads and pools, several at once."""
    results: list[int] = []
    thread = threading.Thread(
        target=lambda: results.append(start_and_wait_distributed_train(["true"], nproc_per_node=2))
    )
    thread.start()
    with ThreadPoolExecutor() as pool:
        codes = pool.map(
            lambda code: start_and_wait_distributed_train(
                ["sh", "-c", f"exit {code}"], nproc_per_node=2, raise_exception=False
            ),
            [0, 1, 0],
        )
        assert list(codes) == [0, 1, 0]
    thread.join()
    assert results == [0]


async def test_inside_a_running_loop() -> None:
    """As in a notebook: it works in the loop's thread, and the manager can be awaited there."""
    loop = asyncio.get_running_loop()
    assert start_and_wait_distributed_train(["true"], nproc_per_node=2) == 0
    manager = start_distributed_train(["true"], nproc_per_node=1)
    assert (await manager.wait()).exit_code == 0
    assert asyncio.get_running_loop() is loop


async def test_waiting_for_a_manager_of_this_loop_is_refused() -> None:
    """It would block its own job; the error names what to use."""
    async with FMKManager(["sleep", "600"], nproc_per_node=1) as manager:
        with pytest.raises(RuntimeError, match=r"aio\.wait_distributed_train"):
            wait_distributed_train(manager)


def test_a_forked_child_starts_jobs_of_its_own(job_folder: Path) -> None:
    """After `fork`, in the child, with the parent's background loop in use."""
    text = (
        "import os, sys\nfrom davincirunsdk import *\n"
        "assert start_and_wait_distributed_train(['true'], nproc_per_node=2) == 0\n"
        "pid = os.fork()\n"
        "assert start_and_wait_distributed_train(['true'], nproc_per_node=2) == 0\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0)"
    )
    done = run_script(text, job_folder)
    assert done.returncode == 0, done.stderr


def test_a_forgotten_job_is_stopped_when_the_script_raises(job_folder: Path) -> None:
    """Workers get SIGTERM and their grace period, what they say is kept, and a line says what was done."""
    text = (
        "import sys\nfrom davincirunsdk import start_distributed_train\n"
        "program = '''import signal, sys, time\n"
        "def save(*_): print('saving'); time.sleep(0.3); print('saved'); sys.exit()\n"
        "signal.signal(15, save)\nopen('ready', 'w').close()\ntime.sleep(600)'''\n"
        "start_distributed_train([sys.executable, '-c', program], nproc_per_node=1, echo='none')\n"
        "import os, time\nwhile not os.path.exists('ready'): time.sleep(0.01)\nraise KeyError('mine')\n"
    )
    done = run_script(text, job_folder)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "davincirunsdk: the script has ended by an exception: stop"
    )
    assert next((job_folder / "log").glob("*.txt")).read_text() == "saving\nsaved\n"


@pytest.mark.parametrize("before", [False, True], ids=["first job", "second job"])
def test_a_job_in_an_exit_handler_is_refused(before: bool, job_folder: Path) -> None:
    """When the interpreter ends there is no loop to be had: one sentence says so, and nothing is started."""
    text = (
        "import atexit, davincirunsdk, threading\n"
        "def late():\n"
        "    try: davincirunsdk.start_and_wait_distributed_train(['touch', 'late'], nproc_per_node=2)\n"
        "    except RuntimeError as error: print(error)\n"
        "atexit.register(late)\n"
    )
    if before:
        text += "davincirunsdk.start_and_wait_distributed_train(['true'], nproc_per_node=1)\n"
    done = run_script(text, job_folder)
    assert done.stdout.startswith("the program is ending, so no job can be started"), done.stderr
    assert not (job_folder / "late").exists()


def test_a_thread_goes_on_with_its_job_after_the_main_thread(job_folder: Path) -> None:
    """The interpreter waits for a thread that waits for a job; the job is not stopped meanwhile."""
    text = (
        "import threading\nfrom davincirunsdk import start_distributed_train, wait_distributed_train\n"
        "started = threading.Event()\n"
        "def work():\n"
        "    manager = start_distributed_train(['sleep', '0.5'], nproc_per_node=2)\n"
        "    started.set()\n"
        "    print(wait_distributed_train(manager))\n"
        "threading.Thread(target=work).start()\n"
        # From here on Python 3.12 lets nobody start a thread any more.
        "started.wait()\n"
    )
    done = run_script(text, job_folder)
    assert (done.stdout, done.returncode) == ("0\n", 0)
    assert len(done.stderr.splitlines()) == 1


FORGETS = """
import sys, time
from davincirunsdk import start_distributed_train
code = "import os, time; time.sleep(1); print('trained'); raise SystemExit(int(os.environ['CODE']))"
start_distributed_train([sys.executable, "-c", code], nproc_per_node=2, env={"CODE": sys.argv[1]})
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("job", "script"), [(0, 0), (0, 5), (7, 0), (7, 5)])
def test_a_script_that_ends_waits_for_a_forgotten_job(job: int, script: int, job_folder: Path) -> None:
    """It says so and how to stop it; a job that fails is reported, and its exit code is the script's."""
    (job_folder / "script.py").write_text(FORGETS)
    done = subprocess.run(
        [PY, "script.py", str(job), str(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == (job or script)
    # Where one fails, the other may be stopped before it has said anything.
    assert ("[rank 0] trained" in done.stdout) or (job and "[rank 1] trained" in done.stdout)
    assert "nobody waits for job" in done.stderr
    assert "stops it" in done.stderr
    assert ("exit code 7" in done.stderr) is bool(job)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


FORGETS_TWO = """
import sys, time
from davincirunsdk import start_distributed_train
for name, code in ("first", sys.argv[1]), ("second", sys.argv[2]):
    job = start_distributed_train(["sh", "-c", f"exit {code}"], nproc_per_node=1, name=name)
    while job.state == "RUNNING" or job.state == "STOPPING":
        time.sleep(0.05)
"""


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (4, 0, 4), (0, 5, 5), (4, 5, 4)])
def test_a_forgotten_job_that_had_failed_is_reported(
    first: int, second: int, code: int, job_folder: Path
) -> None:
    """Whether it fails before the script ends or after it makes no difference."""
    (job_folder / "script.py").write_text(FORGETS_TWO)
    done = subprocess.run(
        [PY, "script.py", str(first), str(second)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == code
    assert ("job first failed" in done.stderr) is bool(first)
    assert ("job second failed" in done.stderr) is bool(second)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_waiting_at_the_end_can_be_stopped(number: signal.Signals, code: int, job_folder: Path) -> None:
    """The signal stops the job with its grace period: a checkpoint is written, no noise, nothing left."""
    text = (
        "import sys\nfrom davincirunsdk import start_distributed_train\n"
        "program = '''import signal, sys, time\n"
        "def save(*_): time.sleep(0.3); open('saved', 'w').close(); sys.exit()\n"
        "signal.signal(15, save)\nprint('ready', flush=True)\ntime.sleep(600)'''\n"
        "start_distributed_train([sys.executable, '-c', program], nproc_per_node=1)\n"
    )
    (job_folder / "script.py").write_text(text)
    words = [PY, "script.py"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "ready" in process.stdout.readline()
        while "nobody waits" not in process.stderr.readline():
            pass
        process.send_signal(number)
        try:
            said = process.stderr.read()
            assert process.wait(30) == code
        finally:
            process.kill()
    assert (job_folder / "saved").exists()
    assert "Exception ignored" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("echo", [None, "all", "none", "1"])
def test_output_goes_to_the_scripts_output(echo: str | None, job_folder: Path) -> None:
    """As in 0.1.5, now with each line's rank; `echo` chooses, and one line on stderr says what runs where."""
    text = (
        "import sys\nfrom davincirunsdk import start_and_wait_distributed_train\n"
        f"echo = {echo!r}\n"
        "start_and_wait_distributed_train(['sh', '-c', 'echo I am $RANK'], nproc_per_node=2, echo=echo)\n"
    )
    done = run_script(text, job_folder)
    ranks = {None: [0, 1], "all": [0, 1], "none": [], "1": [1]}[echo]
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] I am {rank}" for rank in ranks]
    line = f"davincirunsdk: 2 workers, ranks 0, 1; logs: {job_folder}/log/"
    assert done.stderr.startswith(line) if ranks else done.stderr == ""


@pytest.mark.parametrize("call", ["wait_distributed_train(job)", "job.wait()", "job.stop()", "job.destroy()"])
def test_a_forked_child_cannot_wait_for_its_parents_job(call: str, job_folder: Path) -> None:
    """It is told so at once, where a wait would never end; the parent's job goes on."""
    text = (
        "import os, sys\nfrom davincirunsdk import *\n"
        "job = start_distributed_train(['sleep', '1'], nproc_per_node=1)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        f"    try: {call}\n"
        "    except RuntimeError as error: os._exit(7 if 'this one was forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert wait_distributed_train(job) == 0\n"
    )
    done = run_script(text, job_folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["davincirunsdk.notebook", "davincirunsdk.notebook.sdk"])
def test_imports_of_0_1_5(module: str) -> None:
    """The names are there, and they are the same things."""
    old = importlib.import_module(module)
    for name in blocking.__all__:
        assert getattr(old, name) is getattr(davincirunsdk, name)
    exception = importlib.import_module("davincirunsdk.notebook.exception")
    assert exception.DistributedRuntimeError is DistributedRuntimeError


def test_replaced_threads_are_refused_before_the_start(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under gevent's threads the job would run in the thread that waits for it."""

    def start_new_thread(*_: object) -> int:
        raise AssertionError

    start_new_thread.__module__ = "gevent.thread"
    monkeypatch.setattr("_thread.start_new_thread", start_new_thread)
    with pytest.raises(RuntimeError, match="gevent has replaced this program's threads"):
        start_and_wait_distributed_train(["touch", "ran"], nproc_per_node=1)
    assert not (job_folder / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"command": ["no-such-command"]}, FileNotFoundError),
        ({"command": ["./plain.txt"]}, PermissionError),
        ({"command": ["true"], "rank_table": "missing/hccl.json"}, FileNotFoundError),
    ],
)
def test_errors_are_of_the_kinds_that_scripts_catch(
    arguments: dict[str, Any], kind: type[Exception], job_folder: Path
) -> None:
    """As `subprocess` would raise them, also after a pickle."""
    (job_folder / "plain.txt").write_text("x")
    with pytest.raises(kind) as caught:
        start_and_wait_distributed_train(**{"nproc_per_node": 1, **arguments})
    assert isinstance(caught.value, davincirunsdk.DavinciRunError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, kind)
    assert str(again) == str(caught.value)


def test_random_cache_dir(job_folder: Path) -> None:
    """Inside, the variable names a private folder; afterwards folder and variable are as before."""
    name = "MS_COMPILER_CACHE_PATH"
    before = os.environ.get(name)
    with set_random_ms_cache_dir():
        folder = Path(os.environ[name])
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "rank_0").mkdir()
    assert not folder.exists()
    assert os.environ.get(name) == before
    program = ["sh", "-c", "echo $MS_COMPILER_CACHE_PATH; test -d $MS_COMPILER_CACHE_PATH"]
    assert start_and_wait_distributed_train(program, nproc_per_node=1) == 0
    used = next((job_folder / "log").glob("*.txt")).read_text().strip()
    assert not Path(used).exists()
    assert os.environ.get(name) == before


def test_init_rank_table_without_a_table_sets_nothing(job_folder: Path) -> None:
    """Without a table it says False and leaves the environment alone."""
    text = (
        "import os\nfrom davincirunsdk import init_rank_table\nbefore = dict(os.environ)\n"
        "assert init_rank_table() is False\nassert dict(os.environ) == before"
    )
    done = run_script(text, job_folder)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_no_event_loop(job_folder: Path) -> None:
    """The import is cheap: what it gives is loaded when it is used."""
    done = run_script(
        "import sys, davincirunsdk; print('asyncio' in sys.modules, 'anyio' in sys.modules)", job_folder
    )
    assert done.stdout == "False False\n"


def test_unknown_names_are_refused() -> None:
    """A name that the package does not have is an AttributeError."""
    with pytest.raises(AttributeError, match="no_such_name"):
        davincirunsdk.no_such_name  # noqa: B018 - that is the point


@pytest.mark.parametrize("given", [None, "job", 0])
def test_waiting_for_what_is_no_manager(given: object) -> None:
    """The error says what is expected."""
    with pytest.raises(TypeError, match="start_distributed_train"):
        wait_distributed_train(given)  # type: ignore[arg-type] # the fault in question
