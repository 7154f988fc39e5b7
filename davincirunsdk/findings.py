"""What a check finds: of rank tables, of a machine before a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1
    FAULT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found.

    Attributes:
        where: What it is about: a JSON path such as `server_list[0].device[3].rank_id`, the name of a
            check such as `shared memory`, or "" for a whole text.
        found: What is there, in words.
        expected: What should be there, or what to do; "" where all is well.
        level: How bad it is.
    """

    where: str
    found: str
    expected: str = ""
    level: Level = Level.FAULT

    @property
    def fatal(self) -> bool:
        """True for a fault, False for what is odd or well."""
        return self.level is Level.FAULT

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}found {self.found}" + (f"; expected {self.expected}" if self.expected else "")
