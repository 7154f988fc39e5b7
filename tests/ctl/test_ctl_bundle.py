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
