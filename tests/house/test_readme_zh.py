"""The Chinese README says as much as the English one: same headings, commands, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
ENGLISH = (HOUSE / "README.md").read_text()
CHINESE = (HOUSE / "README.zh-CN.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Part = Callable[[str], Sequence[object] | set[str]]


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """The language and the lines of every code block, without comments: these are translated."""
    found = []
    for language, code in BLOCK.findall(text):
        # A shebang and #SBATCH are not comments: nothing stands between their sign and the word.
        lines = [re.sub(r"(^|\s+)# .*$", "", line) for line in code.splitlines()]
        found.append((language, [line for line in lines if line.strip()]))
    return found


def headings(text: str) -> list[int]:
    """The level of every heading, in order."""
    return [len(signs) for signs in re.findall(r"^(#+) ", BLOCK.sub("", text), re.MULTILINE)]


def tables(text: str) -> list[list[int]]:
    """For every table, how many cells each of its rows has."""
    found: list[list[int]] = []
    inside = False
    for line in BLOCK.sub("", text).splitlines():
        if line.startswith("|") and not inside:
            found.append([])
        inside = line.startswith("|")
        if inside:
            found[-1].append(line.count("|") - 1)
    return found


def pictures(text: str) -> list[str]:
    """The files of the pictures, in order."""
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)


def options(text: str) -> set[str]:
    """Every option that is named, in a block or in a sentence."""
    return set(re.findall(r"--[a-z][\w-]+", text))


def names(text: str) -> set[str]:
    """What stands between single backticks in sentences and tables: names, paths, short commands."""
    return set(re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)))


@pytest.mark.parametrize("part", [headings, blocks, tables, pictures, options, names])
def test_both_languages_hold_the_same(part: Part) -> None:
    """What one README shows, the other shows too, in the same order."""
    assert part(CHINESE) == part(ENGLISH)


@pytest.mark.parametrize("part", [headings, blocks, tables, pictures, options, names])
def test_there_is_something_to_compare(part: Part) -> None:
    """A pattern that finds nothing would find both alike."""
    assert len(part(ENGLISH)) >= 4


def test_each_links_to_the_other_and_their_pictures_are_there() -> None:
    """A reader finds his language, and no picture is broken."""
    assert "(README.zh-CN.md)" in ENGLISH
    assert "(README.md)" in CHINESE
    for picture in pictures(ENGLISH):
        assert (HOUSE / picture).is_file(), picture
