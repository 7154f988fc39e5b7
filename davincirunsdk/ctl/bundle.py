"""One archive for whoever is to help: logs, events, report, versions, findings; names of variables only."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import re
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from davincirunsdk import __version__
from davincirunsdk.output.run_record import read_record
from davincirunsdk.platforms.paths import log_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from davincirunsdk.output.run_record import RunRecord

_LOG_BYTES = 8 << 20
"""Bytes of a log that are taken from its begin, and as many from its end."""

_PLOGS = 64
"""Files of CANN's own log that are taken, the newest ones."""

_PLOG = re.compile(r"plog-.*\.log")
_AFTER = 60.0
"""Seconds after a job's end in which its processes may still have written to theirs."""

_KINDS = r"(node(s|-\d+)-)?(events|launcher|scheduler|stacks|proc-rank)(-[^.]*)?\.\w+"
"""What the names of a run's own files go on with; an earlier run's have a number before the ending."""

_SHORTEST = 4
"""Letters of a value that is worth hiding: shorter ones are words and numbers of everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file of the archive.

    Attributes:
        name: Its name there.
        source: The file it comes from, None where `data` is all.
        data: What is written where there is no file.
    """

    name: str
    source: Path | None = None
    data: bytes = b""

    @property
    def size(self) -> int:
        """Bytes that it takes up, before packing."""
        if self.source is None:
            return len(self.data)
        try:
            return min(self.source.stat().st_size, 2 * _LOG_BYTES)
        except OSError:
            return 0


def items_of(events: Path, env: Mapping[str, str]) -> list[Item]:
    """List what goes into the archive of a job; blocking, also for the doctor's looks.

    Args:
        events: Its events file, among its logs. Other jobs' and earlier runs' logs are left out.
        env: The environment that it ran in, or one like it: names go in, no value.
    """
    folder, record = events.parent, read_record(events)
    own = re.compile(rf"{re.escape(record.job)}-{_KINDS}")
    items = [
        Item(name=f"logs/{path.name}", source=path)
        for path in sorted(folder.iterdir())
        if own.fullmatch(path.name) and path.is_file()
    ]
    items += [Item(name=f"plog/{name}", source=path) for name, path in _plogs(env, record)]
    table = dict(record.about).get("Rank table") or env.get("RANK_TABLE_FILE")
    if table and os.path.isfile(table):
        items.append(Item(name="rank_table.json", source=Path(table)))
    report, text = _report(folder)
    items.append(Item(name="report.json", data=report))
    items.append(Item(name="report.txt", data=text))
    items.append(Item(name="doctor.txt", data=_findings(folder, env)))
    names = "".join(f"{name}\n" for name in sorted(env))
    items.append(Item(name="variables.txt", data=names.encode(errors="backslashreplace")))
    items.append(Item(name="versions.txt", data=_versions().encode()))
    return items


def write_bundle(path: Path, items: Sequence[Item]) -> None:
    """Write the archive; one that was there is replaced when all is in it.

    Raises:
        OSError: It cannot be written.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        with tarfile.open(beside, "w:gz") as archive:
            for item in items:
                data = item.data if item.source is None else _bounded(item.source)
                entry = tarfile.TarInfo(f"bundle/{item.name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _bounded(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_LOG_BYTES if size > 2 * _LOG_BYTES else 2 * _LOG_BYTES)
            if size <= 2 * _LOG_BYTES:
                return head
            file.seek(size - _LOG_BYTES)
            left = f"\n... {size - 2 * _LOG_BYTES} bytes left out ...\n".encode()
            return head + left + file.read(_LOG_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}\n".encode()


def _plogs(env: Mapping[str, str], record: RunRecord) -> Iterator[tuple[str, Path]]:
    """Find CANN's own logs that were written to while the job ran."""
    roots = [Path(env.get("HOME", "/"), "ascend/log"), log_root(env), log_root(env, command_line=False)]
    if own := env.get("ASCEND_PROCESS_LOG_PATH"):
        roots.insert(0, Path(own))
    last = record.ended + _AFTER if record.finished else math.inf
    found: dict[str, tuple[float, str, Path]] = {}
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if not _PLOG.fullmatch(name) or (at := _written(path)) is None:
                    continue
                if record.started - 1 <= at <= last:
                    found.setdefault(os.path.realpath(path), (at, str(path.relative_to(root)), path))
    for _, name, path in sorted(found.values())[-_PLOGS:]:
        yield name, path


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _report(folder: Path) -> tuple[bytes, bytes]:
    from davincirunsdk.diagnosis.explain import explain_folder

    try:
        report = explain_folder(folder)
    except (OSError, ValueError) as error:
        return b"null\n", f"{error}\n".encode()
    return report.to_json().encode() + b"\n", report.text.encode(errors="backslashreplace") + b"\n"


def _findings(folder: Path, env: Mapping[str, str]) -> bytes:
    from davincirunsdk.ctl.doctor import Site, examine

    lines = [
        f"{one.level.name.lower():8} {one.where}: {one.found}"
        for one in examine(Site(env=dict(env), log_dir=folder))
    ]
    return _without_values("\n".join(lines) + "\n", env).encode(errors="backslashreplace")


def _without_values(text: str, env: Mapping[str, str]) -> str:
    """Put a variable's name in the place of what looks like its value, or like one of a list."""
    parts = {
        part: name
        for name, value in env.items()
        for part in (value, *re.split(r"[,;:\s]+", value))
        if len(part) >= _SHORTEST
    }
    for part in sorted(parts, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", lambda _, part=part: f"${parts[part]}", text)  # type: ignore[misc]
    return text


def _versions() -> str:
    facts = {
        "davincirunsdk": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    return json.dumps(facts, indent=1) + "\n"
