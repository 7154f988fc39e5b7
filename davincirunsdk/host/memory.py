"""What the kernel tells about kills for memory."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_kills() -> int | None:
    """Count the processes that the kernel has killed for memory in this process's cgroup, None if unknown."""
    try:
        groups = _OWN.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in groups:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            candidates = [(_CGROUPS, "memory.events"), (_CGROUPS / "unified", "memory.events")]
        elif "memory" in controllers.split(","):
            candidates = [(_CGROUPS / "memory", "memory.oom_control")]
        else:
            continue
        for root, name in candidates:
            # A container sees its own group as the root.
            for folder in (root / path.lstrip("/"), root):
                if (count := _counter(folder / name)) is not None:
                    return count
    return None


def _counter(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None
