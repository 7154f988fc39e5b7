"""Waiting for a file that somebody else is writing, and writing one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from rank_table_samples import SAMPLES, sample, table

from davincirunsdk.errors import RankTableError, RankTableTimeoutError
from davincirunsdk.rank_table import RankTable, dump, file, parse
from davincirunsdk.rank_table.file import Patience, wait_for, write, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

READY = sample("v1_0_one_host")
INITIALIZING = sample("initializing")
SOON = Patience(limit=20.0, missing=20.0, missing_folder=20.0)


@contextlib.contextmanager
def writing(write_it: Callable[[], None]) -> Iterator[None]:
    """Let another thread write while the test waits, as another program would."""
    thread = threading.Thread(target=write_it)
    thread.start()
    try:
        yield
    finally:
        thread.join()


async def read(path: Path, patience: Patience = SOON) -> tuple[RankTable, float]:
    """Wait for a table; tell how long it took, in seconds."""
    started = time.monotonic()
    found, _ = await wait_for(path, patience=patience)
    return found, time.monotonic() - started


async def test_ready_at_once(tmp_path: Path) -> None:
    """A finished table is read without any waiting, and nobody is told of any."""
    path = tmp_path / "hccl.json"
    path.write_bytes(READY)
    lines: list[str] = []
    found, data = await wait_for(path, patience=SOON, notify=lines.append)
    assert (found.world_size, data, lines) == (8, READY, [])


async def test_in_place_rewrite_in_pieces(tmp_path: Path) -> None:
    """A file that is truncated and written in slow pieces is not taken for broken."""
    path = tmp_path / "hccl.json"
    path.write_bytes(INITIALIZING)

    def write_slowly() -> None:
        time.sleep(0.3)
        with path.open("wb", buffering=0) as target:
            for start in range(0, len(READY), len(READY) // 3):
                target.write(READY[start : start + len(READY) // 3])
                time.sleep(0.2)

    with writing(write_slowly):
        found, _ = await read(path)
    assert found.world_size == 8


async def test_file_that_appears(tmp_path: Path) -> None:
    """A missing file is waited for, also while its folder is missing."""
    path = tmp_path / "config" / "ranktable" / "hccl.json"

    def appear() -> None:
        time.sleep(0.2)
        path.parent.mkdir(parents=True)
        time.sleep(0.2)
        path.write_bytes(INITIALIZING)
        time.sleep(0.2)
        path.write_bytes(READY)

    with writing(appear):
        found, _ = await read(path)
    assert found.world_size == 8


async def test_configmap_swap(tmp_path: Path) -> None:
    """A ConfigMap's swap of the folder behind a symlink is seen, and soon: by the kernel, not the poll."""
    for name, content in (("..v1", INITIALIZING), ("..v2", READY)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hccl.json").write_bytes(content)
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "hccl.json").symlink_to("..data/hccl.json")
    swapped = 0.0

    def swap() -> None:
        nonlocal swapped
        time.sleep(0.5)
        (tmp_path / "..data_tmp").symlink_to("..v2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        swapped = time.monotonic()

    with writing(swap):
        found, _ = await read(tmp_path / "hccl.json")
    assert found.world_size == 8
    assert time.monotonic() - swapped < file.POLL * 0.8


@pytest.mark.parametrize("word", ["completed", "Completed", "COMPLETE", "complete"])
async def test_words_for_complete(tmp_path: Path, word: str) -> None:
    """Official pages have both words, writers any case: each ends the waiting, and HCCL gets its own."""
    path = tmp_path / "hccl.json"
    path.write_bytes(READY.replace(b"completed", word.encode()))
    found, _ = await read(path)
    assert found.as_is is (word == "completed")
    assert '"status":"completed"' in dump(found)


async def test_poll_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel reports nothing, as for a network file system, the poll finds the change."""
    path = tmp_path / "hccl.json"
    path.write_bytes(INITIALIZING)
    monkeypatch.setattr(file, "_watch", file._NoReports)
    monkeypatch.setattr(file, "POLL", 0.2)

    def replace_it() -> None:
        time.sleep(0.3)
        (tmp_path / "new").write_bytes(READY)
        (tmp_path / "new").rename(path)

    with writing(replace_it):
        found, _ = await read(path)
    assert found.world_size == 8


async def test_time_limit(tmp_path: Path) -> None:
    """At the limit the error names file, status, seconds, the hint and how to wait longer."""
    path = tmp_path / "hccl.json"
    path.write_bytes(INITIALIZING)
    lines: list[str] = []
    patience = Patience(limit=0.6, missing=0.6, missing_folder=0.6, hint="Ask the operator.")
    with pytest.raises(RankTableTimeoutError) as caught:
        await wait_for(path, patience=patience, named_by="RANK_TABLE_FILE", notify=lines.append)
    assert str(caught.value) == (
        f"rank table {path} (named by RANK_TABLE_FILE) is not complete after 1 s: its status is "
        '"initializing"; expected a table with status "completed". Ask the operator. To wait longer set '
        "--rank-table-timeout (rank_table_timeout) or DAVINCIRUN_RANK_TABLE_TIMEOUT (seconds)."
    )
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.path == str(path)
    assert lines == [f'waiting for rank table {path}: its status is "initializing" (0 s of 0.6 s)']


async def test_cut_file_is_no_format_error(tmp_path: Path) -> None:
    """A file that stays cut is waited for to the limit, for its writer may only be slow."""
    path = tmp_path / "hccl.json"
    path.write_bytes(READY[:100])
    os.utime(path, (1, 1))
    with pytest.raises(RankTableTimeoutError, match=r"written only in part so far \(text that ends early"):
        await read(path, Patience(limit=0.5, missing=0.5, missing_folder=0.5))


async def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits it says what for, again and again, and how long it has been."""
    monkeypatch.setattr(file, "PROGRESS", 0.3)
    lines: list[str] = []
    with pytest.raises(RankTableTimeoutError):
        await wait_for(
            tmp_path / "hccl.json",
            patience=Patience(limit=1.0, missing=1.0, missing_folder=1.0),
            notify=lines.append,
        )
    assert len(lines) >= 3
    pattern = r"waiting for rank table \S+/hccl\.json: the file does not exist yet \(\d s of 1 s\)"
    assert all(re.fullmatch(pattern, line) for line in lines), lines


@pytest.mark.parametrize("old", [True, False])
async def test_broken_file_is_an_error_soon(tmp_path: Path, old: bool) -> None:
    """Text that no further writing can mend is an error once it stands still, long before the limit."""
    path = tmp_path / "hccl.json"
    path.write_bytes(sample("broken_comma"))
    if old:
        os.utime(path, (1, 1))
    with pytest.raises(RankTableError, match="a comma with nothing after it at line 16, column 20") as caught:
        await read(path)
    assert not isinstance(caught.value, TimeoutError)


async def test_wrong_path_is_an_error_soon(tmp_path: Path) -> None:
    """Where nobody is known to write the file, a missing one is a wrong path, and no time-out."""
    patience = Patience(limit=20.0, missing=0.3, missing_folder=0.0)
    lines: list[str] = []
    for path, words in (
        (tmp_path / "hccl.json", "the file does not exist yet"),
        (tmp_path / "no" / "hccl.json", f"its folder {tmp_path / 'no'} does not exist yet"),
    ):
        with pytest.raises(RankTableError) as caught:
            await wait_for(path, patience=patience, named_by="RANK_TABLE_FILE", notify=lines.append)
        assert str(caught.value) == (
            f"rank table {path} (named by RANK_TABLE_FILE): {words}; expected a file: correct the "
            f"path, or let "
            "it be waited for with --rank-table-timeout (rank_table_timeout) or "
            "DAVINCIRUN_RANK_TABLE_TIMEOUT (seconds)"
        )
        assert not isinstance(caught.value, TimeoutError)
    assert lines == [
        f"waiting for rank table {tmp_path}/hccl.json: the file does not exist yet (0 s of 0.3 s)"
    ]


async def test_folder_in_place_of_the_file(tmp_path: Path) -> None:
    """A folder of the file's name is an error at once."""
    with pytest.raises(RankTableError, match="found a folder; expected a regular file"):
        await read(tmp_path)


async def test_finished_but_wrong(tmp_path: Path) -> None:
    """A finished table with faults is no matter of waiting."""
    path = tmp_path / "hccl.json"
    path.write_bytes(sample("fault_duplicate_address"))
    with pytest.raises(RankTableError) as caught:
        await read(path)
    assert caught.value.where == "server_list[0].device[1].device_ip"


async def test_cancellation_ends_the_waiting(tmp_path: Path) -> None:
    """Cancelled, the waiting ends at once and leaves no open descriptor or thread."""
    descriptors = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.create_task(read(tmp_path / "hccl.json"))
    await asyncio.sleep(0.5)
    started = time.monotonic()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert time.monotonic() - started < 1.0
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("davincirun-rank-table") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_loop_goes_on(tmp_path: Path) -> None:
    """While a table is awaited and read, the event loop is never held up for long."""
    path = tmp_path / "hccl.json"
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - started)

    def appear() -> None:
        time.sleep(0.2)
        path.write_bytes(READY)

    ticking = asyncio.create_task(tick())
    with writing(appear):
        await read(path)
    ticking.cancel()
    assert longest < 0.5


