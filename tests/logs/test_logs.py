"""Logs: no byte lost whatever a worker writes, no worker slowed whatever the disk and the readers do."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk import DistributedRuntimeError, FMKManager
from davincirunsdk.logs.events_file import EventLog
from davincirunsdk.logs.file import LogFile
from davincirunsdk.logs.limit import LimitedLogFile
from davincirunsdk.logs.streams import BlockStream, LineCutter, LineStream
from davincirunsdk.types import Event, LogBlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from davincirunsdk import WorkerStatus

PY = sys.executable

pytestmark = pytest.mark.usefixtures("job_folder")


async def run(program: str, workers: int = 1, **arguments: object) -> FMKManager:
    """Run a Python program to its good end."""
    async with FMKManager([PY, "-c", program], nproc_per_node=workers, **arguments) as manager:  # type: ignore[arg-type]
        await manager.wait()
    return manager


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"A\nlast without end",
        b"ok\xff\xfe\x8e end\n" * 100,
        b"\0\0\n\0",
        "训练\U0001f600\n".encode() * 1000,
        b"\r1/200\r2/200\r200/200",
        *(b"x" * size + b"\n" for size in (65535, 65536, 65537, 3_000_000)),
        b"y" * 20_000_000,
    ],
    ids=lambda data: f"{data[:6]!r}x{len(data)}",
)
async def test_the_file_is_what_was_written(written: bytes, job_folder: Path) -> None:
    """Any bytes, any line length, with or without a line end, on both descriptors in order."""
    (job_folder / "bytes").write_bytes(written)
    manager = await run(
        "import os, time\ndata = open('bytes', 'rb').read()\n"
        "for fd in (1, 2):\n    left = memoryview(data)\n    while left: left = left[os.write(fd, left):]"
    )
    assert manager.workers[0].log_path.read_bytes() == written * 2
    assert manager.workers[0].log_bytes == 2 * len(written)


async def test_what_libraries_and_shells_write_is_kept_in_order() -> None:
    """Writes around sys.stdout, by a sub-process and by a crash handler all reach the file."""
    program = (
        "import faulthandler, os, threading\nfaulthandler.enable()\n"
        "os.write(1, b'one\\n')\nos.system('echo two')\n"
        "t = threading.Thread(target=os.write, args=(2, b'three\\n')); t.start(); t.join()\nos.abort()"
    )
    async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
        await asyncio.wait({asyncio.create_task(_ignore_failure(manager))})
    text = manager.workers[0].log_path.read_text()
    assert text.startswith("one\ntwo\nthree\n")
    assert "Fatal Python error: Aborted" in text


async def _ignore_failure(manager: FMKManager) -> None:
    with pytest.raises(RuntimeError):
        await manager.wait()


async def test_workers_that_end_fast_lose_no_line() -> None:
    """32 workers print at full speed and end: files and streams have every line in order."""
    program = "import sys\nsys.stdout.write(''.join(f'{i}\\n' for i in range(1000)))"
    async with FMKManager([PY, "-S", "-E", "-c", program], nproc_per_node=32) as manager:
        lines = [(line.rank, line.text) async for line in manager.logs()]
        await manager.wait()
    expected = [str(i) for i in range(1000)]
    for worker in manager.workers:
        assert worker.log_path.read_text().split() == expected
        assert [text for rank, text in lines if rank == worker.rank] == expected


async def test_last_words_while_being_stopped_are_kept() -> None:
    """What a worker says between SIGTERM and its end is in the file when the call returns."""
    program = (
        "import os, signal, sys, time\n"
        "def save(*_): print('saving'); time.sleep(0.3); print('saved'); sys.exit()\n"
        "signal.signal(15, save)\nprint('ready')\n"
        "while os.environ['RANK'] == '1' or not os.path.exists('fail'): time.sleep(0.01)\nsys.exit(5)"
    )
    async with FMKManager([PY, "-c", program], nproc_per_node=2) as manager:
        async for line in manager.logs([1]):
            if line.text == "ready":
                Path("fail").touch()
                break
        await _ignore_failure(manager)
    assert manager.workers[1].log_path.read_text() == "ready\nsaving\nsaved\n"


async def test_lines_come_while_they_are_printed(job_folder: Path) -> None:
    """Nothing is buffered: a line is there long before the worker goes on, also from its Python child."""
    (job_folder / "child.py").write_text(
        "import os, time\nprint('two')\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    program = (
        "import os, subprocess, sys\nprint('one')\n"
        "subprocess.run([sys.executable, 'child.py'])\nprint('three')\nos._exit(0)"
    )
    async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
        seen = []
        async for line in manager.logs():
            seen.append(line.text)
            if line.text == "two":
                Path("go").touch()
        await manager.wait()
    assert seen == ["one", "two", "three"]


async def test_readers_that_do_not_read_slow_nobody() -> None:
    """A stream that is never read, or dropped after three lines, does not stop the job."""
    program = "import sys\nfor i in range(400): sys.stdout.write('z' * 65535 + '\\n')"
    async with FMKManager([PY, "-c", program], nproc_per_node=2) as manager:
        idle = manager.log_blocks()
        some = manager.logs()
        for _ in range(3):
            await some.__anext__()
        await some.aclose()
        result = await manager.wait()
        held = sum([len(block.data) async for block in idle])
    assert [worker.log_bytes for worker in result.workers] == [400 * 65536] * 2
    assert held + idle.dropped == 2 * 400 * 65536
    assert held <= 5 << 20


def test_memory_stays_bounded_when_nobody_reads(job_folder: Path) -> None:
    """Two workers write 200 MiB each: the supervisor does not grow with them."""
    program = (
        "import asyncio, resource, sys\nfrom davincirunsdk import FMKManager\n"
        "async def main():\n"
        "    writer = 'import os\\nfor i in range(200): os.write(1, bytes(1 << 20))'\n"
        "    async with FMKManager([sys.executable, '-c', writer], nproc_per_node=2) as manager:\n"
        "        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "        stream = manager.logs()\n        await manager.wait()\n"
        "        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [PY, "-c", program], capture_output=True, text=True, timeout=50, cwd=job_folder, check=True
    )
    assert int(done.stdout) < 64 * 1024


class TestUnseenFlood:
    """Output that nobody watches and that comes faster than it can be carried is moved, not read."""

    NUMBERED = (
        "import os, sys, time\n"
        "def block(number):\n"
        "    return b''.join(b'%0127d\\n' % i for i in range(number * 8192, number * 8192 + 8192))\n"
    )

    async def test_its_end_is_known(self) -> None:
        """File, last line and what a late reader gets are right; what that one cannot get is counted."""
        program = self.NUMBERED + (
            "blocks = [block(number) for number in range(8)]\n"
            "for i in range(16): [os.write(1, block) for block in blocks]\nprint('last words')"
        )
        manager = await run(program, 2)
        for rank, worker in enumerate(manager.workers):
            written = b"".join(b"%0127d\n" % number for number in range(8 * 8192)) * 16 + b"last words\n"
            assert worker.log_path.read_bytes() == written
            assert (worker.log_bytes, worker.last_line) == (len(written), "last words")
            late = manager.log_blocks([rank])
            got = b"".join([block.data async for block in late])
            assert len(got) > 1000
            assert written.endswith(got)
        whole = manager.log_blocks()
        held = sum([len(block.data) async for block in whole])
        assert held + whole.dropped == 2 * len(written)
        assert whole.dropped

    @pytest.mark.parametrize("where", ["pipe", "file"])
    async def test_where_it_cannot_be_moved(self, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel or file system that does not know the call costs time and no byte."""
        splice = os.splice

        def refuse(source: int, target: int, count: int, **options: int) -> int:
            if (where == "pipe") == bool(options):
                raise OSError(errno.EINVAL, "not here")
            return splice(source, target, count, **options)

        monkeypatch.setattr(os, "splice", refuse)
        manager = await run(self.NUMBERED + "for i in range(16): os.write(1, block(i))")
        written = b"".join(b"%0127d\n" % number for number in range(16 * 8192))
        assert manager.workers[0].log_path.read_bytes() == written

    async def test_the_report_shows_the_last_lines(self) -> None:
        """A worker that fails in the middle of a flood is shown with its own last words."""
        program = self.NUMBERED + (
            "piece = block(0)\nfor i in range(100): os.write(1, piece)\nraise ValueError('the very end')"
        )
        with pytest.raises(DistributedRuntimeError, match="ValueError: the very end"):
            await run(program, 2)

    async def test_who_comes_in_the_middle(self) -> None:
        """A reader that begins and ends in a flood gets whole lines, in order, and the count of the rest."""
        program = self.NUMBERED + (
            "number = 0\nwhile not os.path.exists('enough'):\n"
            "    os.write(1, block(number))\n    number += 1\n"
        )
        async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
            while manager.workers[0].log_bytes < 20 << 20:
                await asyncio.sleep(0.01)
            for _ in range(3):
                lines = manager.logs()
                first = await lines.__anext__()
                numbers = [int((await lines.__anext__()).text) for _ in range(20000)]
                await lines.aclose()
                assert len(first.text) <= 127
                assert sorted(set(numbers)) == numbers
            blocks = manager.log_blocks()
            Path("enough").touch()
            held = sum([len(block.data) async for block in blocks])
            result = await manager.wait()
        assert held + blocks.dropped == result.workers[0].log_bytes
        written = result.workers[0].log_path.read_bytes().split(b"\n")
        assert [int(line) for line in written[:-1]] == list(range(len(written) - 1))

    async def test_a_file_that_is_removed(self) -> None:
        """What is written after that is in a new file, and what was before is counted as lost."""
        program = self.NUMBERED + (
            "piece = block(0)\nfor i in range(64): os.write(1, piece)\nopen('half', 'w').close()\n"
            "while not os.path.exists('go'): time.sleep(0.01)\n"
            "for i in range(64): os.write(1, piece)\n"
        )
        async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
            while not Path("half").exists():
                await asyncio.sleep(0.01)
            manager.workers[0].log_path.unlink()
            Path("go").touch()
            result = await manager.wait()
        worker = result.workers[0]
        assert worker.log_bytes == worker.log_path.stat().st_size
        assert worker.log_bytes + worker.lost_bytes == 128 << 20

    @pytest.mark.parametrize("size", [1 << 20, 3_000_001])
    async def test_one_that_is_stopped(self, size: int) -> None:
        """A flood that is stopped in its middle leaves a whole file: not a byte less than was taken."""
        program = f"import os\npiece = b'x' * {size}\nwhile True: os.write(1, piece)"
        async with FMKManager([PY, "-c", program], nproc_per_node=2) as manager:
            while any(worker.log_bytes < 20 << 20 for worker in manager.workers):
                await asyncio.sleep(0.01)
            await manager.stop()
        for worker in manager.workers:
            assert worker.log_bytes == worker.log_path.stat().st_size
            assert worker.lost_bytes == 0
            assert worker.last_line == "x" * 200


