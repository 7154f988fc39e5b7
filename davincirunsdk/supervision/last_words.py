"""What the end of a worker's output says about its own end, before the whole of it is judged."""

from __future__ import annotations

import re

_HEAD = re.compile(rb"^(.*?)(?:\+ Exception Group )?Traceback \(most recent call last\):", re.MULTILINE)
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_EXCEPTION = re.compile(rb"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)\b(?::|$)")


def is_traceback_open(tail: bytes) -> bool:
    """Tell whether output ends in the middle of a Python traceback.

    Args:
        tail: The last output.

    Returns:
        True when the last traceback has no line yet that names its exception, or when the last
        line announces another traceback.
    """
    last = next((line for line in reversed(tail.split(b"\n")) if line.strip()), b"")
    if any(link in last for link in _LINKS):
        return True
    return _exception_line(tail) is None if _HEAD.search(tail) else False


def ends_with_exception(tail: bytes) -> bool:
    """Tell whether the last thing in some output is an uncaught Python exception."""
    line = _exception_line(tail)
    return line is not None and tail.rstrip().endswith(line) and _EXCEPTION.match(line) is not None


def _exception_line(tail: bytes) -> bytes | None:
    """Find the first whole line after the last traceback's frames, without what stands before each line."""
    heads = list(_HEAD.finditer(tail))
    if not heads:
        return None
    head = heads[-1]
    # Some print every line with a prefix such as `[rank0]: `.
    prefix = head[1].rstrip() if head[1].strip() else b""
    *lines, _ = tail[head.end() :].split(b"\n")
    for line in lines[1:]:
        text = line.removeprefix(prefix).removeprefix(b" ") if prefix else line
        if text.strip() and not text.startswith((b" ", b"\t")):
            return text.rstrip()
    return None
