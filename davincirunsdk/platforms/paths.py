"""Folders and names that a platform prescribes: job id, logs, the place for a converted rank table."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.host import addresses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from davincirunsdk.rank_table import RankTable

_log = logging.getLogger("davincirunsdk")


def job_id(env: Mapping[str, str]) -> str:
    """Name the job as ModelArts' own tools do; the name stands in those of log files."""
    if env.get("BATCH_JOB_ID"):
        return env["BATCH_JOB_ID"]
    if env.get("MA_VJ_NAME"):
        return env["MA_VJ_NAME"].replace("ma-job", "modelarts-job", 1)
    return addresses.host_name()


def log_root(env: Mapping[str, str], *, command_line: bool = True) -> Path:
    """Tell the folder for the logs that CANN and the frameworks write.

    Args:
        env: The environment.
        command_line: True for the rule of the command line: $BATCH_TASK_LOG_PATH if it exists, else
            $MA_MOUNT_PATH/log if it exists, else /tmp/log. False for that of the documented Python
            API: /tmp/logdir.

    Returns:
        The folder; it need not exist.
    """
    if not command_line:
        return Path("/tmp/logdir")
    if env.get("BATCH_TASK_LOG_PATH") and os.path.isdir(env["BATCH_TASK_LOG_PATH"]):
        return Path(env["BATCH_TASK_LOG_PATH"])
    if env.get("MA_MOUNT_PATH") and os.path.isdir(Path(env["MA_MOUNT_PATH"], "log")):
        return Path(env["MA_MOUNT_PATH"], "log")
    return Path("/tmp/log")


def table_folder(env: Mapping[str, str], root: Path) -> Path:
    """Tell where `init_rank_table()` is documented to write the v1.0 table."""
    home = env.get("MA_HOME") or env.get("MA_MOUNT_PATH")
    return (Path(home) if home else root / "home/ma-user") / "rank_table"


def file_for_hccl(
    table: RankTable, source: Path, env: Mapping[str, str], root: Path, *, documented: bool
) -> Path:
    """Give a file of this table that HCCL reads: the source itself, or a new file in v1.x.

    Args:
        table: The table.
        source: The file it was read from; never touched.
        env: The environment.
        root: Folder that stands for `/`.
        documented: True to write to the documented file, whatever it holds; False to write to a
            file named by content, so that jobs with different tables keep out of each other's way,
            and to make no ModelArts home where there is none.

    Returns:
        The absolute path. Where the folder cannot be written it is in a private one, and a warning
        is logged.

    Raises:
        RankTableError: No place can be written.
    """
    # HCCL refuses a name without `.json`, whatever the file holds.
    if table.as_is and source.suffix == ".json":
        return source.absolute()
    from davincirunsdk.rank_table import dump
    from davincirunsdk.rank_table.file import digest

    text = dump(table)
    by_content = f"jobstart_hccl_{digest(text)}.json"
    folder = table_folder(env, root)
    if not documented and not os.path.isdir(folder.parent):
        return _written(text, _private_folder(env) / by_content, source)
    target = folder / ("jobstart_hccl.json" if documented else by_content)
    if os.path.exists(target) and target.samefile(source):
        target = folder / by_content
    try:
        return _write(text, target)
    except OSError as error:
        private = _private_folder(env) / by_content
        _log.warning(
            "the v1.x rank table cannot be written to %s (%s), so it is in %s",
            target,
            error.strerror,
            private,
        )
        return _written(text, private, source)


def _write(text: str, target: Path) -> Path:
    from davincirunsdk.rank_table.file import write_text

    if not target.is_file() or target.read_text(encoding="utf-8", errors="replace") != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(text, target)
    return target.absolute()


def _written(text: str, target: Path, source: Path) -> Path:
    try:
        return _write(text, target)
    except OSError as error:
        raise RankTableError(
            f"the v1.x form of rank table {source} cannot be written to {target} ({error.strerror}); "
            "expected a folder that this user may write, with room: set TMPDIR",
            path=str(source),
        ) from error


def _private_folder(env: Mapping[str, str]) -> Path:
    """A folder for this user alone, the same every time, so that many runs leave no trail of folders."""
    parent = Path(env.get("TMPDIR") or "/tmp")
    folder = parent / f"davincirun-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
        if info.st_uid == os.geteuid() and info.st_mode & 0o170077 == 0o040000:
            return folder
        # Somebody else made it, or it is a link, or open to others.
        import tempfile

        return Path(tempfile.mkdtemp(prefix="davincirun-", dir=parent))
    except OSError as error:
        raise PlatformError(
            f"no private folder can be made in {parent} ({error.strerror}); expected a folder that this user "
            "may write: set TMPDIR"
        ) from error