class TestDiskTrouble:
    """A disk that is full, limited, gone or stuck harms the log, never the worker."""

    @pytest.fixture
    def small_disk(self, job_folder: Path) -> Iterator[Path]:
        """A file system of 1 MiB."""
        folder = job_folder / "small"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
        yield folder
        subprocess.run(["umount", folder], check=True)

    async def test_full_disk(self, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
        """One warning with file and reason; what could not be written is counted."""
        manager = await run(
            "import os\nfor i in range(8): os.write(1, b'x' * (1 << 20))", 2, log_dir=small_disk
        )
        result = await manager.wait()
        assert result.exit_code == 0
        kept = sum(worker.log_bytes for worker in result.workers)
        assert kept <= 1 << 20
        assert result.lost_log_bytes == (16 << 20) - kept
        warnings = [
            record.getMessage()
            for record in caplog.records
            if "No space left on device" in record.getMessage()
        ]
        assert 1 <= len(warnings) <= 3
        assert str(small_disk) in warnings[0]

    @pytest.mark.parametrize("size", [300_000, 30_000_000])
    async def test_writing_resumes_when_there_is_room(self, small_disk: Path, size: int) -> None:
        """A disk that was full and has room again takes what follows."""

        def seen(worker: WorkerStatus) -> int:
            return worker.log_bytes + worker.lost_bytes

        filler = small_disk / "filler"
        filler.write_bytes(bytes(1000 * 1024))
        program = (
            f"import os, time\nleft = memoryview(b'a' * {size})\n"
            "while left: left = left[os.write(1, left):]\nopen('full', 'w').close()\n"
            "while not os.path.exists('room'): time.sleep(0.01)\nos.write(1, b'the end\\n')"
        )
        async with FMKManager([PY, "-c", program], nproc_per_node=1, log_dir=small_disk) as manager:
            while not (Path("full").exists() and seen(manager.workers[0]) == size):
                await asyncio.sleep(0.01)
            filler.unlink()
            Path("room").touch()
            result = await manager.wait()
        assert result.workers[0].log_path.read_bytes().endswith(b"the end\n")
        assert result.lost_log_bytes + result.workers[0].log_bytes == size + 8

    async def test_file_that_takes_nothing(self, job_folder: Path) -> None:
        """A log path that leads to /dev/full loses everything and says so."""
        log = job_folder / "log"
        log.mkdir()
        (log / f"{os.uname().nodename}-proc-rank-0-device-0.txt").symlink_to("/dev/full")
        manager = await run("print('x' * 999)")
        result = await manager.wait()
        assert (result.exit_code, result.lost_log_bytes) == (0, 1000)

    async def test_removed_folder(self, job_folder: Path) -> None:
        """A log folder that is removed while the job runs is made again for what follows."""
        program = (
            "import os, time\nprint('before')\nopen('ready', 'w').close()\n"
            "while not os.path.exists('go'): time.sleep(0.01)\nprint('after')"
        )
        async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
            while not (Path("ready").exists() and manager.workers[0].log_bytes):
                await asyncio.sleep(0.01)
            for path in (job_folder / "log").iterdir():
                path.unlink()
            (job_folder / "log").rmdir()
            Path("go").touch()
            result = await manager.wait()
        assert result.workers[0].log_path.read_text() == "after\n"
        assert result.lost_log_bytes == len("before\n")

    def test_file_size_limit(self, job_folder: Path) -> None:
        """A limit on file sizes (ulimit -f) is trouble like a full disk, not the end of the launcher."""
        command = f'ulimit -f 1024; exec {PY} -m davincirunsdk --nproc-per-node 1 --echo none {PY} -c "$0"'
        program = "import os, resource\nfor i in range(8): os.write(1, b'x' * (1 << 20))"
        done = subprocess.run(
            ["bash", "-c", command, program],
            capture_output=True,
            text=True,
            timeout=50,
            cwd=job_folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "File too large" in done.stderr
        assert "could not be written to log files" in done.stderr

    @pytest.fixture
    def standing(self, job_folder: Path) -> Iterator[int]:
        """A disk that takes 64 KiB of rank 0 and then no more before somebody drinks: a FIFO."""
        log = job_folder / "log"
        log.mkdir()
        stuck = log / f"{os.uname().nodename}-proc-rank-0-device-0.txt"
        os.mkfifo(stuck)
        reader = os.open(stuck, os.O_RDONLY | os.O_NONBLOCK)
        yield reader
        os.close(reader)

    NUMBERED = "import os\nfor i in range({count}): os.write(1, b'%07d\\n' % i * 8192)"

    @pytest.mark.parametrize(("watched", "count"), [(True, 40), (False, 64)])
    async def test_standing_disk_of_one_worker(
        self, watched: bool, count: int, standing: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No worker waits, a reader gets its lines, and when the disk goes on it gets all in order."""
        monkeypatch.setattr("davincirunsdk.supervision.drain._DISK_PATIENCE", 60.0)
        program = self.NUMBERED.format(count=count)
        async with FMKManager([PY, "-c", program], nproc_per_node=2) as manager:
            lines = manager.logs([0]) if watched else None
            events = manager.events()
            ended = 0
            while ended < 2:
                ended += (await asyncio.wait_for(events.__anext__(), 20)).kind == "exited"
            if lines is not None:
                await asyncio.wait_for(_read_until(lines, f"{count - 1:07d}"), 30)
            assert manager.workers[0].log_bytes <= 1 << 17
            waiting = asyncio.ensure_future(manager.wait())
            got = b""
            while not waiting.done():
                got += _drink(standing)
                await asyncio.sleep(0.01)
            got += _drink(standing)
            result = await waiting
        assert got == b"".join(b"%07d\n" % i * 8192 for i in range(count))
        assert result.lost_log_bytes == 0

    async def test_standing_disk_for_longer_than_memory(
        self, standing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What no memory is left for is counted and said once; the worker goes on."""
        monkeypatch.setattr("davincirunsdk.logs.spare.SPARE_BYTES", 1 << 20)
        monkeypatch.setattr("davincirunsdk.supervision.drain._DISK_PATIENCE", 60.0)
        program = self.NUMBERED.format(count=64)
        async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
            async for event in manager.events():
                if event.kind == "exited":
                    break
            waiting = asyncio.ensure_future(manager.wait())
            got = b""
            while not waiting.done():
                got += _drink(standing)
                await asyncio.sleep(0.01)
            got += _drink(standing)
            result = await waiting
        assert result.exit_code == 0
        whole = b"".join(b"%07d\n" % i * 8192 for i in range(64))
        assert whole.startswith(got[: 1 << 20])
        assert len(got) + result.lost_log_bytes == len(whole)
        assert sum("stands still" in record.getMessage() for record in caplog.records) == 1

    async def test_standing_disk_in_a_flood(self, job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same where the kernel moves what nobody watches: file and last words are right."""
        go_on = threading.Event()
        move = LogFile.move

        def held_up(file: LogFile, pipe: int, size: int) -> int:
            go_on.wait(30)
            return move(file, pipe, size)

        monkeypatch.setattr(LogFile, "move", held_up)
        program = self.NUMBERED.format(count=512)
        async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
            async for event in manager.events():
                if event.kind == "exited":
                    break
            go_on.set()
            result = await manager.wait()
            blocks = manager.log_blocks()
            held = sum([len(block.data) async for block in blocks])
        whole = b"".join(b"%07d\n" % i * 8192 for i in range(512))
        assert result.workers[0].log_path.read_bytes() == whole
        assert result.workers[0].last_line == "0000511"
        assert held + blocks.dropped == len(whole)

    async def test_standing_disk_that_never_goes_on(
        self, standing: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job ends all the same, and counts what is not in the file."""
        monkeypatch.setattr("davincirunsdk.supervision.drain._DISK_PATIENCE", 1.0)
        program = self.NUMBERED.format(count=64)
        async with FMKManager([PY, "-c", program], nproc_per_node=1) as manager:
            result = await asyncio.wait_for(manager.wait(), 20)
        assert result.exit_code == 0
        assert len(_drink(standing)) + result.lost_log_bytes >= 64 * 65536
        while threading.active_count() > 1 and any("_carry" in t.name for t in threading.enumerate()):
            _drink(standing)
            await asyncio.sleep(0.01)


async def _read_until(lines: LineStream, text: str) -> None:
    async with lines:
        async for line in lines:
            if line.text == text:
                return


def _drink(fifo: int) -> bytes:
    got = b""
    try:
        while data := os.read(fifo, 1 << 20):
            got += data
    except BlockingIOError:
        pass
    return got


@given(
    pieces=st.lists(st.binary(max_size=3000), max_size=30),
    limit=st.integers(4096, 20000),
)
def test_a_limit_keeps_head_and_tail(
    pieces: list[bytes], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Below the limit nothing is missing; above it the mark tells exactly how much."""
    path = tmp_path_factory.mktemp("limit") / "log.txt"
    file = LimitedLogFile(path, lambda text: None, limit)
    for piece in pieces:
        file.write(piece)
    file.close()
    whole, kept = b"".join(pieces), path.read_bytes()
    assert list(path.parent.iterdir()) == [path]
    if not file.left_out:
        assert kept == whole
    else:
        mark = f"\n... {file.left_out} bytes left out here by the log limit ...\n".encode()
        head, tail = kept.split(mark)
        assert whole == head + whole[len(head) : len(head) + file.left_out] + tail
        assert len(head) + len(tail) <= limit


@pytest.mark.parametrize("line", ["训练 step {}\n", "a {} b\r\n", "{}" + "长" * 700 + "\n", "😀{}" * 9])
@pytest.mark.parametrize("chunk", [1, 7, 1000, 100_000])
def test_a_limit_cuts_between_lines(line: str, chunk: int, job_folder: Path) -> None:
    """Head and tail are whole lines, or whole characters where a line is longer than what is kept."""
    whole = "".join(
        line.replace("{}", str(number)) for number in range(40_000 // len(line.encode()))
    ).encode()
    file = LimitedLogFile(job_folder / "log.txt", lambda text: None, 5000)
    for start in range(0, len(whole), chunk):
        file.write(whole[start : start + chunk])
    file.close()
    head, tail = (
        (job_folder / "log.txt")
        .read_bytes()
        .split(f"\n... {file.left_out} bytes left out here by the log limit ...\n".encode())
    )
    assert whole == head + whole[len(head) : len(head) + file.left_out] + tail
    assert len(head) > 100
    assert len(tail) > 100
    head.decode()
    tail.decode()
    if "\n" in line:
        assert head.endswith(b"\n")
        assert whole[: -len(tail)].endswith(b"\n")


def test_a_limit_survives_the_loss_of_its_files(job_folder: Path) -> None:
    """Files that vanish while a limited log is written cost their bytes, not the worker."""
    file = LimitedLogFile(job_folder / "log.txt", lambda text: None, 4096)
    for _ in range(10):
        file.write(b"x" * 1500)
        for path in job_folder.glob("log.txt.tail*"):
            path.unlink()
    file.write(b"the end\n")
    file.close()
    assert (job_folder / "log.txt").read_bytes().endswith(b"the end\n")


@given(st.lists(st.binary(max_size=200), max_size=40))
def test_cutting_lines_loses_nothing(pieces: list[bytes]) -> None:
    """Pieces of whole lines put together are what went in."""
    cutter = LineCutter()
    out = [cutter.feed(piece) for piece in pieces]
    assert b"".join(out) + cutter.rest() == b"".join(pieces)
    assert all(piece.endswith((b"\n", b"\r")) for piece in out if piece)


@given(st.text(alphabet="aé训\U0001f600", min_size=1, max_size=50))
def test_a_long_line_is_cut_between_characters(text: str) -> None:
    """No character is torn where a line is too long to be held."""
    cutter = LineCutter()
    text *= 70000 // len(text.encode()) + 2
    data = text.encode()
    out = [cutter.feed(data[start : start + 7777]) for start in range(0, len(data), 7777)]
    assert "".join(piece.decode() for piece in [*out, cutter.rest()]) == text


@given(
    st.lists(st.tuples(st.integers(0, 2), st.text(alphabet="ab\r", max_size=9)), max_size=50),
    st.integers(1, 40),
)
def test_a_stream_counts_what_it_leaves_out(lines: list[tuple[int, str]], bound: int) -> None:
    """Lines that were read and bytes that were dropped add up, and no two lines are glued together."""

    async def read() -> list[str]:
        blocks = BlockStream(None, bound, lambda stream: None)
        for rank, text in lines:
            blocks.offer(LogBlock(rank=rank, data=f"<{text}>\n".encode(), time=time.time()))
        blocks.close()
        dropped.append(blocks.dropped)
        return [line.text async for line in LineStream(blocks)]

    dropped: list[int] = []
    read_lines = asyncio.run(read())
    assert not any("><" in text for text in read_lines)
    written = sum(len(text) + 3 for _, text in lines)
    assert dropped[0] <= written
    if not dropped[0]:
        kept = "".join(text.replace("\r", "") for _, text in lines)
        assert sorted("".join(read_lines)) == sorted(kept + "<>" * len(lines))


def test_a_file_that_is_renamed_between_opening_and_locking(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one name at one moment: the later one takes another file and leaves the first one's."""
    path = job_folder / "log.txt"
    path.write_text("of an earlier run\n")
    lock, others = fcntl.flock, []

    def another_comes(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        others.append(LogFile(path, lambda text: None))
        others[0].write(b"of the other job\n")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", another_comes)
    with pytest.raises(BlockingIOError):
        LogFile(path, lambda text: None)
    assert path.read_text() == "of the other job\n"
    assert (job_folder / "log.1.txt").read_text() == "of an earlier run\n"
    others[0].close()


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 7, 8, 100])
def test_earlier_runs_are_numbered_on(kept: int, job_folder: Path) -> None:
    """The next free number, found without counting through all of them."""
    for number in range(1, kept + 1):
        (job_folder / f"log.{number}.txt").touch()
    (job_folder / "log.txt").write_text("earlier")
    LogFile(job_folder / "log.txt", lambda text: None).close()
    assert (job_folder / f"log.{kept + 1}.txt").read_text() == "earlier"


async def test_events_with_any_name_are_written(job_folder: Path) -> None:
    """A process name that is not UTF-8 is written, and read back, as what it is."""
    name = "训练".encode()[:5]
    file = await asyncio.to_thread(LogFile, job_folder / "events.jsonl", lambda text: None)
    log = EventLog(file, "job", "node")
    written = log.start()
    log.put(Event(kind="leftover", time=1.0, detail=os.fsdecode(name)))
    log.put(Event(kind="finished", time=2.0))
    log.close()
    await written
    lines = [json.loads(line) for line in (job_folder / "events.jsonl").read_bytes().splitlines()]
    assert [line["kind"] for line in lines] == ["leftover", "finished"]
    assert os.fsencode(lines[0]["detail"]) == name
