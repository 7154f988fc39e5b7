"""The command as installed: exit codes, what a person sees, bad input."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_until

BIN = Path(sys.executable).parent
PY = sys.executable

pytestmark = pytest.mark.usefixtures("job_folder")


def davincirun(
    *arguments: str, env: dict[str, str] | None = None, timeout: float = 50
) -> subprocess.CompletedProcess[str]:
    """Run the installed command to its end."""
    return subprocess.run(
        [str(BIN / "davincirun"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        check=False,
        stdin=subprocess.DEVNULL,
    )


def table(path: Path, devices: int = 2, **changes: object) -> Path:
    """Write a v1.0 rank table of one server."""
    rows = [
        {"device_id": str(i), "device_ip": f"192.168.1.{i + 1}", "rank_id": str(i)} for i in range(devices)
    ]
    content = {
        "version": "1.0",
        "server_count": "1",
        "server_list": [{"server_id": "node_0", "device": rows}],
        "status": "completed",
        **changes,
    }
    path.write_text(json.dumps(content))
    return path


def test_version_and_help() -> None:
    """Both say what they should and end with 0."""
    assert davincirun("--version").stdout.startswith("davincirun, version ")
    said = davincirun("--help")
    assert said.returncode == 0
    assert "--grace-period" in said.stdout


def test_output_is_whole_prefixed_lines_on_stdout() -> None:
    """Workers' lines are on stdout with their rank; the launcher's own words are on stderr."""
    done = davincirun("--nproc-per-node", "2", PY, "-c", "import os; print('I am', os.environ['RANK'])")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]
    assert all(line.startswith("davincirun: ") for line in done.stderr.splitlines())


def test_a_script_runs_with_the_current_python_and_gets_its_arguments(job_folder: Path) -> None:
    """Arguments reach the script as they are, options that look like ours too."""
    folder = job_folder / "a b 训练"
    folder.mkdir()
    (folder / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    words = ["", "a b", "$HOME", "*", "--help", "--log", "-h", "--", 'x="y"', "z" * 100_000]
    done = davincirun("--nproc-per-node", "1", "--work-dir", str(folder), "train.py", *words)
    assert done.returncode == 0, done.stderr[:2000]
    log = next((job_folder / "log").glob("*-proc-rank-0-device-0.txt")).read_text()
    assert json.loads(log) == words


def test_a_module_runs() -> None:
    """`-m` runs a module."""
    done = davincirun("--nproc-per-node", "1", "-m", "json.tool", "--help")
    assert done.returncode == 0
    assert "json.tool" in done.stdout or "usage" in done.stdout


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(255)", 255),
        ("sys.exit('text')", 1),
        ("raise ValueError('boom')", 1),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 11)", 139),
        ("os.abort()", 134),
        ("os.kill(os.getpid(), 15)", 143),
        ("import threading; threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(600)", 3),
    ],
)
def test_the_exit_code_is_the_failed_workers_own(ending: str, code: int) -> None:
    """Whatever way a worker ends badly, the command ends with its code, 128 + n for signal n."""
    program = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(600)"
    done = davincirun("--nproc-per-node", "3", "--quiet", PY, "-c", program)
    assert done.returncode == code
    assert "rank 1 is the root cause" in done.stderr


def test_the_last_lines_say_what_happened() -> None:
    """The end of the output holds rank, exit code, exception and log file, and no frame of ours."""
    program = (
        "import os, time\nfor i in range(500): print('line', i)\n"
        "def deep(n):\n    if n: deep(n - 1)\n    else: raise ValueError('boom-42')\n"
        "if os.environ['RANK'] == '2': time.sleep(0.5); deep(30)\ntime.sleep(600)"
    )
    done = davincirun("--nproc-per-node", "4", PY, "-c", program)
    end = "\n".join(done.stderr.splitlines()[-40:])
    assert done.returncode == 1
    for part in ("rank 2", "exit code 1", "ValueError: boom-42", "-proc-rank-2-device-2.txt"):
        assert part in end
    assert "davincirunsdk/" not in end


def test_a_hidden_rank_that_fails_is_shown() -> None:
    """With `--echo 0` the reason of rank 3 still reaches the person."""
    program = (
        "import os, sys, time\nif os.environ['RANK'] == '3': print('reason: X'); sys.exit(1)\ntime.sleep(600)"
    )
    done = davincirun("--nproc-per-node", "4", "--echo", "0", PY, "-c", program)
    assert "reason: X" not in done.stdout
    assert "rank 3" in done.stderr
    assert "reason: X" in done.stderr


def test_null_as_standard_input_and_a_session_of_its_own() -> None:
    """A worker reads nothing and shares no session with the launcher."""
    program = "import os, sys; print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())"
    assert davincirun("--nproc-per-node", "1", PY, "-c", program).stdout == "[rank 0] '' True\n"


def test_devices_and_ranks_come_from_the_same_row(job_folder: Path) -> None:
    """With a table, rank and device are those of one row, and the table is passed on."""
    rows = [{"device_id": str(d), "device_ip": f"192.168.1.{d}", "rank_id": str(7 - d)} for d in (7, 6, 5, 4)]
    path = table(job_folder / "t.json", server_list=[{"server_id": "node_0", "device": rows}])
    program = (
        "import os; e = os.environ; print(e['RANK_ID'], e['RANK'], e['DEVICE_ID'], e['RANK_SIZE'],"
        " os.path.exists(e['RANK_TABLE_FILE']))"
    )
    done = davincirun("--rank-table", str(path), PY, "-c", program)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name.split("-proc-")[1] for path in (job_folder / "log").glob("*-proc-*.txt"))
    assert names == [f"rank-{r}-device-{3 - r}.txt" for r in range(4)]
    ranks = sorted(line.split("] ")[1].split() for line in done.stdout.splitlines())
    assert [row[:2] + row[3:] for row in ranks] == [[str(r), str(r), "4", "True"] for r in range(4)]
    # On devices 4 to 7 alone, rank 0 has device 7: the last of the four that its worker sees.
    assert [row[2] for row in ranks] == ["3", "2", "1", "0"]


def test_values_of_the_user_are_kept_and_stale_ones_removed() -> None:
    """The user's own settings reach the workers; what an outer launcher left does not."""
    mine = {
        "HCCL_CONNECT_TIMEOUT": "7",
        "HCCL_IF_BASE_PORT": "50000",
        "OMP_NUM_THREADS": "5",
        "PYTHONUNBUFFERED": "",
    }
    stale = {
        "OMPI_COMM_WORLD_RANK": "9",
        "RANK": "9",
        "LOCAL_RANK": "0,1",
        "TORCHELASTIC_RUN_ID": "x",
        "MS_ROLE": "MS_SCHED",
    }
    program = f"import os; print([os.environ.get(n) for n in {[*mine, *stale]}])"
    done = davincirun("--nproc-per-node", "2", "--echo", "1", PY, "-c", program, env={**mine, **stale})
    assert done.stdout == f"[rank 1] {[*mine.values(), None, '1', '1', os.uname().nodename, None]}\n"


