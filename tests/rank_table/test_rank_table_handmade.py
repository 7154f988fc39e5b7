"""Tables written by hand, and files that are not tables: what is wrong is named as people name it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rank_table_samples import sample, two_servers

from davincirunsdk.cluster import file_name, printable
from davincirunsdk.errors import RankTableError
from davincirunsdk.rank_table import parse
from davincirunsdk.rank_table.cli import main
from davincirunsdk.rank_table.file import MOST_BYTES, Patience, wait_for
from davincirunsdk.rank_table.handmade import find_slip

GOOD = """{
  "version": "1.0",
  "status": "completed",
  "server_list": [
    {"server_id": "a", "device": [
      {"device_id": "0", "rank_id": "0"},
      {"device_id": "1", "rank_id": "1"}
    ]}
  ]
}
"""
ENDLESS = Patience(limit=1800.0, missing=1800.0, missing_folder=1800.0)
SHORT = Patience(limit=1800.0, missing=0.6, missing_folder=0.0)


@pytest.mark.parametrize(
    ("old", "new", "found", "line"),
    [
        ('"1.0",', '"1.0", // mine', "a comment", 2),
        ('"1.0",', '"1.0", # mine', "a comment", 2),
        ('"1.0",', '"1.0", /* mine */', "a comment", 2),
        ("{\n", "// mine\n{\n", "a comment", 1),
        ("    ]}", "      ...\n    ]}", "dots that stand for something left out", 8),
        ("    ]}", "      \u2026\n    ]}", "dots that stand for something left out", 8),
        ('"version"', "'version'", 'the quotation mark "\'"', 2),
        ('"version"', "\u201cversion\u201d", "the quotation mark '\u201c'", 2),
        ('"version"', "\uff02version\uff02", "the quotation mark '\uff02'", 2),
        ('"version":', '"version"\uff1a', "a full-width '\uff1a'", 2),
        ('"1.0",', '"1.0"\uff0c', "a full-width '\uff0c'", 2),
        ('  "version"', '\u3000"version"', "an invisible character (U+3000)", 2),
        ('  "version"', '\u00a0"version"', "an invisible character (U+00A0)", 2),
        ('"rank_id": "1"}', '"rank_id": "1"},', "a comma with nothing after it", 7),
        ('"rank_id": "1"}', '"rank_id": "1",}', "a comma with nothing after it", 7),
        ('"0"},\n', '"0"}\n', "no comma between two values", 6),
        ('"1.0",', '"1.0"', "no comma between two members", 2),
        ('"1.0",', '"1.0",,', "a comma with nothing before it", 2),
        ('"1.0",', '"1.0";', "a ';'", 2),
        ('"version":', '"version" =', "a '='", 2),
        ('"version":', '"version"', "no colon after a key", 2),
        ('"version": "1.0"', '"version"', "no colon after a key", 2),
        ('"version"', "version", "a key without quotes, 'version'", 2),
        ('"1.0"', "one", "a text without quotes, 'one'", 2),
        ('"1.0"', "True", "the word 'True'", 2),
        ('"1.0"', "1.0.0", "a number that JSON cannot read", 2),
        ('"1.0"', "01", "a number that JSON cannot read", 2),
        ('"1.0"', "{version}", "a placeholder, '{version}', that nobody has filled in", 2),
        ('"1.0"', "<version>", "a placeholder, '<version>', that nobody has filled in", 2),
        ('"1.0"', "$VERSION", "a placeholder, '$VERSION', that nobody has filled in", 2),
        ('"1.0"', '"1.0', "a text that is not closed on its line", 2),
        ('"1.0"', '"C:\\data"', "a single backslash in a text", 2),
        ('"1.0"', '"1\t0"', "a tab or another control character in a text", 2),
        ("    ]}\n", "    }\n", "a '}' while the '[' of line 5 is still open", 8),
        ("  ]\n}\n", '  , "x": 1\n}\n', "a key and a value in a list: the '[' of line 4 is still open", 9),
        ("  ]\n}\n", "  ]\n}}\n", "a '}' too many", 10),
        ("  ]\n}\n", "  ]\n}\n{}", "more text after the end of the table", 11),
        ("{\n", "rank table:\n{\n", "text that is not JSON", 1),
        ("  ]\n}\n", "  ]\n", "text that ends early: this '{' is not closed", 1),
        ('"1.0",', '"1.0', "a text that is not closed on its line", 2),
    ],
)
def test_what_people_write(old: str, new: str, found: str, line: int) -> None:
    """The thing is named, with its line, and the line is shown."""
    assert GOOD.count(old) >= 1
    text = GOOD.replace(old, new, 1)
    with pytest.raises(RankTableError) as caught:
        parse(text, path="t.json")
    shown = text.split("\n")[line - 1].strip()
    start = f"rank table t.json: found invalid JSON: {found} at line {line}, column "
    assert str(caught.value).startswith(start), str(caught.value)
    if shown.isprintable():
        assert f"({shown})" in str(caught.value)
    assert "; expected " in str(caught.value)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (GOOD.encode("utf-16"), "text in UTF-16"),
        (
            GOOD.replace('"a"', '"\u4e3b\u673a"').encode("gbk"),
            "bytes that are not UTF-8 at line 5, column 20",
        ),
        (b"\x1f\x8b\x08\0", "a compressed file"),
        (b"", "empty text"),
        (b" \n", "empty text"),
    ],
)
def test_what_editors_save(data: bytes, found: str) -> None:
    """Other encodings, archives and nothing at all are named."""
    with pytest.raises(RankTableError) as caught:
        parse(data, path="t.json")
    assert f"found invalid JSON: {found}" in str(caught.value)


def test_a_long_line_is_shown_around_the_place() -> None:
    """Of a table in one line the part around the fault is shown."""
    text = json.dumps(json.loads(GOOD) | {"note": "x" * 500}).replace('"status"', "'status'")
    with pytest.raises(RankTableError) as caught:
        parse(text, path="t.json")
    assert len(str(caught.value)) < 300
    assert "'status'" in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_good_text_has_no_slip(value: object) -> None:
    """What a JSON writer makes has nothing that JSON does not have."""
    assert find_slip(json.dumps(value)) is None
    assert find_slip(json.dumps(value, indent=1, ensure_ascii=False)) is None


@given(st.text("{}[],:\"\\'/.#ab1\n \u201c\uff1a<>$", max_size=30))
def test_any_text_is_judged_as_the_decoder_does(text: str) -> None:
    """Whatever the text, it is read to its end or a place inside is named; never one without the other."""
    slip = find_slip(text)
    try:
        json.loads(text)
    except ValueError:
        assert slip is not None
        assert 0 <= slip.at <= len(text)
    else:
        assert slip is None


async def test_odd_files(tmp_path: Path) -> None:
    """A pipe, a device, a socket's folder: an error at once, whatever the patience; nothing is read."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(RankTableError) as caught:
            await asyncio.wait_for(wait_for(path, patience=ENDLESS), 20)
        assert str(caught.value) == (
            f"rank table {path}: found {kind}; expected a regular file: write the table to one and name that"
        )


