"""README's command lines run, and print what it shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

README = (Path(__file__).parents[2] / "README.md").read_text()
CONSOLES = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
LINES = [
    re.sub(r"\s+# .*", "", line).replace("\\\n", "")
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
BESIDE = Path(sys.executable).parent

TRAIN = re.search(r"\$ cat train.py\n(.*?)\$ ", README, re.DOTALL)
WRONG_TABLE = {
    "version": "1.0",
    "status": "completed",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "192.168.0.1",
            "device": [
                {"device_id": str(device), "device_ip": f"192.168.1.{device + 1}", "rank_id": "0"}
                for device in range(2)
            ],
        }
    ],
}
MAKE_DEV = """
set -e
mkdir dev
mount -t tmpfs none dev
cp -a /dev/null /dev/zero /dev/urandom dev
mkdir dev/shm dev/pts
ln -s /proc/self/fd dev/fd
for card in 0 1 2 3 4 5 6 7; do touch dev/davinci$card; done
mount --bind dev /dev
exec sh -c "$1"
"""

pytestmark = pytest.mark.timeout(150)
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def place(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with README's script, whose commands are those of this Python."""
    assert TRAIN is not None
    (job_folder / "train.py").write_text(TRAIN[1])
    (job_folder / "hccl.json").write_text(json.dumps(WRONG_TABLE))
    monkeypatch.setenv("PATH", f"{BESIDE}:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return job_folder


def run(line: str) -> subprocess.CompletedProcess[str]:
    """Run one line in a shell; errors stand where they come, as on a terminal."""
    return subprocess.run(
        line,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def pattern(line: str, place: Path) -> str:
    """What a line of README stands for: times, pids and names of its machine differ from ours."""
    line = line.replace("/home/me", str(place)).replace("atlas01", os.uname().nodename)
    text = re.sub(r"\d+\\\.\d\\ s\b", r"\\d+\\.\\d s", re.escape(line))
    text = re.sub(r"pid\\ \d+", r"pid \\d+", text)
    # Which of equal ranks is shown, where not all are, is chance.
    return re.sub(r"^\\\[rank\\ \d", r"\\[rank \\d", text)


@contextmanager
def service(place: Path) -> Iterator[str]:
    """README's service on a port of its own; gives its address."""
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Starlette" in block
    )
    (place / "service.py").write_text(code)
    address = "127.0.0.1", free_port()
    (start,) = re.findall(r"`(uvicorn [^`]+)`", README)
    words = [sys.executable, "-m", *start.split(), "--port", str(address[1]), "--log-level", "error"]
    with subprocess.Popen(words) as server:
        try:
            wait_until(lambda: _answers(address), timeout=30)
            yield f"{address[0]}:{address[1]}"
        finally:
            server.send_signal(signal.SIGINT)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(address: tuple[str, int]) -> bool:
    with socket.socket() as client:
        return client.connect_ex(address) == 0


@pytest.mark.parametrize("console", CONSOLES, ids=lambda text: text.split("\n")[0][2:40])
def test_what_is_shown_is_what_is_printed(console: str, place: Path) -> None:
    """Every line that README shows is printed, and, without `...`, no other."""
    if "curl" in console:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        with service(place) as address:
            compare(console.replace("localhost:8000", address).replace("curl", "curl -s"), place)
    else:
        compare(console, place)


@needs_curl
def test_open_readers_do_not_hold_the_end_of_the_service(place: Path) -> None:
    """A job that still runs is stopped with it, though somebody still reads what it says."""
    (place / "slow.py").write_text("import time\nprint('here I am', flush=True)\ntime.sleep(600)\n")
    with service(place) as address:
        order = json.dumps({"command": ["python", "slow.py"]})
        assert '"job":"0"' in run(f"curl -s -d {shlex.quote(order)} {address}/start").stdout
        words = ["curl", "-s", "-N", f"{address}/log/0"]
        reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        assert "here I am" in reader.stdout.readline()
    with reader:
        assert "here I am" in reader.stdout.read()


def compare(console: str, place: Path) -> None:
    """Run the commands of one block."""
    # Another job of these tests may have README's port.
    console = console.replace("29500", str(free_port())).replace("\\\n", "")
    for part in console.removeprefix("$ ").split("\n$ "):
        command, *shown = part.rstrip("\n").split("\n")
        printed = run(command).stdout.splitlines()
        for line in shown:
            if line != "...":
                assert any(re.fullmatch(pattern(line, place), one) for one in printed), (line, printed)
        assert "..." in shown or len(printed) == len(shown), printed


def test_a_script_on_a_host_with_npus(place: Path) -> None:
    """Rank tables are made and read, and some of the NPUs are chosen, on a host of eight."""
    if os.geteuid():
        pytest.skip("a /dev of one's own needs root")
    lines = [line for line in LINES if line.startswith("davincirun ") and line.endswith((" train.py", " 3"))]
    lines = [line for line in lines if not re.search("engine|manifest|nnodes", line)]
    assert len(lines) == 5
    (make,) = (line for line in LINES if line.startswith("hccl-ranktable make"))
    assert make.endswith(next(line for line in lines if "--rank-table" in line).split()[2])
    # Cards may be held by other tests of this machine.
    script = "\n".join(
        ["export DAVINCIRUN_WAIT_DEVICES=60", make, *(f"{line}; echo ended: $?" for line in lines)]
    )
    said = run(f"unshare --mount sh -c {shlex.quote(MAKE_DEV)} sh {shlex.quote(script)}").stdout
    # No NPU says here what it is near to.
    unbound = said.count("found no way to bind by node")
    assert said.count("ended: 0") == len(lines) - unbound, said
    assert unbound <= 1
    assert said.count("8 workers succeeded") == 4


def test_two_nodes_by_hand(place: Path) -> None:
    """Both lines of the example, on the loopback of one machine, make one job."""
    port = free_port()
    lines = [line for line in LINES if "--node-rank" in line]
    assert len(lines) == 2
    lines = [line.replace("192.168.0.1", "127.0.0.1").replace("29500", str(port)) for line in lines]
    script = "".join(f"{line} & " for line in lines)
    said = run(f"export DAVINCIRUN_NPROC_PER_NODE=2; {script} wait").stdout
    assert said.count("2 workers succeeded") == 2
    assert {line[:8] for line in said.splitlines() if line.startswith("[rank")} == {
        f"[rank {n}]" for n in range(4)
    }


def test_hosts_over_ssh(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lines, with a client that runs here what it is to run there; session netns has real hosts."""
    (place / "bin").mkdir()
    client = place / "bin" / "ssh"
    client.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    (place / "hosts.txt").write_text("atlas01 slots=2\natlas02 slots=2\n")
    lines = [line for line in LINES if "--engine ssh" in line]
    assert len(lines) == 2
    said = [run(line).stdout for line in lines]
    assert "32 workers succeeded" in said[0]
    assert "4 workers succeeded" in said[1]


@pytest.mark.parametrize("line", [line for line in LINES if "--manifest" in line])
def test_manifests(line: str, place: Path) -> None:
    """Each is printed whole: JSON, or a batch file."""
    command = line.partition(" | ")[0].partition(" > ")[0]
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=True)
    if "slurm" in line:
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, timeout=60, check=True)
    else:
        assert json.loads(done.stdout)["kind"]


def test_rank_tables(place: Path) -> None:
    """Each command does what its remark says, with tables of two hosts."""
    lines = [line for line in LINES if line.startswith("hccl-ranktable") and " make" not in line]
    assert len(lines) == 4
    good = json.loads(json.dumps(WRONG_TABLE))
    good["server_list"][0]["device"][1]["rank_id"] = "1"
    for name in ("hccl", "old", "a"):
        (place / f"{name}.json").write_text(json.dumps(good))
    other = good["server_list"][0]
    other["server_id"] = "192.168.0.2"
    for device in other["device"]:
        device["device_ip"] = device["device_ip"].replace("192.168.1", "192.168.2")
    (place / "b.json").write_text(json.dumps(good))
    for line in lines:
        done = run(line)
        assert done.returncode == 0, done.stdout
    assert json.loads((place / "new.json").read_text())["status"] == "completed"


def test_davincirunctl(place: Path) -> None:
    """Each line, on a job that runs, and on its log folder."""
    lines = [line for line in LINES if line.startswith("davincirunctl")]
    assert len(lines) == 7
    (place / "slow.py").write_text("import time\nprint('here I am', flush=True)\ntime.sleep(600)\n")
    name = f"readme-{os.getpid()}"
    assert run(f"davincirun --detach --name {name} --nproc-per-node 2 slow.py").returncode == 0
    stopped = time.monotonic() + 60
    for line in lines:
        words = shlex.split(line.replace("JOB", name).replace("LOGDIR", "log"))
        if "-f" in words:
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
                assert tail.stdout is not None
                assert "here I am" in tail.stdout.readline()
                tail.terminate()
            continue
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or "doctor" in words, (line, done.stderr)
        assert "list" not in words or name in done.stdout
        if "stop" in words:
            wait_until(
                lambda: name not in run("davincirunctl list").stdout, timeout=stopped - time.monotonic()
            )
    assert (place / "run.html").is_file()
    assert list(place.glob("*-bundle.tar.gz"))
