"""`--engine ssh` over hosts of their own with a real sshd on each: jobs, refusals, and links that end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import is_alive, wait_until
from ssh_hosts import SshHosts, ssh_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]

WORKER = str(Path(__file__).parent / "programs" / "worker.py")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path) as made:
        yield made


def run(words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=90, check=False, env={**os.environ, **env}
    )


@contextmanager
def running(
    hosts: SshHosts, *options: str, ranks: int, worker: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a job and wait until all its ranks are ready."""
    driver = subprocess.Popen(
        hosts.launch(*options, WORKER, *worker),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: logs(hosts).count("ready rank") == ranks, 40, "all ranks are ready")
        yield driver
    finally:
        driver.kill()
        driver.communicate()


def logs(hosts: SshHosts) -> str:
    paths = sorted((hosts.folder / "log").glob("*-proc-rank-*.txt"))
    return "\n".join(path.read_text() for path in paths)


def left(hosts: SshHosts) -> list[str]:
    """Processes of ours on hosts that are up."""
    found = []
    for host in hosts.hosts:
        if host.process is not None and host.process.poll() is None:
            pids = [*host.running("davincirunsdk"), *host.running("worker.py")]
            found += [f"{host.name}: {pid}" for pid in pids if is_alive(pid)]
    return found


def test_logs_are_brought_from_hosts_with_disks_of_their_own(hosts: SshHosts) -> None:
    """After a failure the driver's folder has every rank's log, in which `--explain` finds the cause."""
    log, ready = hosts.folder / "log", hosts.folder / "ready"
    log.mkdir()
    ready.mkdir()
    for host in hosts.hosts:
        subprocess.run(host.command("mount", "-t", "tmpfs", "none", str(log)), check=True)
    command = [WORKER, "--fail", "1:9", "--when-ready", str(ready)]
    done = run(hosts.launch("--nproc-per-node", "1", "--collect-logs", *command))
    assert done.returncode == 9, done.stderr
    assert f"were brought to {log}" in done.stderr, done.stderr
    assert sorted(re.findall(r"ready rank (\d)", logs(hosts))) == ["0", "1", "2"], logs(hosts)
    explained = run([sys.executable, "-m", "davincirunsdk", "--explain", str(log)])
    assert "rank 1" in explained.stdout, explained


def test_nodes_make_one_rank_table_and_leave_nothing(tmp_path: Path) -> None:
    """Hosts that know their NPUs' addresses start from one table, in the order of their server ids."""
    code = (
        "import json,os,sys;"
        "table=json.load(open(os.environ['RANK_TABLE_FILE']));"
        "rows=[(s['server_id'],d['device_ip'],d['rank_id']) for s in table['server_list']"
        " for d in s['device']];"
        "sys.stdout.write(f\"{os.environ['RANK_ID']} {os.environ['DEVICE_ID']} {rows}\\n\")"
    )
    with ssh_hosts(tmp_path, devices=2) as hosts:
        done = run(hosts.launch(sys.executable, "-c", code, hosts="h3,h1,h2"))
        assert done.returncode == 0, done.stderr
        said = re.findall(r"^\[node \d rank \d\] (\d) (\d) (.*)$", done.stdout, re.MULTILINE)
        assert sorted((rank, device) for rank, device, _ in said) == [
            (str(rank), str(rank % 2)) for rank in range(6)
        ]
        rows = [
            (f"10.78.0.{host}", f"192.168.{host}.{device + 1}", str((host - 1) * 2 + device))
            for host in (1, 2, 3)
            for device in (0, 1)
        ]
        assert {table for _, _, table in said} == {str(rows)}
        assert not left(hosts)
        job = os.uname().nodename
        names = sorted(path.name for path in (tmp_path / "log").glob("*-*"))
        assert names == sorted(
            [f"{job}-proc-rank-{rank}-device-{rank % 2}.txt" for rank in range(6)]
            + [f"{job}-{place}-events.jsonl" for place in ("node-0", "node-1", "node-2", "nodes")]
        )
        events = (tmp_path / "log" / f"{job}-nodes-events.jsonl").read_text()
        assert [json.loads(line)["kind"] for line in events.splitlines()][-1] == "finished"