async def test_a_file_larger_than_any_table(tmp_path: Path) -> None:
    """A huge file is refused by its size, without being judged."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(RankTableError, match=r"found more than 64 MiB"):
        await asyncio.wait_for(wait_for(path, patience=ENDLESS), 20)


def test_a_fault_in_every_row_ends_the_reading() -> None:
    """A rule that every row breaks is told a bounded number of times, and the rest is not looked at."""
    document = two_servers()
    document["server_list"][0]["device"] = [{"device_id": "x", "rank_id": "y"}] * 5000
    with pytest.raises(RankTableError) as caught:
        parse(json.dumps(document), path="t.json")
    assert str(caught.value).startswith("rank table t.json has 1000 faults or more:\n")
    assert len(str(caught.value).splitlines()) == 52


@pytest.mark.parametrize("content", [b"", sample("broken_cut")])
async def test_a_cut_file_that_nobody_is_writing(tmp_path: Path, content: bytes) -> None:
    """Empty or cut for minutes, where no platform writes it: an error within seconds."""
    path = tmp_path / "t.json"
    path.write_bytes(content)
    os.utime(path, (time.time() - 300, time.time() - 300))
    with pytest.raises(RankTableError, match=r"found invalid JSON: (empty text|text that ends early)"):
        await asyncio.wait_for(wait_for(path, patience=SHORT), 20)


async def test_a_cut_file_that_somebody_is_writing(tmp_path: Path) -> None:
    """A file that changed a moment ago is waited for, and so is any on a platform that writes tables."""
    path = tmp_path / "t.json"
    path.write_bytes(sample("broken_cut"))
    lines: list[str] = []
    for patience in (SHORT, ENDLESS):
        if patience is ENDLESS:
            os.utime(path, (time.time() - 300, time.time() - 300))
        waiting = asyncio.create_task(wait_for(path, patience=patience, notify=lines.append))
        done, _ = await asyncio.wait({waiting}, timeout=1.5)
        assert not done
        waiting.cancel()
    assert "it is written only in part so far" in lines[0]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "\x1b[31mred", "", "." * 300, "\udcff"])
def test_names_lead_nowhere(name: str) -> None:
    """A name from a table, pod or variable is shown escaped, and never leads out of a folder."""
    made = file_name(name)
    assert made
    assert "/" not in made
    assert not made.startswith(".")
    assert len(made.encode()) <= 100
    assert made.isprintable()
    assert printable(name).isprintable()


def test_keys_of_a_table_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Keys, server ids and pods are shown escaped, by the error and by the command."""
    with pytest.raises(RankTableError) as caught:
        parse(json.dumps({"\x1b[2Jx": 1}))
    assert "\x1b" not in str(caught.value)
    document = two_servers()
    document["server_list"][0]["server_id"] = "\x1b]0;x\x07"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    shown = CliRunner().invoke(main, ["show", str(path)])
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
