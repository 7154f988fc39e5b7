"""The rank table as a file: waiting until it is complete, writing one.

Platforms write the table while the job starts already, and not atomically: a reader meets a missing
file, an empty or cut one, or one whose status is not `completed` yet. All of these are waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from davincirunsdk.concurrency import in_thread
from davincirunsdk.errors import RankTableError, RankTableMissingError, RankTableTimeoutError
from davincirunsdk.rank_table import dump, parse
from davincirunsdk.rank_table.check import READY
from davincirunsdk.rank_table.decoding import BOM, broken
from davincirunsdk.rank_table.findings import show

if TYPE_CHECKING:
    from collections.abc import Callable

    from davincirunsdk.rank_table.table import RankTable

POLL = 2.0
"""Seconds between looks where the kernel reports no change: network file systems."""

SETTLE = 0.05
"""Seconds to let a writer go on after a change before the next look."""

PROGRESS = 10.0
"""Seconds between two progress lines."""

STALE = 60.0
"""Age in seconds from which an empty or cut file is nobody's work in progress.

Where nobody is known to be writing it, it is then waited for as long as for a missing one."""

MOST_BYTES = 64 << 20
"""Size of the largest table that is read: HCCL's own of 131,072 devices fits in 32 MB."""

UNCHANGED = 3.0
"""Seconds for which text that more writing cannot turn into JSON must stand still to be an error.

A cut text is waited for to the limit, as its writer may be slow; `{"a":1,}` gets no better by more text,
and half an hour of waiting would only hide the typo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what, in seconds.

    Attributes:
        limit: For the table to become complete.
        missing: For the file to appear; at most `limit` counts.
        missing_folder: For the folder it should be in to appear.
        hint: Sentence for the error when the time is up.
    """

    limit: float
    missing: float
    missing_folder: float
    hint: str = ""


class _State(Enum):
    READY = 0
    MISSING_FOLDER = 1
    MISSING = 2
    WAITING = 3
    CUT = 4
    BROKEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What one look at the file saw; `age` is how long it has stood as it is, in seconds."""

    state: _State
    words: str
    age: float = 0.0
    data: bytes = b""


async def wait_for(
    path: Path, *, patience: Patience, named_by: str = "", notify: Callable[[str], None] = lambda _: None
) -> tuple[RankTable, bytes]:
    """Wait until a rank table file is complete, and read it.

    The kernel's reports of changes are used where there are any, and a slow poll everywhere. All
    file work and parsing is done in a thread of its own. Cancellation ends the waiting at once.

    Args:
        path: The file.
        patience: How long to wait.
        named_by: The option or variable that names the file, for the error.
        notify: Called with a line for people when the waiting begins and every 10 seconds of it.

    Returns:
        The table and the bytes it was read from.

    Raises:
        RankTableError: The file is there but is no correct rank table, or cannot be read.
        RankTableTimeoutError: It did not become complete in time.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    next_line = started
    changed = started
    with ExitStack() as stack:
        # In threads that nobody joins: a read may hang on a dead network file system.
        look = await in_thread(_look, path)
        if look.state is not _State.READY:
            watch = await in_thread(_watch)
            stack.callback(watch.close)
            look = await in_thread(_look_again, path, watch)
        while look.state is not _State.READY:
            now = loop.time()
            if look.state is _State.BROKEN and max(now - changed, look.age) >= UNCHANGED:
                break  # the parser says what is wrong with it
            nobodys = look.state is _State.CUT and look.age >= STALE
            if nobodys and patience.missing < patience.limit and now - started >= patience.missing:
                break
            _give_up(path, named_by, look, patience, waited=now - started)
            limit = _limit(look.state, patience)
            if now >= next_line:
                spent = f"{now - started:.0f} s of {limit:g} s"
                notify(f"waiting for rank table {path}: {look.words} ({spent})")
                next_line = now + PROGRESS
            left = max(started + limit - now, 0.0) + 0.01
            if await watch.changed(min(POLL, next_line - now, left)):
                await asyncio.sleep(SETTLE)
            earlier, look = look, await in_thread(_look_again, path, watch)
            if look.data != earlier.data:
                changed = loop.time()
        return await in_thread(_parse, look.data, str(path)), look.data


def _parse(data: bytes, path: str) -> RankTable:
    return parse(data, path=path)


def _look(path: Path) -> _Look:
    try:
        info, data = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path.parent):
            return _Look(state=_State.MISSING, words="the file does not exist yet")
        return _Look(state=_State.MISSING_FOLDER, words=f"its folder {path.parent} does not exist yet")
    except PermissionError as error:
        raise RankTableError(
            f"rank table {path} cannot be read ({error.strerror}); expected a file that this user may read",
            path=str(path),
        ) from error
    except OSError as error:
        # A network file system that is away for a moment.
        return _Look(state=_State.WAITING, words=f"it cannot be read ({error.strerror})")
    state, words = _judge(data)
    return _Look(state=state, words=words, age=time.time() - info.st_mtime, data=data)