def test_a_failure_ends_all_hosts_with_its_own_code(hosts: SshHosts, tmp_path: Path) -> None:
    """All others get SIGTERM, the report names rank and host, the exit code is the rank's."""
    ready = tmp_path / "ready"
    ready.mkdir()
    done = run(hosts.launch("--nproc-per-node", "2", WORKER, "--fail", "3:7", "--when-ready", str(ready)))
    assert done.returncode == 7, done.stderr
    assert "rank 3 is the root cause, exit code 7" in done.stderr
    assert "node h2" in done.stderr
    assert logs(hosts).count("saved on SIGTERM") == 5
    assert not left(hosts)


def test_what_goes_over_and_how(hosts: SshHosts) -> None:
    """Training variables and PATH go to the workers through the agent's input; others do not go at all."""
    code = (
        "import os;[print(f'{name}={os.environ[name]}.') for name in sorted(os.environ) if 'TEST9' in name]"
    )
    job = hosts.launch("--nproc-per-node", "1", sys.executable, "-c", f"import time;{code};time.sleep(2)")
    with subprocess.Popen(
        job,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "HCCL_TEST9": "s3cret",
            "TEST9_OTHER": "s3cret",
            "PATH": f"/TEST9:{os.environ['PATH']}",
        },
    ) as driver:
        wait_until(lambda: "HCCL_TEST9=s3cret." in logs(hosts), 40, "the worker has said its variables")
        for host in hosts.hosts:
            for pid in host.pids():
                assert "s3cret" not in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        driver.communicate(timeout=30)
    assert "OTHER" not in logs(hosts)
    named = hosts.launch("--nproc-per-node", "1", "--env", "TEST9_OTHER", "--env", "TEST9_NEW=1")
    done = run([*named, "sh", "-c", "echo $TEST9_OTHER$TEST9_NEW."], TEST9_OTHER="value")
    assert done.stdout.count("value1.") == 3, done.stderr
    done = run(
        hosts.launch("--nproc-per-node", "1", "sh", "-c", "echo PATH=$PATH"),
        PATH=f"/TEST9:{os.environ['PATH']}",
    )
    assert done.stdout.count("PATH=/TEST9:") == 3


