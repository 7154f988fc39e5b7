"""From one worker's bytes to lines that are safe to show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from davincirunsdk.output.backlog import Gap
from davincirunsdk.output.text import (
    LINE_LIMIT,
    RankText,
    clean,
    fit,
    has_long_line,
    is_plain,
    is_plain_utf8,
    left_out,
    readable_size,
)


def feed(*pieces: bytes, colour: bool = False) -> tuple[RankText, list[str]]:
    """Give pieces of output to a fresh worker's text, and return it with the lines that ended."""
    text = RankText(colour=colour)
    return text, [line for piece in pieces for line in text.feed(piece)]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))), st.data())
def test_pieces_do_not_matter(lines: list[str], data: st.DataObject) -> None:
    """Plain lines come out the same wherever the output is cut, within characters too."""
    whole = "".join(f"{line}\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    text, shown = feed(*pieces)
    assert shown == lines
    assert text.finish(cleared=True) == []


@given(st.lists(st.binary(), max_size=8), st.booleans())
def test_any_bytes(pieces: list[bytes], colour: bool) -> None:
    """Whatever bytes come, no line breaks and no control codes but colours are left."""
    text, lines = feed(*pieces, colour=colour)
    for line in [*lines, *text.bars(), *text.finish(cleared=True)]:
        rest = line.replace("\x1b[", "") if colour else line
        assert not {"\n", "\r", "\x1b", "\x07", "\x08", "\x9b"} & set(rest)


@given(st.binary())
def test_plain_bytes_need_no_cleaning(data: bytes) -> None:
    """Bytes that pass the quick look are the same after cleaning, and the rest of them is cleaned."""
    lines = b"".join(line + b"\n" for line in data.split(b"\n"))
    if is_plain(lines) and is_plain_utf8(lines):
        assert "".join(f"{line}\n" for line in feed(lines)[1]) == lines.decode()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[38;5;9mred\x1b[m text", "\x1b[38;5;9mred\x1b[m text"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1b[2J\x1b[Hb\x1b[?25lc\x1b[2Kd", "abcd"),
        ("bell\x07 nul\0 back\x08", "bell nul back"),
        ("\x9b31mred\x9d0;title\x9ctext", "redtext"),
        ("\x1bPdevice\x1b\\text\x1b(B\x1b7", "text"),
        ("half \x1b[3", "half "),
        ("tab\tstays", "tab\tstays"),
        ("private \ue000 use", "private \ue000 use"),
    ],
)
def test_clean(raw: str, shown: str) -> None:
    """Colours stay and are closed; titles, links, cursor movement and control characters go."""
    assert clean(raw, colour=True) == shown
    assert "\x1b" not in clean(raw, colour=False)


def test_invalid_utf8() -> None:
    """Bytes that are no UTF-8 become replacement characters, and the rest of the line stays."""
    assert feed(b"ok\xff\xfe end\n")[1] == ["ok\ufffd\ufffd end"]


@pytest.mark.parametrize("size", [LINE_LIMIT - 1, LINE_LIMIT, LINE_LIMIT + 1, 3_000_000])
def test_long_line(size: int) -> None:
    """A line over the limit is cut and says so, one within it is whole; what follows is not touched."""
    data = b"x" * size + b"\nnext\n"
    lines = feed(data[:100], data[100:70_000], data[70_000:])[1]
    assert lines[1:] == ["next"]
    if size <= LINE_LIMIT:
        assert lines[0] == "x" * size
        assert not has_long_line(data)
    else:
        assert lines[0].startswith("x" * LINE_LIMIT + " ... line of ")
        assert readable_size(size) in lines[0]
        assert has_long_line(data)


def test_long_line_is_not_cut_within_a_character() -> None:
    """Where a long line is cut, no torn character is left."""
    assert "\ufffd" not in feed(b"x" + "\u4e2d".encode() * LINE_LIMIT + b"\n")[1][0]


def test_bar_shows_its_newest_state() -> None:
    """A bar without a newline shows what it was last set to, and is a line when it ends."""
    text, lines = feed(b"\r1/3", b"\r2/3\r", b"3/")
    assert lines == []
    assert text.bars() == ["3/"]
    text.feed(b"3")
    assert text.bars() == ["3/3"]
    assert text.finish(cleared=False) == ["3/3"]


def test_bar_ended_by_newline() -> None:
    """A bar's last state is a line, once, and none of its earlier states is."""
    text, lines = feed(b"".join(b"\r%d/200" % number for number in range(1, 201)) + b"\ndone\n")
    assert lines == ["200/200", "done"]
    assert text.finish(cleared=True) == []


def test_bar_state_that_was_shown_is_not_repeated() -> None:
    """A state that was a line already is not shown again when the bar ends."""
    text, _ = feed(b"\r100%")
    assert text.new_states(cleared=True) == ["100%"]
    assert text.feed(b"\nnext\n") == ["next"]


def test_windows_line_ends() -> None:
    """A carriage return before the newline is part of the line end."""
    text, lines = feed(b"a\r\n", b"b\r", b"\n\r\n", b"c\r\n")
    assert lines == ["a", "b", "", "c"]
    assert text.bars() == []


def test_cleared_bar() -> None:
    """A bar that its worker takes away is gone, but its last state can still be had as a line."""
    text, lines = feed(b"\r50%\r100%\r    \r")
    assert (lines, text.bars()) == ([], [])
    assert text.new_states(cleared=False) == []
    assert text.new_states(cleared=True) == ["100%"]


def test_message_over_a_bar() -> None:
    """A message printed in place of a bar is a line of its own, and the bar goes on below."""
    text, lines = feed(b"\r50%\r      \rmessage\n\r60%")
    assert lines == ["message"]
    assert text.bars() == ["60%"]


def test_nested_bars() -> None:
    """Bars that move the cursor up are rows that change in place, not lines without end."""
    step = b"\router %d/50\n\rinner %d/9\x1b[A"
    text, lines = feed(b"".join(step % (number, number % 9) for number in range(51)), b"\n\n")
    assert len(lines) <= 2, "only what came before the first movement"
    assert text.new_states(cleared=False) == ["outer 50/50", "inner 5/9"]
    assert text.feed(b"training done\n") == ["training done"]
    assert text.between_lines


def test_skip() -> None:
    """Lines that missing output has torn are not shown, and each of them is counted once."""
    text, _ = feed(b"begin")
    assert text.skip(Gap(0, 2, 50, torn=True)) == Gap(0, 3, 50 + len(b"begin"), torn=True)
    assert text.feed(b"in the middle of the torn line") == []
    assert text.skip(Gap(0, 1, 30, torn=False)).lines == 0
    assert text.skip(Gap(0, 0, 30, torn=True)).lines == 1
    assert text.feed(b"rest of a line\nwhole\n") == ["whole"]


@pytest.mark.parametrize("ended", [True, False])
def test_the_rest_of_a_torn_line_is_counted(ended: bool) -> None:
    """What follows a gap without a newline is left out, too, and counted: in the next gap or by a line."""
    text = RankText(colour=False)
    block = b"x" * 1_000_000
    text.skip(Gap(0, 0, 10, torn=True))
    assert text.feed(block) == text.feed(block) == []
    assert text.skip(Gap(0, 0, 10, torn=True)).size == 2_000_010
    said = text.feed(block * 3 + (b"\nnext\n" if ended else b"")) + text.finish(cleared=True)
    assert said == ["... 3.0 MB more of the line left out; the log file has all of it", "next"][: 1 + ended]
    text.skip(Gap(0, 0, 10, torn=True))
    assert text.feed(b"end of a usual line\nnext\n") == ["next"]


def test_what_is_left_out_is_said() -> None:
    """Lines are counted as people do, and a part of a line has no number."""
    said = [left_out(lines, 1200, "/logs").split(" (")[0] for lines in (0, 1, 2)]
    assert said == ["... part of a line", "... 1 line", "... 2 lines"]


def test_fit_counts_wide_characters() -> None:
    """A row is cut to terminal columns, of which a Chinese character takes two."""
    assert fit("ab\u4e2d\u6587", 4) == "ab\u4e2d"
    assert fit("ab\u4e2d\u6587", 5) == "ab\u4e2d"
    assert fit("e\u0301x", 2) == "e\u0301x"