WAIT = """
import asyncio, sys, time
from pathlib import Path
from davincirunsdk.rank_table.file import POLL, Patience, wait_for

async def main():
    path = Path(sys.argv[2])
    waiting = asyncio.create_task(wait_for(path, patience=Patience(limit=20, missing=20, missing_folder=20)))
    await asyncio.sleep(0.5)
    path.write_bytes(Path(sys.argv[3]).read_bytes())
    written = time.monotonic()
    table, _ = await waiting
    soon = time.monotonic() - written < POLL * 0.8
    print(type(asyncio.get_running_loop()).__module__, table.world_size, soon)

make_loop = asyncio.new_event_loop
if sys.argv[1] == "uvloop":
    from uvloop import new_event_loop as make_loop
loop = make_loop()
loop.run_until_complete(main())
loop.close()
"""


@pytest.mark.parametrize(("name", "module"), [("asyncio", "asyncio.unix_events"), ("uvloop", "uvloop")])
def test_both_loops(tmp_path: Path, name: str, module: str) -> None:
    """The kernel's reports end the waiting under asyncio's own loop and uvloop, long before the poll."""
    path = tmp_path / "hccl.json"
    path.write_bytes(INITIALIZING)
    done = subprocess.run(
        [sys.executable, "-c", WAIT, name, path, SAMPLES / "v1_0_one_host.json"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{module} 8 True\n", "")


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    """The target is replaced in one step, is readable for all, and a failed attempt leaves no trace."""
    target = tmp_path / "out.json"
    write(table("v0_1_two_hosts"), target)
    assert parse(target.read_bytes()).world_size == 4
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    before = target.read_bytes()
    with pytest.raises(UnicodeEncodeError):
        write_text("\ud800", target)
    assert target.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.json"]


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Two writers of one target never leave a mixture, and a reader always finds a whole table."""
    target = tmp_path / "out.json"
    tables = [table("v1_0_two_hosts"), table("v1_0_one_host")]
    write(tables[0], target)

    def write_often(which: RankTable) -> None:
        for _ in range(30):
            write(which, target)

    threads = [threading.Thread(target=write_often, args=(which,)) for which in tables]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert parse(target.read_bytes()).world_size in (8, 16)
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path) == ["out.json"]