def test_every_host_that_cannot_be_reached_has_its_line(tmp_path: Path) -> None:
    """Unknown key, changed key, no permission, no sshd, no route, no name, silence: all said in one go."""
    with ssh_hosts(tmp_path, 7) as hosts:
        known = tmp_path / "known"
        key = known.read_text().split()[1:]
        other = tmp_path / "other_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
        changed = other.with_suffix(".pub").read_text().split()[:2]
        good = ",".join(f"10.78.0.{number}" for number in (3, 4, 5, 6, 7))
        known.write_text(f"{good} {' '.join(key)}\n10.78.0.2 {' '.join(changed)}\n")
        (hosts.hosts[2].folder / "authorized").write_text("")
        hosts.hosts[3].signal_sshd(signal.SIGTERM)
        hosts.hosts[4].cut()
        hosts.hosts[5].signal_sshd(signal.SIGSTOP)
        job = hosts.launch("--nproc-per-node", "1", "true", hosts="h[1-7],h8")
        job[job.index("--ssh") + 1] += " -oConnectTimeout=4"
        done = run(job)
        hosts.hosts[5].signal_sshd(signal.SIGCONT)
        assert done.returncode == 3, done.stderr
        assert "7 of 8 hosts cannot be used" in done.stderr
        for host, words in {
            "h1": ("the key of the host is not known", "accept it once: `ssh"),
            "h2": ("the key of the host is not the one that is known", "ssh-keygen -R h2"),
            "h3": ("no permission to log in", "ssh-copy-id h3"),
            "h4": ("no sshd listens there", "--ssh 'ssh -p PORT'"),
            "h5": ("no route to the host", "look whether it is up"),
            "h6": ("timed out", "look whether the host is up"),
            "h8": ("the name of the host is not known", "look at its spelling"),
        }.items():
            (line,) = [line for line in done.stderr.splitlines() if f"  {host}: " in line]
            assert all(word in line for word in words), line
        assert not left(hosts)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("none", "no python: {python} cannot be run there"),
        ("bare", "davincirunsdk is not installed there"),
        ("older", "another version of davincirunsdk is installed there"),
        ("newer", "found davincirunsdk 99.9 there"),
        ("silent", "the agent ended with code 5 before its first word: I have had enough"),
    ],
)
def test_a_python_that_will_not_do_is_described(tmp_path: Path, kind: str, said: str) -> None:
    """No such Python, one without the package, with an older or newer one, one that ends: nothing starts."""
    python = tmp_path / "python"
    (tmp_path / "old" / "davincirunsdk" / "engines").mkdir(parents=True)
    for folder in ("davincirunsdk", "davincirunsdk/engines"):
        (tmp_path / "old" / folder / "__init__.py").touch()
    lines = {
        "bare": f'exec {sys.executable} -I -S "$@"',
        "older": f'PYTHONPATH={tmp_path}/old exec {sys.executable} -S "$@"',
        "newer": f'exec {sys.executable} -c \'import sys, davincirunsdk; davincirunsdk.__version__ = "99.9"\n'
        'from davincirunsdk.engines.ssh_agent import main; main(sys.argv[3])\' "$@"',
        "silent": "echo I have had enough >&2; exit 5",
    }
    if kind in lines:
        python.write_text(f"#!/bin/sh\n{lines[kind]}\n")
        python.chmod(0o755)
    with ssh_hosts(tmp_path, 1) as hosts:
        done = run(hosts.launch("--nproc-per-node", "1", "--remote-python", str(python), "true"))
        assert done.returncode == 3, done.stderr
        assert f"host h1: {said.format(python=python)}" in done.stderr, done.stderr
        assert not left(hosts)


def test_noise_before_the_first_word_does_no_harm(hosts: SshHosts, tmp_path: Path) -> None:
    """Banners, a prompt without an end of line, what looks like the first word: the job runs."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho Welcome; echo "$3"; echo 0123 is here: davincirunsdk 1.0; head -c 300000 /dev/zero\n'
        f"printf '(base) '; exec {sys.executable} \"$@\"\n"
    )
    python.chmod(0o755)
    done = run(
        hosts.launch("--nproc-per-node", "1", "--remote-python", str(python), WORKER, "--seconds", "0")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ready rank") == 3


def test_what_a_host_lacks_is_said_before_anything_starts(tmp_path: Path) -> None:
    """The work folder, devices as many as asked for, devices that nobody else holds."""
    folder = tmp_path / "work"
    folder.mkdir()
    with ssh_hosts(
        tmp_path, 2, devices=2, more=f"[ $(hostname) = h1 ] || mount -t tmpfs none {folder}"
    ) as hosts:
        (folder / "here").mkdir()
        done = run(hosts.launch("--work-dir", str(folder / "here"), "true"))
        assert done.returncode == 3, done.stderr
        assert f"  h2: found no folder {folder}/here" in done.stderr
        assert "  h1: " not in done.stderr
        done = run(hosts.launch("--nproc-per-node", "4", "true"))
        assert done.returncode == 3, done.stderr
        assert "2 of 2 hosts cannot be used" in done.stderr
        assert done.stderr.count("found 2 NPUs on node") == 2
        with subprocess.Popen(
            hosts.hosts[1].command("sh", "-c", "exec 3</dev/davinci1; echo; exec sleep 600"),
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            done = run(hosts.launch("true"))
            assert done.returncode == 3, done.stderr
            (line,) = [line for line in done.stderr.splitlines() if "  h2: " in line]
            assert "/dev/davinci1" in line
            assert "sleep" in line
            assert run(hosts.launch("--nproc-per-node", "1", "true")).returncode == 0
            for pid in hosts.hosts[1].running("sleep 600"):
                os.kill(pid, signal.SIGKILL)
        assert not left(hosts)


def test_ctrl_c_reaches_every_rank_once(hosts: SshHosts) -> None:
    """SIGINT to the driver's whole group, as a terminal sends it: one SIGTERM to each rank, exit code 130."""
    with running(hosts, "--nproc-per-node", "2", ranks=6) as driver:
        os.killpg(driver.pid, signal.SIGINT)
        _, stderr = driver.communicate(timeout=30)
        assert driver.returncode == 130, stderr
        assert logs(hosts).count("saved on SIGTERM") == 6
        assert not left(hosts)


