"""A dozen documented scripts, run under 0.1.5 and under this package, and what each of them leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WORKER = """
import json, os, sys
rank = os.environ.get("RANK_ID", "none")
with open(os.path.join(os.environ["PLACE"], f"env-{rank}.json"), "w") as file:
    json.dump([dict(os.environ), os.getcwd()], file)
sys.stdout.write(f"hello of rank {rank}\\n")
sys.exit(int(os.environ.get("CODE", "0")) if rank in ("0", "4", "none") else 0)
"""
HEAD = """
import os, sys
from davincirunsdk import *
COMMAND = [sys.executable, os.path.abspath("worker.py")]
"""
PRINT = "print('returned', repr(start_and_wait_distributed_train(COMMAND, {0})))"
CATCH = """
from davincirunsdk.notebook.exception import DistributedRuntimeError
try:
    print('returned', repr({0}))
except BaseException as error:
    print('raised', type(error).__mro__[0].__name__, isinstance(error, RuntimeError),
          isinstance(error, DistributedRuntimeError), isinstance(error, FileNotFoundError))
"""


def table_v1(*devices: int) -> str:
    """A table of one server."""
    rows = [
        {"device_id": str(device), "device_ip": f"192.168.100.{device}", "rank_id": str(rank)}
        for rank, device in enumerate(devices)
    ]
    server = {"server_id": "10.0.0.1", "device": rows}
    return json.dumps({"status": "completed", "version": "1.0", "server_count": "1", "server_list": [server]})


def table_v0(*devices: int) -> str:
    """A table of one pod, as ModelArts wrote it."""
    rows = [{"device_id": str(device), "device_ip": f"192.168.100.{device}"} for device in devices]
    pod = {"pod_name": "job0", "server_id": "10.0.0.1", "devices": rows}
    group = {
        "group_name": "job", "device_count": str(len(devices)), "instance_count": "1", "instance_list": [pod],
    }  # fmt: skip
    return json.dumps({"status": "completed", "group_count": "1", "group_list": [group]})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One documented way to use the package.

    Attributes:
        name: In the table of differences.
        code: The script, after `HEAD`.
        files: Beside it: name and text.
        env: Variables; `{here}` is the script's folder.
    """

    name: str
    code: str
    files: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a scenario left, in words that can be compared.

    Attributes:
        returned: What the call returned or raised.
        exit_code: Of the script.
        stdout: Lines of the workers on the script's standard output, sorted.
        files: Names of files and folders below the script's folder, numbers of jobs taken out.
        logs: Text of each worker's log.
        env: Of each worker: variables that the package set or changed.
        cwd: Folder each worker ran in, seen from the script's.
    """

    returned: str
    exit_code: int
    stdout: list[str]
    files: list[str]
    logs: dict[str, str]
    env: dict[str, dict[str, str]]
    cwd: dict[str, str]


TABLE = {"rank_table.json": table_v1(0, 1)}
NAMED = {"RANK_TABLE_FILE": "{here}/rank_table.json"}
SCENARIOS = [
    Scenario(name="defaults", code=PRINT.format(""), files=TABLE, env=NAMED),
    Scenario(
        name="a worker fails",
        code=CATCH.format("start_and_wait_distributed_train(COMMAND)"),
        files=TABLE,
        env=NAMED | {"CODE": "3"},
    ),
    Scenario(
        name="a worker fails, raise_exception=False",
        code=PRINT.format("raise_exception=False"),
        files=TABLE,
        env=NAMED | {"CODE": "3"},
    ),
    Scenario(
        name="destroy_when_finished=False",
        code=PRINT.format("destroy_when_finished=False"),
        files=TABLE,
        env=NAMED,
    ),
    Scenario(
        name="start, then wait",
        code="m = start_distributed_train(COMMAND)\nprint('returned', wait_distributed_train(m))",
        files=TABLE,
        env=NAMED,
    ),
    Scenario(
        name="work_dir and log_dir",
        code="os.mkdir('work')\n" + PRINT.format("'work', os.path.abspath('logs')"),
        files=TABLE,
        env=NAMED,
    ),
    Scenario(
        name="output_notebook outside a notebook",
        code=PRINT.format("output_notebook=True"),
        files=TABLE,
        env=NAMED,
    ),
    Scenario(
        name="a table of devices 4 and 7",
        code=PRINT.format(""),
        files={"rank_table.json": table_v1(4, 7)},
        env=NAMED,
    ),
    Scenario(
        name="init_rank_table with a v0.1 table",
        code="print('table', bool(init_rank_table()))\n" + PRINT.format(""),
        files={"config/jobstart_hccl.json": table_v0(0, 1)},
        env={
            "RANK_TABLE_FILE": "{here}/config",
            "MA_HOME": "{here}",
            "BATCH_TASK_CURRENT_INSTANCE": "job0",
        },
    ),
    Scenario(
        name="init_rank_table without a table",
        code="print('returned', init_rank_table())",
        env={"RANK_TABLE_FILE": "{here}/nowhere"},
    ),
    Scenario(
        name="ModelArts' variables",
        code=PRINT.format(""),
        files=TABLE,
        env=NAMED
        | {
            "BATCH_JOB_ID": "job-a1b2",
            "MA_CURRENT_HOST_IP": "10.0.0.1",
            "MA_RUN_MODE_ENV": "normal",
        },
    ),
    Scenario(
        name="set_random_ms_cache_dir",
        code="with set_random_ms_cache_dir():\n    set_inside = 'MS_COMPILER_CACHE_PATH' in os.environ\n"
        "print('returned', set_inside, 'MS_COMPILER_CACHE_PATH' in os.environ)",
    ),
    Scenario(
        name="a command that is not there",
        code=CATCH.format("start_and_wait_distributed_train(['no-such-command'])"),
        files=TABLE,
        env=NAMED,
    ),
    Scenario(
        name="a table that is not there",
        code=CATCH.format("start_and_wait_distributed_train(COMMAND)"),
        env=NAMED,
    ),
    Scenario(
        name="neither table nor number",
        code=CATCH.format("start_and_wait_distributed_train(COMMAND)"),
    ),
]
_SHELL = ("PWD", "SHLVL", "_")
_OURS = re.compile(r"^(DAVINCIRUN|PYTHON)")


def run(scenario: Scenario, python: str, folder: Path) -> Seen:
    """Run a scenario with one of the packages.

    Args:
        scenario: What to run.
        python: An interpreter that has the package.
        folder: An empty folder.
    """
    for name, text in {"worker.py": WORKER, "script.py": HEAD + scenario.code, **scenario.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    before = set(folder.rglob("*"))
    inherited = {"PATH": os.environ["PATH"], "HOME": str(folder), "PLACE": str(folder), "LANG": "C.UTF-8"}
    inherited |= {name: value.replace("{here}", str(folder)) for name, value in scenario.env.items()}
    done = subprocess.run(
        [python, "script.py"],
        cwd=folder,
        env=inherited,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    workers = {
        path.stem.removeprefix("env-"): json.loads(path.read_text()) for path in folder.glob("env-*.json")
    }
    made = sorted(
        _plain(str(path.relative_to(folder)))
        for path in folder.rglob("*")
        if path not in before and not path.name.startswith("env-") and "__pycache__" not in path.parts
    )
    logs = {
        _plain(path.name): path.read_text(errors="replace")
        for path in folder.rglob("*-proc-rank-*.txt")
        if path.is_file()
    }
    said = [line for line in done.stdout.splitlines() if line.startswith(("returned", "raised", "table"))]
    return Seen(
        returned=" ".join(said) or _last(done.stderr),
        exit_code=done.returncode,
        stdout=sorted(line for line in done.stdout.splitlines() if "hello" in line),
        files=made,
        logs=logs,
        env={
            rank: {
                name: _value(value, folder)
                for name, value in sorted(env.items())
                if inherited.get(name) != value and not _OURS.match(name) and name not in _SHELL
            }
            for rank, (env, _) in sorted(workers.items())
        },
        cwd={
            rank: os.path.relpath(os.path.realpath(cwd), os.path.realpath(folder))
            for rank, (_, cwd) in sorted(workers.items())
        },
    )


def cleared(folder: Path) -> Path:
    """An empty folder of that name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"raised {lines[-1].partition(':')[0].rpartition('.')[2]}" if lines else "nothing"


def _plain(name: str) -> str:
    host = os.uname().nodename
    return name.replace(host, "HOST")


def _value(value: str, folder: Path) -> str:
    value = value.replace(str(folder), "HERE").replace(os.uname().nodename, "HOST")
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|davincirun-[a-z0-9_]{6,}", "UNIQUE", value)
