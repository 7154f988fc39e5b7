"""`davincirunctl bundle`: what is in it, what never is, and that it is whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from davincirunsdk.ctl.bundle import Item, write_bundle

if TYPE_CHECKING:
    from pathlib import Path

PY = sys.executable
BUNDLE = [PY, "-c", "from davincirunsdk.ctl.main import main; main()", "bundle"]
SECRET = "s3cr3t-7f9d1c"


def test_names_of_variables_and_no_value(job_folder: Path) -> None:
    """All that helps is in one archive, listed before it is written; no value of a variable is."""
    env = os.environ | {"MY_TOKEN": SECRET, "HOME": str(job_folder)}
    failing = "import sys; print('boom'); sys.exit(4)"
    subprocess.run(
        [PY, "-m", "davincirunsdk", "--nproc-per-node", "2", "--name", "job", PY, "-c", failing],
        env=env, capture_output=True, check=False,
    )  # fmt: skip
    plog = job_folder / "ascend/log/debug/plog/plog-7_1.log"
    plog.parent.mkdir(parents=True)
    plog.write_text("[ERROR] HCCL\n")
    listed = subprocess.run(
        [*BUNDLE, "log", "--dry-run"], env=env, capture_output=True, text=True, check=True
    )
    assert "logs/job-events.jsonl" in listed.stdout
    assert not (job_folder / "job-bundle.tar.gz").exists()
    subprocess.run([*BUNDLE, "log"], env=env, capture_output=True, check=True)
    with tarfile.open(job_folder / "job-bundle.tar.gz") as archive:
        held = {
            member.name.removeprefix("bundle/"): (archive.extractfile(member) or sys.stdin.buffer).read()
            for member in archive.getmembers()
        }
    assert {"report.txt", "doctor.txt", "versions.txt", "plog/debug/plog/plog-7_1.log"} <= {*held}
    assert b"boom" in held["logs/job-proc-rank-0-device-0.txt"]
    assert json.loads(held["report.json"])["exit_code"] == 4
    assert b"MY_TOKEN\n" in held["variables.txt"]
    assert not [name for name, data in held.items() if SECRET.encode() in data]


def test_it_holds_what_is_this_jobs(job_folder: Path) -> None:
    """Logs of this run, its table by whichever way it was named, and what CANN wrote while it ran."""
    table = job_folder / "my table.json"
    device = {"device_id": "0", "device_ip": "192.168.1.6", "rank_id": "0"}
    server = {"server_id": "10.0.0.1", "device": [device], "host_nic_ip": "reserve"}
    whole = {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"}
    table.write_text(json.dumps(whole))
    (job_folder / "mount" / "log").mkdir(parents=True)
    env = os.environ | {
        "HOME": str(job_folder),
        "MA_MOUNT_PATH": str(job_folder / "mount"),
        "PLACE": "over-there",
    }
    plog = "debug/plog/plog-7_1.log"
    old = job_folder / "ascend/log" / plog.replace("7", "6")
    old.parent.mkdir(parents=True)
    old.write_text("of last week\n")
    os.utime(old, (1, 1))
    write_plog = (
        "import os\n"
        f"path = os.environ['ASCEND_PROCESS_LOG_PATH'] + '/{plog}'\n"
        "os.makedirs(os.path.dirname(path))\n"
        "open(path, 'w').write('of this job')\n"
    )
    words = [PY, "-m", "davincirunsdk", "--rank-table", str(table), "--name"]
    for name in ("job", "job", "job-2"):
        source = write_plog if name == "job-2" else ""
        subprocess.run([*words, name, PY, "-c", source], env=env, capture_output=True, check=True)
    (job_folder / "log" / "job-2-stacks-1.txt").touch()
    names = {}
    for job in ("job", "job-2"):
        done = subprocess.run(
            [*BUNDLE, job, "--dry-run"], env=env, capture_output=True, text=True, check=True
        )
        names[job] = {line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    rank = "proc-rank-0-device-0.txt"
    of_all = {"report.json", "report.txt", "doctor.txt", "variables.txt", "versions.txt", "rank_table.json"}
    found = next(name for name in names["job-2"] if name.endswith(plog))
    assert names["job-2"] == {
        *of_all, "logs/job-2-events.jsonl", f"logs/job-2-{rank}", "logs/job-2-stacks-1.txt", found
    }  # fmt: skip
    assert names["job"] - {found} == {*of_all, "logs/job-events.jsonl", f"logs/job-{rank}"}


def test_no_value_is_in_what_the_doctor_found(job_folder: Path) -> None:
    """A node that does not resolve is told of by its variable."""
    env = os.environ | {"MS_SCHED_HOST": f"{SECRET}.example", "VC_WORKER_HOSTS": f"{SECRET}-0.x,{SECRET}-1.x"}
    words = [PY, "-m", "davincirunsdk", "--nproc-per-node", "1", "--name", "job", "true"]
    subprocess.run(words, capture_output=True, check=True)
    subprocess.run([*BUNDLE, "job"], env=env, capture_output=True, check=True)
    with tarfile.open(job_folder / "job-bundle.tar.gz") as archive:
        file = archive.extractfile("bundle/doctor.txt")
        assert file is not None
        found = file.read().decode()
    assert "no address of '$MS_SCHED_HOST'" in found
    assert "no address of '$VC_WORKER_HOSTS'" in found
    assert SECRET not in found


def test_long_logs_are_bounded(tmp_path: Path) -> None:
    """Of a long log begin and end are there, and how much is left out is said."""
    log = tmp_path / "log.txt"
    log.write_bytes(b"begin" + b"x" * (40 << 20) + b"end")
    write_bundle(tmp_path / "b.tar.gz", [Item(name="log.txt", source=log)])
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        file = archive.extractfile("bundle/log.txt")
        assert file is not None
        data = file.read()
    assert data.startswith(b"begin")
    assert data.endswith(b"end")
    assert b"bytes left out" in data
    assert len(data) < (17 << 20)


def test_an_archive_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """No half of it stays."""
    with pytest.raises(OSError, match="Is a directory"):
        write_bundle(tmp_path, [Item(name="a", data=b"x")])
    (tmp_path / "sub").mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system calls it
        write_bundle(tmp_path / "sub" / "none" / "b.tar.gz", [Item(name="a", data=b"x")])
    assert [path.name for path in tmp_path.rglob("*")] == ["sub"]
