"""Faults and oddities of a rank table, each with its place; and the readers that note them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from davincirunsdk.cluster import printable
from davincirunsdk.errors import RankTableError
from davincirunsdk.findings import Finding, Level

if TYPE_CHECKING:
    from davincirunsdk.rank_table.table import Json

MOST_KEPT = 1000
"""Faults after which a text is not looked at any further: one wrong rule can make one per device."""

MOST_LISTED = 50
"""Findings written out in one message; a table with one wrong rule can have a fault per device."""

UNKNOWN = -1
"""Stands for a number that could not be read; rules leave it alone, for its fault is noted already."""

A_NUMBER = "a whole number in decimal digits, as a string"


class Missing:
    """The value of a key that is not there."""


MISSING = Missing()


class TooManyFaults(Exception):
    """Ends the reading of a text; never leaves this package."""


class Findings:
    """Collects what the readers and rules find in one text."""

    def __init__(self) -> None:
        self.faults: list[Finding] = []
        self.warnings: list[Finding] = []
        self.rewrite = False  # HCCL would refuse the text as it stands, though its content is right

    def fault(self, where: str, found: str, expected: str) -> None:
        """Note something that makes the table unusable.

        Raises:
            TooManyFaults: Enough is known of this table.
        """
        self.faults.append(Finding(where=where, found=found, expected=expected))
        if len(self.faults) >= MOST_KEPT:
            raise TooManyFaults

    def warn(self, where: str, found: str, expected: str) -> None:
        """Note something odd that does not keep the table from being used."""
        self.warnings.append(Finding(where=where, found=found, expected=expected, level=Level.WARNING))


def error_of(faults: list[Finding], path: str | None) -> RankTableError:
    """Make the one error that lists every fault; its `where` is the first one's."""
    return RankTableError(report(faults, path), path=path, where=faults[0].where)


def report(findings: list[Finding], path: str | None) -> str:
    """Word findings for people, one per line, the file first."""
    name = path if path is not None else "the given text"
    if len(findings) == 1:
        return f"rank table {name}: {findings[0]}"
    counted = f"{MOST_KEPT} faults or more" if len(findings) >= MOST_KEPT else f"{len(findings)} faults"
    lines = [f"rank table {name} has {counted}:"]
    lines += [f"  {finding}" for finding in findings[:MOST_LISTED]]
    if len(findings) > MOST_LISTED:
        lines.append(f"  ... and {len(findings) - MOST_LISTED} more")
    return "\n".join(lines)


def show(value: Json | Missing) -> str:
    """Word a JSON value for a message: short, and never longer than a line."""
    if isinstance(value, Missing):
        return "nothing (the key is missing)"
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    dumped = json.dumps(value, ensure_ascii=False)
    text = printable(dumped[:100])
    if len(dumped) > 100:
        return f"{text[:60]}... ({len(dumped)} characters)"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def digits(text: str) -> bool:
    """Tell whether a text is a decimal number that fits 32 bits or so; HCCL reads no other."""
    return len(text) <= 10 and text.isascii() and text.isdigit()


def number(value: Json | Missing, where: str, findings: Findings) -> int:
    """Read a whole number that should be written as a string; a JSON number is taken as well.

    Returns:
        The number, or `UNKNOWN` after noting the fault.
    """
    if isinstance(value, str) and digits(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**10:
        findings.rewrite = True
        return value
    findings.fault(where, show(value), A_NUMBER)
    return UNKNOWN


def text(value: Json | Missing, where: str, findings: Findings, *, expected: str, most: int) -> str:
    """Read a name that must be there and not be empty.

    Returns:
        The name, or "" after noting the fault.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        findings.rewrite = True
        return str(value)
    if isinstance(value, str) and value.strip():
        if len(value) > most:
            findings.fault(where, f"a text of {len(value)} characters", f"at most {most} characters")
        return value
    findings.fault(where, show(value), expected)
    return ""


def objects(
    value: Json | Missing, where: str, findings: Findings, *, expected: str
) -> list[tuple[int, dict[str, Json]]]:
    """Read a list of objects that must not be empty.

    Returns:
        The objects with their places in the list; what is no object is noted and left out.
    """
    if not isinstance(value, list) or not value:
        findings.fault(where, show(value), f"a list of {expected}, at least one")
        return []
    kept = []
    for index, item in enumerate(value):
        if isinstance(item, dict):
            kept.append((index, item))
        else:
            findings.fault(f"{where}[{index}]", show(item), f"an object: one of the {expected}")
    return kept
