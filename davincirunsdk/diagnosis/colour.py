"""A report in colour, for terminals."""

from __future__ import annotations

import re

_BOLD, _RED, _DIM, _END = "\x1b[1m", "\x1b[1;31m", "\x1b[2m", "\x1b[0m"
_LABEL = re.compile(r"[^\s|][^:：|]{0,24}[:：]")


def coloured(text: str) -> str:
    """Colour a report's text: its title and last line, the labels, and what is quoted from logs.

    Args:
        text: As `FailureReport.text`.

    Returns:
        The same text with escape sequences.
    """
    lines = text.split("\n")
    painted = [f"{_RED}{lines[0]}{_END}"]
    for place, line in enumerate(lines[1:], 1):
        if place == len(lines) - 1 and " (" in line:
            painted.append(f"{_BOLD}{line}{_END}")
        elif line.startswith("  | "):
            painted.append(f"{_DIM}  | {_END}{line[4:]}")
        elif label := _LABEL.match(line):
            painted.append(f"{_BOLD}{label[0]}{_END}{line[label.end() :]}")
        else:
            painted.append(line)
    return "\n".join(painted)
