"""Hosts as users write them, in the forms of mpirun and DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk.engines import ssh
from davincirunsdk.engines.hosts import Host, choose, parse_hosts, read_hostfile
from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from pathlib import Path


def pairs(hosts: tuple[Host, ...]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", None)]),
        ("a,b:8", [("a", None), ("b", 8)]),
        (" a , b ", [("a", None), ("b", None)]),
        ("a b", [("a", None), ("b", None)]),
        ("a,,b,", [("a", None), ("b", None)]),
        ("user@a:4", [("user@a", 4)]),
        ("atlas[01-03]", [("atlas01", None), ("atlas02", None), ("atlas03", None)]),
        ("n[1,3]:2,x", [("n1", 2), ("n3", 2), ("x", None)]),
        ("r[0-1]n[1-2]", [("r0n1", None), ("r0n2", None), ("r1n1", None), ("r1n2", None)]),
        ("u@n[8-10]", [("u@n8", None), ("u@n9", None), ("u@n10", None)]),
        ("10.0.0.[1-2]:8", [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("fd00::1", [("fd00::1", None)]),
        ("[fd00::1]:8,root@[fd00::2]", [("fd00::1", 8), ("root@fd00::2", None)]),
        # As mpirun counts: each time a host is named it has one slot more.
        ("a,a,b", [("a", 2), ("b", 1)]),
        ("a:2,a:3", [("a", 5)]),
    ],
)
def test_lists_are_read(text: str, expected: list[tuple[str, int | None]]) -> None:
    """Slots, users, ranges, addresses and hosts named again."""
    assert pairs(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    "text",
    ["", " , ", "-oProxyCommand=id", "u@-a", "a:0", "a:-1", "a:x", "a:", "a:8:9", "a[1-", "a]1[", "a[3-1]",
     "a[x]", "$(id)", "a;b", "[x:y]:3", "[fd00::1", "@a", "a/b", "a\nb\0", "n[1-99999999]"],
)  # fmt: skip
def test_lists_that_cannot_be_read_say_so(text: str) -> None:
    """Nothing that ssh or a shell could take for something else gets through."""
    with pytest.raises(ValueError, match="expected"):
        parse_hosts(text)


@given(st.text())
def test_no_text_does_harm(text: str) -> None:
    """Any text gives hosts that ssh takes for hosts, or a ValueError."""
    try:
        found = parse_hosts(text)
    except ValueError:
        return
    assert found
    for host in found:
        assert host.name.isprintable()
        assert not host.name.startswith("-")
        assert not set(host.name) & set(" \t;|&$`<>()'\"\\/#")
        assert host.slots is None or host.slots > 0


@given(
    first=st.integers(0, 99),
    count=st.integers(1, 40),
    width=st.integers(1, 4),
    slots=st.none() | st.integers(1, 64),
)
def test_ranges_keep_their_zeros(first: int, count: int, width: int, slots: int | None) -> None:
    """A range stands for each of its numbers, as wide as it is written."""
    text = f"n[{first:0{width}d}-{first + count - 1}]" + (f":{slots}" if slots else "")
    assert pairs(parse_hosts(text)) == [
        (f"n{number:0{max(width, len(str(first)))}d}", slots) for number in range(first, first + count)
    ]


HOSTFILES = {
    "mpirun": (
        "# cluster\na slots=8\nb slots=8 max_slots=16 # busy\n\nc\tslots=4\n",
        [("a", 8), ("b", 8), ("c", 4)],
    ),
    "deepspeed": ("worker-1 slots=16\r\nworker-2 slots=16\r\n", [("worker-1", 16), ("worker-2", 16)]),
    "colons": ("a:8\nb:8\n", [("a", 8), ("b", 8)]),
    "ranges": ("atlas[01-02] slots=8\n", [("atlas01", 8), ("atlas02", 8)]),
    "users": ("a user=me slots=2\nyou@b max-slots=4\n", [("me@a", 2), ("you@b", None)]),
    "repeated": ("a\na\nb\nb\n", [("a", 2), ("b", 2)]),
    "bom": ("\ufeffa\nb", [("a", None), ("b", None)]),
    "old words": ("a cpu=2\nb count=2", [("a", 2), ("b", 2)]),
}


@pytest.mark.parametrize("kind", HOSTFILES)
def test_host_files_are_read(tmp_path: Path, kind: str) -> None:
    """The forms that are in use."""
    text, expected = HOSTFILES[kind]
    (tmp_path / "hosts").write_bytes(text.encode())
    assert pairs(read_hostfile(tmp_path / "hosts")) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a\nb slots=0\n", "line 2"),
        ("a slot=8\n", "'slot=8'"),
        ("a 8\n", "'8'"),
        ("-x slots=8\n", "line 1"),
        ("a slots=\n", "line 1"),
        ("a user=-oProxyCommand\n", "line 1"),
    ],
)
def test_host_files_that_cannot_be_read_name_the_line(tmp_path: Path, text: str, said: str) -> None:
    """The file, the line, what was found and what is expected."""
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected") as caught:
        read_hostfile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_host_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """What cannot be opened is an error of the same kind."""
    with pytest.raises(ValueError, match="No such file"):
        read_hostfile(tmp_path / "none")


def test_slots_settle_the_workers_of_a_node() -> None:
    """All that have slots agree, or the number is given and fits."""
    hosts = parse_hosts("a:8,b:8,c")
    assert choose(hosts, nnodes=None, nproc_per_node=None) == (("a", "b", "c"), 8)
    assert choose(hosts, nnodes=2, nproc_per_node=4) == (("a", "b"), 4)
    assert choose(parse_hosts("a,b"), nnodes=None, nproc_per_node=None) == (("a", "b"), None)
    with pytest.raises(ValueError, match="different slots: 8 on a, 4 on b"):
        choose(parse_hosts("a:8,b:4"), nnodes=None, nproc_per_node=None)
    with pytest.raises(ValueError, match="host b has 4 slots"):
        choose(parse_hosts("a:8,b:4"), nnodes=None, nproc_per_node=8)
    with pytest.raises(ValueError, match="2 hosts are named"):
        choose(parse_hosts("a,b"), nnodes=3, nproc_per_node=None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "ssh"], "--engine ssh needs --hosts or --hostfile"),
        (["--engine", "ssh", "--hosts", "a", "--hostfile", "f"], "found both"),
        (["--engine", "ssh", "--hosts", "a:0"], "at least 1"),
        (["--engine", "ssh", "--hosts", "a", "--nnodes", "2"], "1 hosts are named"),
        (["--engine", "ssh", "--hosts", "a", "--ssh", "ssh '"], "No closing quotation"),
        (["--engine", "ssh", "--hosts", "a", "--node-rank", "0"], "--node-rank has no use with --engine"),
        (["--hosts", "a"], "--hosts has no use without --engine ssh"),
        (["--remote-python", "a"], "--remote-python has no use without --engine ssh"),
        (["--engine", "ssh", "--hosts", "a", "--lost-after", "0.5"], "lost-after"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], said: str) -> None:
    """Before anything is reached: exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", *options, "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_keywords_that_do_not_fit_are_refused() -> None:
    """The Python call refuses the same."""
    with pytest.raises(ValueError, match="neither of hosts and hostfile"):
        ssh.manager(["true"])
    with pytest.raises(ValueError, match="both of hosts and hostfile"):
        ssh.manager(["true"], hosts="a", hostfile="b")
    with pytest.raises(ValueError, match="1 or more"):
        ssh.manager(["true"], hosts=["a", "b:2"], lost_after=0)
    with pytest.raises(TypeError, match="node_rank"):
        ssh.manager(["true"], hosts="a", node_rank=1)  # type: ignore[call-arg] # that is the point