def read_file(path: Path) -> tuple[os.stat_result, bytes]:
    """Read a table file, and nothing that is not one: a pipe may never end, a device neither.

    Args:
        path: The file.

    Returns:
        What the kernel says about it, and its bytes.

    Raises:
        RankTableError: It is not a regular file, or larger than any table.
        OSError: It cannot be read.
    """
    # The opening of a pipe would wait for its writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise RankTableError(
                f"rank table {path}: found {_kind(info.st_mode)}; expected a regular file: write the table "
                "to one and name that",
                path=str(path),
            )
        with open(handle, "rb", closefd=False) as file:
            data = file.read(MOST_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MOST_BYTES:
        raise RankTableError(
            f"rank table {path}: found more than {MOST_BYTES >> 20} MiB; expected at most that, for the "
            "table of a job of 131,072 devices has half of it: name the right file",
            path=str(path),
        )
    return info, data


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something that is not a file")


def _look_again(path: Path, watch: _Changes) -> _Look:
    # Watched before it is looked at: a change in between is then a report, not a loss. A folder may
    # appear just before it is watched, hence the repetition.
    while watch.follow(path):
        pass
    return _look(path)


def _judge(data: bytes) -> tuple[_State, str]:
    """Tell whether text is a finished table; correctness is for the parser."""
    data = data.removeprefix(BOM)
    try:
        top = msgspec.json.decode(data, type=_Status)
    except msgspec.ValidationError:
        return _State.READY, ""  # valid JSON of another shape: the parser says what is wrong with it
    except (msgspec.DecodeError, ValueError, RecursionError):  # not all versions make them one family
        why = broken(data)
        if why.cut:
            return _State.CUT, f"it is written only in part so far ({why.words})"
        return _State.BROKEN, f"it is not valid JSON so far ({why.words})"
    if isinstance(top.status, str) and top.status.lower() not in READY:
        return _State.WAITING, f"its status is {show(top.status)}"
    return _State.READY, ""


class _Status(msgspec.Struct):
    """The one field that tells whether a table is finished."""

    status: object = None


def _limit(state: _State, patience: Patience) -> float:
    if state is _State.MISSING:
        return min(patience.missing, patience.limit)
    if state is _State.MISSING_FOLDER:
        return min(patience.missing_folder, patience.limit)
    return patience.limit


def _give_up(file: Path, named_by: str, look: _Look, patience: Patience, *, waited: float) -> None:
    """Raise if the time is up."""
    path = str(file)
    limit = _limit(look.state, patience)
    if waited < limit:
        return
    named = f" (named by {named_by})" if named_by else ""
    longer = "--rank-table-timeout (rank_table_timeout) or DAVINCIRUN_RANK_TABLE_TIMEOUT (seconds)"
    if limit < patience.limit:
        kind = (
            RankTableMissingError if look.state in (_State.MISSING, _State.MISSING_FOLDER) else RankTableError
        )
        raise kind(
            f"rank table {path}{named}: {look.words}; expected a file: correct the path, or let it be waited "
            f"for with {longer}",
            path=path,
        )
    hint = f" {patience.hint}" if patience.hint else ""
    raise RankTableTimeoutError(
        f"rank table {path}{named} is not complete after {waited:.0f} s: {look.words}; expected a table with "
        f'status "completed".{hint} To wait longer set {longer}.',
        path=path,
    )


class _Changes(Protocol):
    """Tells of changes around a file; used by `wait_for` alone."""

    async def changed(self, seconds: float) -> bool: ...
    def follow(self, path: Path) -> bool: ...
    def close(self) -> None: ...


class _NoReports:
    """Where the kernel can tell nothing: the poll alone."""

    async def changed(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return False

    def follow(self, path: Path) -> bool:
        del path
        return False

    def close(self) -> None: ...


class _Inotify:
    """Changes in the folders that decide what the path leads to.

    That is the file's own folder (a ConfigMap swaps a symlink there), the folder of the real file
    (its writer works there), and while the folder is missing, the nearest one that exists.
    """

    def __init__(self) -> None:
        from asyncinotify import Inotify, Mask

        self._mask = (
            Mask.CREATE | Mask.MODIFY | Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.ATTRIB | Mask.DELETE_SELF
        )
        self._inotify = Inotify()
        self._followed: set[int] = set()

    def follow(self, path: Path) -> bool:
        """Watch the folders that count now; tell whether one of them was not watched yet."""
        new = False
        for folder in {_nearest(path.parent), _nearest(Path(os.path.realpath(path)).parent)}:
            try:
                number = self._inotify.add_watch(folder, self._mask).wd
            except OSError:  # gone again, or no watches left: the poll goes on
                continue
            new = new or number not in self._followed
            self._followed.add(number)
        return new

    async def changed(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._inotify.get(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    def close(self) -> None:
        self._inotify.close()


def _watch() -> _Changes:
    # In the thread: the import takes longer than the loop may be held up.
    try:
        import_module("asyncinotify")
        return _Inotify()
    except (ImportError, OSError, NotImplementedError):
        return _NoReports()


def _nearest(folder: Path) -> Path:
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def write(table: RankTable, target: Path) -> None:
    """Write a table as HCCL reads it; the target is complete or as it was, whatever happens.

    Args:
        table: Any table.
        target: The file; its folder must exist. Readable for everybody, as platforms write it.

    Raises:
        OSError: It cannot be written.
    """
    write_text(dump(table), target)


def write_text(text: str, target: Path) -> None:
    """Replace a file by new text in one step.

    Args:
        text: The new content.
        target: The file; its folder must exist.

    Raises:
        OSError: It cannot be written; the file is as it was.
    """
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def digest(text: str) -> str:
    """Name for a table by its content, so that different tables never share a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
