"""What stands before each displayed line."""

from __future__ import annotations

import socket

import pytest

from davincirunsdk.output.labels import Labels, parse_prefix


def test_plain_label() -> None:
    """Up to ten ranks have exactly `[rank N] ` in front."""
    names = {rank: f"rank {rank}" for rank in range(8)} | {-1: "scheduler"}
    assert Labels(names).prefix(3, 0) == "[rank 3] "
    assert Labels(names).prefix(-1, 0) == "[scheduler] "


def test_padding_keeps_the_label() -> None:
    """With more ranks the text begins in one column, and `[rank 3] ` is still what lines begin with."""
    labels = Labels({rank: f"rank {rank}" for rank in range(16)})
    assert labels.prefix(3, 0) == "[rank 3]  "
    assert labels.prefix(12, 0) == "[rank 12] "


def test_colour_differs_by_rank_and_is_closed() -> None:
    """A coloured label ends its colour, and neighbours differ."""
    labels = Labels({0: "rank 0", 1: "rank 1"}, colour=True)
    first, second = labels.prefix(0, 0), labels.prefix(1, 0)
    assert first.endswith("[rank 0]\x1b[0m ")
    assert first.split("[rank")[0] != second.split("[rank")[0]


def test_time_and_host() -> None:
    """Time and host stand where they are asked for; the rank's label stays as it is."""
    labels = Labels({0: "rank 0"}, parts=parse_prefix("time,host,rank"))
    day, clock, host, rank, number = labels.prefix(0, 1_700_000_000.25).split()
    assert day in ("2023-11-14", "2023-11-15")
    assert clock.endswith(".250")
    assert host == socket.gethostname().split(".")[0]
    assert f"{rank} {number}" == "[rank 0]"


def test_no_prefix() -> None:
    """`none` is no prefix."""
    assert Labels({0: "rank 0"}, parts=parse_prefix("none")).prefix(0, 0) == ""


@pytest.mark.parametrize("wrong", ["", "rank,rank", "date", "none,rank"])
def test_unknown_prefix(wrong: str) -> None:
    """A prefix that is not known is refused with the list of those that are."""
    with pytest.raises(ValueError, match="rank, time, host"):
        parse_prefix(wrong)
