"""One worker's log file: its name, its earlier runs, and a disk that may be full, slow or gone."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import ExitStack, suppress
from itertools import count
from typing import TYPE_CHECKING

from davincirunsdk.logs.kept import numbers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger: logging.Logger = logging.getLogger("davincirunsdk")


class LogFile:
    """A log file, open for appending, that survives trouble with its disk.

    A write that fails is counted and warned of once; every later write is tried anew. The file is
    locked while it is open, so that another job finds it in use and takes another name.

    Args:
        path: The file. What an earlier run left there is kept under a numbered name.
        on_trouble: Called with one sentence when bytes are lost for the first time, from the
            thread that writes.

    Attributes:
        movable: Whether `move` has a sense.

    Raises:
        BlockingIOError: A running job writes to this file.
        OSError: It cannot be opened.
    """

    movable: bool = True

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self.path = path
        self.size: int = 0
        self.lost: int = 0
        self.on_trouble = on_trouble
        self._warned = False
        self._file = _open_locked(path)
        self._direct = -1

    @property
    def progress(self) -> int:
        """A number that grows with every write that comes to its end."""
        return self.size + self.lost

    def write(self, data: bytes) -> None:
        """Append `data`; blocks as long as the disk does. Never raises."""
        view = memoryview(data)
        try:
            if self._file < 0 or os.fstat(self._file).st_nlink == 0:
                self._reopen()
            while view:
                written = os.write(self._file, view)
                self.size += written
                view = view[written:]
        except OSError as error:
            self._lose(len(view))
            self.warn_once(
                f"cannot write {self.path}: {os.strerror(error.errno or errno.EIO)}; the workers go on, "
                "what they print is not kept until the file can be written again"
            )

    def shorten(self, size: int) -> None:
        """Take bytes off the end of the file.

        Raises:
            OSError: It cannot be cut.
        """
        os.truncate(self.path, self.size - size)
        self.size -= size

    def move(self, pipe: int, size: int) -> int:
        """Append bytes of a pipe without reading them; blocks as long as the disk does.

        Args:
            pipe: Its reading end, which holds `size` bytes.
            size: Bytes to move at most.

        Returns:
            Bytes moved, at least 1.

        Raises:
            OSError: None was moved; `write` will tell what is wrong, or manage.
        """
        found = os.fstat(self._file)
        if found.st_nlink == 0 or not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self._direct < 0:
            # The kernel moves nothing to a file that is open for appending.
            self._direct = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)
        os.lseek(self._direct, 0, os.SEEK_END)
        moved = os.splice(pipe, self._direct, size)
        self.size += moved
        return moved

    def last(self, size: int) -> bytes:
        """Read the last bytes that were moved, for the thread that moves them; b"" if they cannot be read."""
        try:
            return os.pread(self._direct, size, max(0, os.fstat(self._direct).st_size - size))
        except OSError as error:
            logger.debug("cannot read %s: %s", self.path, error)
            return b""

    def close(self) -> None:
        """Close the file; other jobs may then take its name."""
        self._close_direct()
        if self._file >= 0:
            try:
                os.close(self._file)
            except OSError as error:
                # NFS and quotas report some failed writes only here.
                self.on_trouble(f"closing {self.path}: {os.strerror(error.errno or errno.EIO)}")
            self._file = -1

    def warn_once(self, text: str) -> None:
        """Say what is wrong, unless something was said before."""
        if not self._warned:
            self._warned = True
            self.on_trouble(text)

    def _close_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _lose(self, size: int) -> None:
        self.lost += size

    def _reopen(self) -> None:
        """The file was removed under us: what was written is lost, the rest gets a new file."""
        self.lost += self.size
        self.size = 0
        self.warn_once(f"{self.path} was removed while its worker runs; a new file holds what follows")
        self._close_direct()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self.path)


def _open_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                logger.debug("no lock on %s: %s", path, error)
            found = os.fstat(file)
            # Between opening and locking, another job may have renamed it: then its own is there now.
            if _is_at(path, found):
                if not stat.S_ISREG(found.st_mode) or found.st_size == 0:
                    return file
                _keep_earlier(path)
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), found)
    except FileNotFoundError:
        return False


def _keep_earlier(path: Path) -> None:
    """Rename what an earlier run left to the first free number."""

    def kept(number: int) -> Path:
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    if not kept(1).exists():
        # There are none, or the first ones were removed.
        path.rename(kept(max(numbers_of(path), default=0) + 1))
        return
    # Thousands of runs may have left theirs: the numbers are halved, not counted through.
    above = 1
    while kept(above).exists():
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if kept(middle).exists() else (below, middle)
    path.rename(kept(above))


def keep_attempt(path: Path, number: int) -> None:
    """Put the number of an attempt that has ended into its log file's name.

    Args:
        path: The closed file; nothing happens if it is gone.
        number: Of the attempt, from 0.

    Raises:
        OSError: It cannot be renamed.
    """
    target = path.with_name(f"{path.stem}-attempt-{number}{path.suffix}")
    if not path.exists():
        return
    if target.exists():
        _keep_earlier(target)
    with suppress(FileNotFoundError):
        path.rename(target)


def open_log_files(
    log_dir: Path, job_id: str, endings: Sequence[str], open_file: Callable[[Path], LogFile]
) -> tuple[str, list[LogFile]]:
    """Open the log files of one job's local workers, all or none.

    Args:
        log_dir: Their folder, which exists.
        job_id: First part of each name; where a running job has these files open, `job_id-2`,
            `job_id-3` and so on are tried.
        endings: The rest of each name.
        open_file: Opens one of them.

    Returns:
        The job id that was taken, and the files in the order of `endings`.

    Raises:
        OSError: One of them cannot be opened.
    """
    for number in count(1):
        name = job_id if number == 1 else f"{job_id}-{number}"
        with ExitStack() as opened:
            files = []
            try:
                for ending in endings:
                    file = open_file(log_dir / f"{name}{ending}")
                    opened.callback(file.close)
                    files.append(file)
            except BlockingIOError:
                continue
            opened.pop_all()
            return name, files
    raise AssertionError("unreachable: count() does not end")
