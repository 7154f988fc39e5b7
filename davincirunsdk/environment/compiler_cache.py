"""A fresh folder for MindSpore's compiler cache, so that no run meets another run's graphs."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk.leftovers.guardian import guardian

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_VARIABLE = "MS_COMPILER_CACHE_PATH"

_PLATFORM_CACHE = Path("/cache")
"""ModelArts' large local disk."""


@contextmanager
def fresh_cache_folder() -> Iterator[Path]:
    """Make a private folder and remove it with all its content afterwards, even if this process is killed."""
    folder = _make_folder()
    try:
        guardian.watch_folder(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guardian.release_folder(folder)


def _make_folder() -> Path:
    folder = _PLATFORM_CACHE / str(uuid.uuid4())
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="davincirun-cache-")).absolute()
    return folder


@contextmanager
def set_random_ms_cache_dir() -> Iterator[None]:
    """Let MindSpore's compiler cache go to a fresh folder, for every job started inside.

    Sets `MS_COMPILER_CACHE_PATH` in this process's environment; afterwards the variable is as it
    was and the folder is gone. All ranks share the folder; MindSpore makes one below it for each.
    """
    before = os.environ.get(CACHE_VARIABLE)
    with fresh_cache_folder() as folder:
        os.environ[CACHE_VARIABLE] = str(folder)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(CACHE_VARIABLE, None)
            else:
                os.environ[CACHE_VARIABLE] = before