def test_daemons_without_a_trace_are_ended(hosts: SshHosts) -> None:
    """What forks twice, leaves its session and forgets its environment comes to the agent and is ended."""
    daemon = "import os,time;os.fork() and os._exit(0);os.setsid();os.fork() and os._exit(0);time.sleep(600)"
    code = (
        f"import subprocess,sys;subprocess.run([sys.executable,'-c','{daemon}'],env={{}},"
        "stdin=-3,stdout=-3,stderr=-3);sys.stdout.write('daemon\\n')"
    )
    done = run(hosts.launch("--nproc-per-node", "1", sys.executable, "-c", code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("daemon") == 3
    assert not [pid for host in hosts.hosts for pid in host.running("time.sleep(600)")]


def test_signals_are_passed_on(hosts: SshHosts) -> None:
    """SIGUSR1 to the driver reaches the ranks of every host."""
    with running(hosts, "--nproc-per-node", "1", ranks=3) as driver:
        os.kill(driver.pid, signal.SIGUSR1)
        wait_until(lambda: logs(hosts).count("saved on SIGUSR1") == 3, what="all ranks have saved")


BLOCKING = """
from davincirunsdk.engines import ssh
result = ssh.run_blocking(**arguments)
"""
AWAITED = """
import asyncio, uvloop
from davincirunsdk.engines import ssh
async def main():
    async with ssh.manager(**arguments) as job:
        lines = [line async for line in job.logs()]
        assert sum("ready rank" in line.text for line in lines) == 3, lines
        return await job.wait()
result = uvloop.run(main())
"""


@pytest.mark.parametrize("program", [BLOCKING, AWAITED], ids=["blocking", "uvloop"])
def test_from_python(hosts: SshHosts, program: str) -> None:
    """The blocking call and the manager, in a loop of another kind, too."""
    arguments = {
        "command": [sys.executable, WORKER, "--seconds", "1"],
        "log_dir": str(hosts.folder / "log"),
        "hosts": ["h1", "h[2-3]:1"],
        "ssh": hosts.ssh,
    }
    code = (
        f"arguments = {arguments!r}\n{program}\nassert len(result.workers) == 3\nassert result.exit_code == 0"
    )
    done = run(hosts.on(sys.executable, "-c", code))
    assert done.returncode == 0, done.stderr
    assert not left(hosts)


def test_sixteen_hosts_at_once(tmp_path: Path) -> None:
    """A range of hosts in a host file, one rank on each."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# all of them\nh[1-16] slots=1\n")
    with ssh_hosts(tmp_path, 16) as hosts:
        done = run(hosts.launch("--hostfile", str(hostfile), WORKER, "--seconds", "0", hosts=""))
        assert done.returncode == 0, done.stderr
        assert {int(rank) for rank in re.findall(r"ready rank (\d+) of 16", done.stdout)} == set(range(16))
        assert not left(hosts)


def ssh_clients(hosts: SshHosts) -> dict[str, int]:
    """The driver's ssh processes by host."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"ssh" and str(hosts.folder).encode() in words[2] and b"--" in words:
            found[words[words.index(b"--") + 1].decode()] = int(path.parent.name)
    return found


@pytest.mark.parametrize("end", ["driver", "client", "agent", "session", "power", "cable"])
def test_the_end_of_a_link_ends_both_sides(hosts: SshHosts, end: str) -> None:
    """Whoever is killed or cut off: no host that is up keeps anything, and the driver names the lost one."""
    with running(
        hosts, "--nproc-per-node", "2", "--lost-after", "3", "--grace-period", "5", ranks=6
    ) as driver:
        lost = hosts.hosts[1]
        began = time.monotonic()
        if end == "driver":
            driver.kill()
        elif end == "client":
            os.kill(ssh_clients(hosts)["h2"], signal.SIGKILL)
        elif end == "agent":
            (agent, *_) = lost.running("ssh_agent")
            os.kill(agent, signal.SIGKILL)
        elif end == "session":
            for pid in lost.running("sshd: root"):
                os.kill(pid, signal.SIGKILL)
        elif end == "power":
            lost.power_off()
        else:
            lost.cut()
        wait_until(lambda: not left(hosts), 20, "nothing of the job is left on any host")
        assert time.monotonic() - began < 3 + 5 + 5 + 3
        _, stderr = driver.communicate(timeout=30)
        assert not ssh_clients(hosts)
        # Also those of an agent that was killed: its guardian keeps their last words.
        assert logs(hosts).count("saved on SIGTERM") == (4 if end == "power" else 6)
        if end != "driver":
            assert driver.returncode == 1, stderr
            assert re.search(r"node 1 is the root cause|node 1 .*lost", stderr), stderr
            assert "h2" in stderr


def test_deaf_workers_of_a_host_that_is_cut_off_are_killed(hosts: SshHosts) -> None:
    """On both sides of the cut, when their grace period is over."""
    options = ("--nproc-per-node", "1", "--lost-after", "3", "--grace-period", "2")
    with running(hosts, *options, ranks=3, worker=("--deaf",)) as driver:
        began = time.monotonic()
        hosts.hosts[1].cut()
        wait_until(lambda: not left(hosts), 20, "nothing of the job is left on any host")
        assert time.monotonic() - began < 3 + 2 + 5 + 3
        _, stderr = driver.communicate(timeout=30)
        assert driver.returncode == 1, stderr
        assert "node 1 is the root cause" in stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_who_is_stopped_while_a_host_is_awaited_leaves_nothing(
    hosts: SshHosts, number: signal.Signals, code: int
) -> None:
    """The agents that have answered end, and so does the ssh that waits."""
    hosts.hosts[1].signal_sshd(signal.SIGSTOP)
    with subprocess.Popen(
        hosts.launch("--nproc-per-node", "1", WORKER),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stderr is not None
        assert "waiting for" in driver.stderr.readline()
        wait_until(lambda: len(left(hosts)) >= 2, 40, "two agents run")
        driver.send_signal(number)
        driver.communicate(timeout=30)
    assert driver.returncode == code
    wait_until(lambda: not left(hosts) and not ssh_clients(hosts), 20, "nothing is left")
    hosts.hosts[1].signal_sshd(signal.SIGCONT)


def test_a_cable_out_for_a_moment_and_a_new_sshd_do_no_harm(hosts: SshHosts) -> None:
    """Three seconds without a cable, and an sshd that is started again: the job goes on to its end."""
    with running(hosts, "--nproc-per-node", "1", "--lost-after", "20", ranks=3) as driver:
        hosts.hosts[0].restart_sshd()
        hosts.hosts[1].cut()
        time.sleep(3)  # the fault itself: a cable that is out for so long
        hosts.hosts[1].mend()
        assert run(hosts.launch("--nproc-per-node", "1", "true", hosts="h1")).returncode == 0
        os.kill(driver.pid, signal.SIGUSR1)
        wait_until(lambda: logs(hosts).count("saved on SIGUSR1") == 3, what="all ranks have saved")
        assert "saved on SIGTERM" not in logs(hosts)
        assert driver.poll() is None