def test_mindspore_gets_a_scheduler_that_is_no_rank(job_folder: Path) -> None:
    """With `--framework mindspore` a scheduler runs the same command, is logged, and ended with the job."""
    program = (
        "import os, time\ne = os.environ\n"
        "print(e['MS_ROLE'], e['MS_WORKER_NUM'], e.get('RANK'), flush=True)\n"
        "if e['MS_ROLE'] == 'MS_SCHED': time.sleep(600)"
    )
    done = davincirun("--nproc-per-node", "2", "--framework", "mindspore", PY, "-c", program)
    assert done.returncode == 0, done.stderr
    logs = {path.name.split("-", 1)[1]: path.read_text() for path in (job_folder / "log").glob("*.txt")}
    assert logs["scheduler.txt"] == "MS_SCHED 2 None\n"
    assert logs["proc-rank-1-device-1.txt"] == "MS_WORKER 2 1\n"


@pytest.mark.parametrize("delay", ["", "sleep 0.3;"], ids=["before workers run", "while workers run"])
def test_a_scheduler_that_dies_is_named(delay: str) -> None:
    """Its death is a failure however early it comes, and the report says that it is no rank."""
    program = f"if [ $MS_ROLE = MS_SCHED ]; then {delay} exit 6; fi; exec sleep 600"
    done = davincirun("--nproc-per-node", "2", "--framework", "mindspore", "sh", "-c", program)
    assert done.returncode == 6
    assert "scheduler" in done.stderr
    assert "not a rank" in done.stderr


