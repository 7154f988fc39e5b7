"""Cards and interfaces by the command, on a machine whose /dev is made for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST = 700 + os.getpid() % 1000
"""Number of the first card: no other test of this machine has it."""

MAKE_DEV = """
set -e
mount -t tmpfs none "$DEV"
cp -a /dev/null /dev/zero /dev/urandom "$DEV"
mkdir "$DEV/shm" "$DEV/pts"
ln -s /proc/self/fd "$DEV/fd"
for card in $CARDS; do touch "$DEV/davinci$card"; done
mount --bind "$DEV" /dev
exec "$@"
"""
SHOW = (
    "import os; e = os.environ; names = ('RANK', 'LOCAL_RANK', 'DEVICE_ID', 'ASCEND_RT_VISIBLE_DEVICES', "
    "'HCCL_IF_BASE_PORT'); print(*(e.get(n, '-') for n in names), flush=True)"
)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="a /dev of one's own needs root"),
]


def words(folder: Path, *options: str, program: str = SHOW) -> list[str]:
    """Words of a job that sees four cards."""
    (folder / "dev").mkdir(parents=True, exist_ok=True)
    launch = [sys.executable, "-m", "davincirunsdk", *options, sys.executable, "-c", program]
    return ["unshare", "--mount", "sh", "-c", MAKE_DEV, "sh", *launch]


def environment(folder: Path) -> dict[str, str]:
    """Environment for `words`."""
    cards = " ".join(str(FIRST + number) for number in range(4))
    return {**os.environ, "DEV": str(folder / "dev"), "CARDS": cards, "ASCEND_HOME_PATH": "/opt/cann"}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a job that sees four cards."""
    return subprocess.run(
        words(folder, *options),
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def running(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A job that has begun and goes on until it is told to end."""
    program = f"{SHOW}\nimport time; time.sleep(600)"
    with subprocess.Popen(
        words(folder, *options, program=program),
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("[rank ")
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_two_jobs_of_one_host(tmp_path: Path) -> None:
    """The second job is refused a held card by name, gets others with ports of its own, or waits."""
    first, second = tmp_path / "first", tmp_path / "second"
    half, rest = f"{FIRST}-{FIRST + 1}", f"{FIRST + 2},{FIRST + 3}"
    with running(first, "--name", "early", "--devices", half) as job:
        refused = run(second, "--name", "late")
        assert refused.returncode == 3, refused.stderr
        assert f"found NPU {FIRST} of this node still held by job early (launcher " in refused.stderr
        assert not list((second / "log").glob("*.txt")) if (second / "log").exists() else True
        beside = run(second, "--name", "late", "--devices", rest)
        assert beside.returncode == 0, beside.stderr
        lines = sorted(line.removeprefix("[rank ").split("] ")[1] for line in beside.stdout.splitlines())
        assert [line.split()[:4] for line in lines] == [["0", "0", "0", "2,3"], ["1", "1", "1", "2,3"]]
        assert all(line.split()[4].isdigit() for line in lines), lines
        waiting = subprocess.Popen(
            words(second, "--wait-devices", "60", "--devices", half),
            cwd=second,
            env=environment(second),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with waiting:
            assert waiting.stderr is not None
            assert "held by job early" in waiting.stderr.readline()
            job.terminate()
            output, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 0
        assert output.count("[rank ") == 2


def test_one_card_each(tmp_path: Path) -> None:
    """With --visible one each worker is number 0 on its own card; log files keep the place."""
    done = run(tmp_path, "--visible", "one", "--devices", f"{FIRST + 1},{FIRST + 3}", "--name", "j")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split("] ")[1].split()[:4] for line in done.stdout.splitlines())
    assert lines == [["0", "0", "0", "1"], ["1", "0", "0", "3"]]
    assert sorted(path.name for path in (tmp_path / "log").glob("j-proc-*")) == [
        "j-proc-rank-0-device-0.txt",
        "j-proc-rank-1-device-1.txt",
    ]


@pytest.mark.parametrize("text", ["4-", "x", "7-4", "", "-1"])
def test_what_is_not_a_list_of_devices(tmp_path: Path, text: str) -> None:
    """A list that cannot be read is a usage error that shows one that can."""
    done = run(tmp_path, "--devices", text)
    assert done.returncode == 2
    assert "4-7" in done.stderr