async def test_one_connection_for_each_host_and_few_at_a_time(tmp_path: Path) -> None:
    """No password is asked for, the user's own words stay, and sshd has to take no more than 32 at once."""
    client = tmp_path / "ssh"
    # A write of a line at the end of a file is one piece, also of several processes.
    client.write_text(
        f'#!/bin/sh\necho "+ $*" >>{tmp_path}/calls\nsleep 0.5\necho - >>{tmp_path}/calls\nexit 255\n'
    )
    client.chmod(0o755)
    job = ssh.manager(["true"], log_dir=tmp_path, hosts="n[1-80]", ssh=f"{client} -p 2222")
    with pytest.raises(PlatformError, match="80 of 80 hosts cannot be used"):
        await job.__aenter__()
    open_now, most, calls = 0, 0, []
    for line in (tmp_path / "calls").read_text().splitlines():
        open_now += 1 if line.startswith("+") else -1
        most = max(most, open_now)
        if line.startswith("+"):
            calls.append(line.split())
    assert 8 < most <= 32
    assert sorted(words[words.index("--") + 1] for words in calls) == sorted(f"n{n}" for n in range(1, 81))
    assert all(words[1:3] == ["-p", "2222"] and "-oBatchMode=yes" in words for words in calls)


async def test_an_ssh_that_is_not_there_is_named(tmp_path: Path) -> None:
    """No client: the error says what to install, and nothing is left."""
    job = ssh.manager(["true"], log_dir=tmp_path, hosts="a,b", ssh=str(tmp_path / "ssh"))
    with pytest.raises(PlatformError, match="openssh-client") as caught:
        await job.__aenter__()
    assert str(caught.value).count(str(tmp_path / "ssh")) == 2
