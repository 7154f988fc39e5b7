"""The doctor, on prepared trees with stub tools, on this machine, and as a command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from davincirunsdk.ctl.doctor import Site, examine, worst
from davincirunsdk.findings import Finding, Level

if TYPE_CHECKING:
    from pathlib import Path

DOCTOR = [sys.executable, "-c", "from davincirunsdk.ctl.main import main; main()", "doctor"]


def node(root: Path, *, npus: int = 2, without: tuple[str, ...] = ()) -> Path:
    """A tree with device files, a driver and tools that answer well."""
    for folder in ("dev/shm", "proc", "usr/local/Ascend/driver/tools", "usr/local/sbin"):
        (root / folder).mkdir(parents=True)
    for name in (*(f"davinci{number}" for number in range(npus)), "davinci_manager", "devmm_svm", "hisi_hdc"):
        if name not in without:
            (root / "dev" / name).touch()
    (root / "usr/local/Ascend/driver/version.info").write_text("Version=24.1.0\n")
    tool(root, "usr/local/sbin/npu-smi", 'echo "  Health Status : OK"; echo "  Error Code : NA"')
    tool(
        root,
        "usr/local/Ascend/driver/tools/hccn_tool",
        'case $3 in -link) echo "link status: UP";; -tls) echo "dev_id:$2, tls switch[0](0:disable)";; esac',
    )
    return root


def tool(root: Path, path: str, script: str) -> None:
    """A stub of one of Ascend's tools."""
    (root / path).write_text(f"#!/bin/sh\n{script}\n")
    (root / path).chmod(0o755)


def of(findings: list[Finding], where: str) -> list[Finding]:
    """The findings of one check."""
    return [finding for finding in findings if finding.where == where]


def looked(root: Path, tmp_path: Path, **env: str) -> list[Finding]:
    """What the doctor finds there."""
    return examine(Site(root=root, env=env, work_dir=tmp_path, log_dir=tmp_path / "log"))


def test_a_good_node(tmp_path: Path) -> None:
    """Devices, health and links of a node with two NPUs are well, and said to be."""
    findings = looked(node(tmp_path / "root"), tmp_path)
    for where in ("devices", "device holders", "health", "links"):
        assert [finding.level for finding in of(findings, where)] == [Level.OK], where
    assert "driver 24.1.0" in of(findings, "versions")[-1].found


@pytest.mark.parametrize(
    ("script", "level", "said"),
    [
        ('echo "Health : Alarm"; echo "Error Code : 80E01801"', Level.FAULT, "Alarm, error code 80E01801"),
        ('echo "Health Status : Warning"', Level.WARNING, "NPU 0: Warning"),
        ("exit 1", Level.WARNING, "no answer"),
    ],
)
def test_an_ill_npu(script: str, level: Level, said: str, tmp_path: Path) -> None:
    """What npu-smi says of an NPU is told with its number; an alarm is a fault."""
    root = node(tmp_path / "root")
    tool(root, "usr/local/sbin/npu-smi", script)
    found = of(looked(root, tmp_path), "health")
    assert len(found) == 2
    assert found[0].level is level
    assert said in found[0].found


def test_links(tmp_path: Path) -> None:
    """A link that is down is named; TLS that is on for one NPU only is a fault, as between nodes."""
    root = node(tmp_path / "root")
    tool(
        root,
        "usr/local/Ascend/driver/tools/hccn_tool",
        '[ $3 = -link ] && { [ $2 = 1 ] && echo "link status: DOWN" || echo "link status: UP"; exit; }\n'
        'echo "dev_id:$2, tls switch[$2](0:disable, 1:enable)"',
    )
    found = of(looked(root, tmp_path), "links")
    assert any("NPU 1: link DOWN" in one.found for one in found)
    assert any(one.level is Level.FAULT and "TLS differs" in one.found for one in found)


@pytest.mark.parametrize("name", ["davinci_manager", "devmm_svm", "hisi_hdc"])
def test_a_device_file_that_was_not_passed_in(name: str, tmp_path: Path) -> None:
    """The files that CANN needs beside the NPUs' own are missed by their names."""
    found = of(looked(node(tmp_path / "root", without=(name,)), tmp_path), "devices")
    assert any(one.level is Level.FAULT and name in one.found for one in found)


def test_a_held_device(tmp_path: Path) -> None:
    """A process that has an NPU open is named with its command."""
    root = node(tmp_path / "root")
    device = str(root / "dev/davinci1")
    source = f"import sys; held = open({device!r}); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (found,) = of(looked(root, tmp_path), "device holders")
        holder.communicate("")
    assert found.level is Level.WARNING
    assert f"process {holder.pid} (" in found.found
    assert found.found.endswith("holds NPU 1")


