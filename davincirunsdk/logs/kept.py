"""The log files of earlier runs of a job: how many there are, which go, and what is the latest."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LATEST = "latest"
"""Name of the link to the log of the job that was started last: of its first rank on this node."""

_NUMBER = re.compile(r"(.*)\.([1-9]\d{0,8})\.(txt|jsonl)", re.DOTALL)
_ATTEMPT = re.compile(r"-attempt-\d+$")


def numbers_of(path: Path) -> list[int]:
    """List the numbers under which earlier runs' files of a log file's name are kept, smallest first."""
    return sorted(number for number, _ in _kept(path.parent, {(path.stem, path.suffix[1:])}))


def keep_newest(files: Sequence[Path], most: int) -> None:
    """Remove earlier runs' files, those of their attempts, too, until as many as wanted are left.

    Args:
        files: The log files of the run that begins.
        most: Runs to keep, with this one.
    """
    if not files:
        return
    found: dict[str, list[tuple[int, Path]]] = {}
    for number, path in _kept(files[0].parent, {(file.stem, file.suffix[1:]) for file in files}):
        found.setdefault(f"{path.stem.rpartition('.')[0]}{path.suffix}", []).append((number, path))
    for kept in found.values():
        for _, path in sorted(kept)[: max(0, len(kept) - most + 1)]:
            with suppress(OSError):
                path.unlink()


def point_to(file: Path) -> None:
    """Have the link `latest` beside a log file show it; what is no link of that name is left alone."""
    link = file.with_name(LATEST)
    new = file.with_name(f".{LATEST}-{os.getpid()}-{os.urandom(4).hex()}")
    # Some file systems know no links, and nobody needs this one.
    with suppress(OSError):
        if link.is_symlink() or not link.exists():
            new.symlink_to(file.name)
            try:
                new.replace(link)
            except OSError:
                new.unlink()


def _kept(folder: Path, names: set[tuple[str, str]]) -> list[tuple[int, Path]]:
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NUMBER.fullmatch(entry.name)
            if match and (_ATTEMPT.sub("", match[1]), match[3]) in names:
                found.append((int(match[2]), Path(entry.path)))
    return found