def test_runs_do_not_overwrite_each_other(job_folder: Path) -> None:
    """The files of an earlier run are kept under a number."""
    for text in ("first", "second", "third"):
        assert davincirun("--nproc-per-node", "1", "echo", text).returncode == 0
    files = sorted((job_folder / "log").glob("*-proc-rank-0-device-0*.txt"), key=lambda path: path.name)
    assert {path.read_text() for path in files} == {"first\n", "second\n", "third\n"}
    assert files[-1].read_text() == "third\n" or files[0].read_text() == "third\n"


def test_events_can_be_read(job_folder: Path) -> None:
    """The events file tells the job's story with the true exit code and no variable's value."""
    done = davincirun("--nproc-per-node", "2", "sh", "-c", "exit 5", env={"MY_SECRET": "s3cr3t-value"})
    text = next((job_folder / "log").glob("*-events.jsonl")).read_text()
    events = [json.loads(line) for line in text.splitlines()]
    assert done.returncode == 5
    assert events[-1]["kind"] == "finished"
    assert events[-1]["exit_code"] == 5
    assert {event["v"] for event in events} == {1}
    assert "s3cr3t-value" not in text + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "Missing argument"),
        (("--nproc-per-node", "2", "no-such-command"), 127, "command not found: 'no-such-command'"),
        (("--nproc-per-node", "2", "./no-such-command"), 127, "command not found"),
        (("--nproc-per-node", "2", "missing.py"), 127, "No such file or directory"),
        (("--nproc-per-node", "2", "./data.txt"), 126, "is not executable"),
        (("--nproc-per-node", "2", "./"), 126, "folder"),
        (("--nproc-per-node", "0", "true"), 2, "--nproc-per-node"),
        (("--nproc-per-node", "2", "--echo", "3-1", "true"), 2, "3-1"),
        (("--nproc-per-node", "2", "--echo", "x", "true"), 2, "'x'"),
        (("--nproc-per-node", "2", "--grace-period", "-1", "true"), 2, "--grace-period"),
        (("--nproc-per-node", "2", "--log-dir", "/proc/no", "true"), 3, "--log-dir"),
        (("--nproc-per-node", "2", "--work-dir", "/proc/no", "true"), 3, "--work-dir"),
        (("--nproc-per-node", "2", "--log-dir", "data.txt", "true"), 3, "--log-dir"),
        (("--rank-table", "empty.json", "--rank-table-timeout", "0.2", "true"), 3, "empty.json"),
        (("--rank-table", "cut.json", "--rank-table-timeout", "0.2", "true"), 3, "cut.json"),
        (("--rank-table", "text.json", "--rank-table-timeout", "0.2", "true"), 3, "text.json"),
        (("--rank-table", "waiting.json", "--rank-table-timeout", "0.2", "true"), 3, "initializing"),
        (("--rank-table", "good.json", "--nproc-per-node", "3", "true"), 3, "3"),
        (("--rank-table", "two.json", "true"), 3, "10.9.8.2"),
        (("--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "2", "true"), 3, "node"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
)
def test_bad_input_gets_one_clear_error_and_starts_nothing(
    arguments: tuple[str, ...], code: int, says: str, job_folder: Path
) -> None:
    """The error names what is wrong, has no traceback, and no worker was started."""
    (job_folder / "data.txt").write_text("x")
    (job_folder / "empty.json").write_text("")
    good = table(job_folder / "good.json").read_text()
    (job_folder / "cut.json").write_text(good[:60])
    (job_folder / "text.json").write_text("no JSON at all")
    (job_folder / "waiting.json").write_text('{"status": "initializing"}')
    servers = [
        {
            "server_id": f"10.9.8.{n}",
            "device": [{"device_id": "0", "device_ip": f"10.1.1.{n}", "rank_id": str(n - 1)}],
        }
        for n in (1, 2)
    ]
    table(job_folder / "two.json", server_list=servers, server_count="2")
    done = davincirun(*arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(job_folder.glob("log/*-proc-*"))


def test_a_port_in_use_is_an_error_before_anything_runs() -> None:
    """A port that was asked for and is taken is named."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = davincirun("--nproc-per-node", "2", "--master-port", str(port), "true")
    assert done.returncode == 3
    assert f"master port {port}" in done.stderr


def test_two_jobs_side_by_side_get_ports_and_files_of_their_own(job_folder: Path) -> None:
    """Neither port nor log file of one job is the other's."""
    program = (
        "import os, sys, time; print(os.environ['MASTER_PORT'], flush=True); sys.stdin.read(); time.sleep(1)"
    )
    command = [str(BIN / "davincirun"), "--nproc-per-node", "1", "--quiet", PY, "-c", program]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [job.communicate(timeout=50)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert len(set(said)) == 3
    logs = sorted(path.read_text() for path in (job_folder / "log").glob("*-proc-rank-0-device-0.txt"))
    assert logs == sorted(text.split("] ")[1] for text in said)


@pytest.mark.parametrize("closed", ["closed", "broken", "stuck"])
def test_a_bad_stdout_neither_stops_nor_slows_the_job(closed: str, job_folder: Path) -> None:
    """Closed, without a reader, or with one that does not read: the job runs and its logs are whole."""
    program = "import sys\nfor i in range(20000): print('x' * 100)\nopen('marker', 'w').close()"
    command = [str(BIN / "davincirun"), "--nproc-per-node", "2", PY, "-c", program]
    read, write = os.pipe()
    if closed == "broken":
        os.close(read)
    try:
        done = subprocess.run(
            ["sh", "-c", '"$@" >&-', "sh", *command] if closed == "closed" else command,
            stdout=None if closed == "closed" else write,
            stderr=None if closed == "closed" else write,
            timeout=50,
            check=False,
        )
    finally:
        os.close(write)
        if closed != "broken":
            os.close(read)
    assert done.returncode == 0
    assert (job_folder / "marker").exists()
    assert [path.stat().st_size for path in (job_folder / "log").glob("*-proc-*")] == [20000 * 101] * 2


@pytest.mark.parametrize("pause", [4.0, 8.0])
def test_a_reader_that_pauses_gets_whole_lines(pause: float, job_folder: Path) -> None:
    """What comes is whole lines; what does not is counted, with the folder that has it."""
    program = "for i in range(4000): print(i, 'x' * (i % 200))"
    command = [str(BIN / "davincirun"), "--nproc-per-node", "1", PY, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        wait_until(lambda: list(job_folder.glob("log/*-events.jsonl")))
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > pause)
        shown, said = process.stdout.read().decode(), process.stderr.read().decode()
        assert process.wait(20) == 0
    lines = shown.splitlines()
    assert lines == [f"[rank 0] {i} {'x' * (i % 200)}" for i in range(len(lines))]
    missing = re.search(r"(\d+) lines of output were not shown", said)
    assert len(lines) + (int(missing[1]) if missing else 0) == 4000
    if missing:
        assert str(job_folder / "log") in said
    assert bool(missing) is (pause > 6)


def test_verbose_says_which_source_gave_what() -> None:
    """With --verbose each source of size and place is told, and which was believed."""
    env = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "3"}
    done = davincirun("--nproc-per-node", "1", "--verbose", "true", env=env)
    assert done.returncode == 0, done.stderr
    assert "workers per node: 1, from --nproc-per-node\n" in done.stderr
    assert "workers per node: 3, from Kubeflow (PET_NPROC_PER_NODE) (not believed)\n" in done.stderr
    assert "node rank: 0, from Kubeflow (PET_NODE_RANK)\n" in done.stderr


def test_a_contradiction_is_an_error_unless_allowed() -> None:
    """A node rank that the platform contradicts is refused, and counts with --ignore-platform."""
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    options = ("--nproc-per-node", "1", "--node-rank", "0")
    done = davincirun(*options, "true", env=env)
    assert done.returncode == 3
    assert "node rank 0 from --node-rank, but node rank 1 from Kubeflow (PET_NODE_RANK)" in done.stderr
    allowed = davincirun(
        *options, "--ignore-platform", PY, "-c", "import os; print(os.environ['RANK'])", env=env
    )
    assert (allowed.returncode, allowed.stdout) == (0, "[rank 0] 0\n"), allowed.stderr


def test_the_report_names_the_card_of_the_host_too(job_folder: Path) -> None:
    """One number everywhere, the worker's own; beside it the table's, where that differs."""
    rows = [{"device_id": str(4 + n), "device_ip": f"192.168.1.{n}", "rank_id": str(n)} for n in range(2)]
    path = table(job_folder / "t.json", server_list=[{"server_id": "node_0", "device": rows}])
    done = davincirun("--rank-table", str(path), "sh", "-c", "[ $RANK = 0 ] && exec sleep 600; exit 4")
    assert done.returncode == 4
    assert "rank 1, device 1 (NPU 5 of the host)" in done.stderr
    assert "-proc-rank-1-device-1.txt" in done.stderr