def test_a_table_for_another_host(tmp_path: Path) -> None:
    """Devices of the table that are not here are named, and so are the table's own faults."""
    path = tmp_path / "table.json"
    rows = [
        {"device_id": str(device), "device_ip": f"192.0.2.{device}", "rank_id": str(rank)}
        for rank, device in enumerate((0, 7))
    ]
    servers = [{"server_id": "10.0.0.1", "device": rows}]
    path.write_text(
        json.dumps({"status": "completed", "version": "1.0", "server_count": "1", "server_list": servers})
    )
    site = Site(root=node(tmp_path / "root"), env={}, work_dir=tmp_path, log_dir=tmp_path, rank_table=path)
    assert any("devices 7 of 10.0.0.1" in one.found for one in of(examine(site), "rank table"))
    path.write_text("{")
    assert worst(of(examine(site), "rank table")) is Level.FAULT


@pytest.mark.parametrize(
    ("packages", "cann", "said"),
    [
        ({"torch": "2.6.0", "torch_npu": "2.5.1"}, "", "torch 2.6.0 beside torch_npu 2.5.1"),
        ({"torch": "2.5.1", "torch_npu": "2.5.1"}, "9.0.0", "torch_npu 2.5.1 beside CANN 9.0.0"),
        ({"mindspore": "2.7.0"}, "9.0.0", "mindspore 2.7.0 beside CANN 9.0.0"),
    ],
)
def test_versions_that_do_not_belong_together(
    packages: dict[str, str], cann: str, said: str, tmp_path: Path
) -> None:
    """A pair that is known not to work is told, with the version that would."""
    root = node(tmp_path / "root")
    (root / "cann").mkdir()
    (root / "cann/version.info").write_text(f"Version={cann}\n" if cann else "")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(packages)}'\n")
    python.chmod(0o755)
    site = Site(
        root=root, env={"ASCEND_HOME_PATH": "/cann"}, work_dir=tmp_path, log_dir=tmp_path, python=str(python)
    )
    found = [one for one in of(examine(site), "versions") if one.level is not Level.OK]
    assert any(said in one.found for one in found), found


def test_ports_that_are_taken(tmp_path: Path) -> None:
    """A port of HCCL's block that somebody holds is named."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (found,) = of(looked(tmp_path, tmp_path, HCCL_IF_BASE_PORT=str(port)), "ports")
    assert found.level is Level.WARNING
    assert f"{port} of HCCL" in found.found


def test_names_that_nobody_knows(tmp_path: Path) -> None:
    """A node's name without an address is a fault that says what to do."""
    findings = looked(tmp_path, tmp_path, MASTER_ADDR="no-such-host.invalid", VC_WORKER_HOSTS="localhost")
    (found,) = of(findings, "names")
    assert found.level is Level.FAULT
    assert "no-such-host.invalid" in found.found
    assert "/etc/hosts" in found.expected


def test_a_check_that_cannot_look_does_not_keep_the_others_from_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sick machine is what is examined: an error in one check is a finding."""
    monkeypatch.setattr(os, "statvfs", lambda path: 1 / 0)
    findings = looked(node(tmp_path / "root"), tmp_path)
    assert any("no answer: ZeroDivisionError" in one.found for one in findings)
    assert of(findings, "devices")


@pytest.mark.parametrize(("npus", "code"), [(0, 1), (2, None)])
def test_the_command_says_it_with_its_exit_code(npus: int, code: int | None, tmp_path: Path) -> None:
    """Each line has a level; the exit code is that of the worst: 0, 1 for warnings, 3 for faults."""
    root = node(tmp_path / "root", npus=npus)
    done = subprocess.run(
        [*DOCTOR, "--root", root, "--work-dir", tmp_path, "--log-dir", tmp_path, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    levels = {line["level"] for line in lines}
    assert done.returncode == (3 if "fault" in levels else 1 if "warning" in levels else 0), done.stderr
    here = {line["level"] for line in lines if line["check"] != "left-over processes"}
    assert code is None or (3 if "fault" in here else 1) == code
    assert all(line["remedy"] for line in lines if line["level"] != "ok")


def test_a_job_is_not_started_on_a_node_with_a_fault(tmp_path: Path) -> None:
    """`--check` looks first: a fault ends with 3, said with its remedy, and nothing is started."""
    command = [sys.executable, "-m", "davincirunsdk", "--check", "--nproc-per-node", "1"]
    words = ["sh", "-c", "touch started"]
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env=os.environ | {"MS_SCHED_HOST": "no-such-host.invalid"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "fault: names: found no address of 'no-such-host.invalid'" in done.stderr
    assert "nothing is started" in done.stderr
    assert not (tmp_path / "started").exists()
