"""Write licences.md: what a plain `pip install davincirunsdk` brings along, and under which licence.

For session `licences`, which runs it on the oldest Python: that needs every package that any newer one
does. `tests/house/test_licences.py` holds the list to pyproject.toml and to what is installed.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "davincirunsdk"
LIST = Path(__file__).with_name("licences.md")
_HEAD = f"""# Licences of the packages that {PROJECT} needs

Made by `nox -s licences` from the packages' own metadata. An extra, such as `[ray]`, brings more.

| package | licence | version looked at | needed by |
|---|---|---|---|
"""


class Package(NamedTuple):
    """One row.

    Attributes:
        licence: As the package's metadata says it.
        version: The installed one.
        needed_by: Names of the packages that ask for it.
    """

    licence: str
    version: str
    needed_by: list[str]


def installed() -> dict[str, Package]:
    """Look up everything that the project needs here, directly or not, by canonical name."""
    found: dict[str, Package] = {}
    waiting = [PROJECT]
    while waiting:
        asking = waiting.pop()
        for text in metadata.requires(asking) or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            name = canonicalize_name(wanted.name)
            if name not in found:
                found[name] = Package(_licence(name), metadata.version(name), [])
                waiting.append(name)
            found[name].needed_by.append(asking)
    return found


def listed() -> dict[str, tuple[str, str]]:
    """Read the list: for each package licence and version."""
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]+) \| ([\d.]+) \|", LIST.read_text(), re.MULTILINE)
    return {name: (licence, version) for name, licence, version in rows}


def _licence(name: str) -> str:
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return expression
    kinds = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if "License ::" in text]
    # Some put the whole text here.
    return " / ".join(kinds) or str(about.get("License", "unknown")).splitlines()[0]


def main() -> None:
    """Write the list anew."""
    rows = (
        f"| {name} | {one.licence} | {one.version} | {', '.join(sorted(one.needed_by))} |\n"
        for name, one in sorted(installed().items())
    )
    LIST.write_text(_HEAD + "".join(rows))


if __name__ == "__main__":
    main()
