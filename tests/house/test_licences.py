"""The list of licences is that of the packages that are really needed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

HOUSE = Path(__file__).parents[2]


@pytest.fixture
def licences() -> ModuleType:
    """The program that writes the list."""
    spec = importlib.util.spec_from_file_location("licences", HOUSE / "docs" / "licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_is_what_the_packages_say(licences: ModuleType) -> None:
    """Of versions that were looked at: other ones may be under another licence, and need something else."""
    listed = licences.listed()
    assert len(listed) > 6
    needed = licences.installed()
    looked_at = {name for name, one in needed.items() if listed.get(name, ("", ""))[1] == one.version}
    for name, one in needed.items():
        if looked_at.intersection(one.needed_by):
            assert name in listed
        if name in looked_at:
            assert listed[name][0] == one.licence


def test_the_list_holds_what_pyproject_asks_for(licences: ModuleType) -> None:
    """A dependency that is added or dropped there is so here."""
    project = re.search(r"^dependencies = \[\n(.*?)^\]", (HOUSE / "pyproject.toml").read_text(), re.M | re.S)
    assert project is not None
    asked = set(re.findall(r'^    "([\w-]+)', project[1], re.MULTILINE))
    rows = licences.LIST.read_text().splitlines()
    assert asked == {row.split(" | ")[0].removeprefix("| ") for row in rows if "davincirunsdk |" in row}
    assert asked < licences.listed().keys()
