"""What waits for the display: bounded, fair, in order."""

from __future__ import annotations

import threading

from davincirunsdk.output.backlog import Backlog, Gap
from davincirunsdk.types import LogBlock


def block(rank: int, data: bytes) -> LogBlock:
    return LogBlock(rank=rank, data=data, time=0.0)


def take_all(backlog: Backlog) -> list[LogBlock | Gap]:
    backlog.close()
    taken: list[LogBlock | Gap] = []
    while (some := backlog.take(1000, None)) is not None:
        taken += some
    return taken


def test_order_of_arrival() -> None:
    """Blocks of all ranks come out in the order they came in."""
    backlog = Backlog(1 << 20)
    blocks = [block(number % 3, b"%d\n" % number) for number in range(100)]
    for each in blocks:
        backlog.put(each)
    assert take_all(backlog) == blocks


def test_flood_leaves_others_alone() -> None:
    """One rank's flood costs its own oldest output, counted exactly, and none of another rank's."""
    backlog = Backlog(100_000)
    backlog.put(block(1, b"quiet\n"))
    for number in range(10_000):
        backlog.put(block(0, b"%06d\n" % number))
    taken = take_all(backlog)
    kept = [item for item in taken if isinstance(item, LogBlock)]
    gaps = [item for item in taken if isinstance(item, Gap)]
    flood = [item.data for item in kept if item.rank == 0]
    assert [item.data for item in kept if item.rank == 1] == [b"quiet\n"]
    assert len(gaps) == 1
    assert gaps[0] == Gap(0, 10_000 - len(flood), 7 * (10_000 - len(flood)), torn=False)
    assert flood == [b"%06d\n" % number for number in range(10_000 - len(flood), 10_000)]
    assert taken.index(gaps[0]) < taken.index(kept[-1])


def test_bound_is_in_bytes_of_memory() -> None:
    """A million empty lines in blocks of their own do not outgrow the bound by their overhead."""
    backlog = Backlog(100_000)
    for _ in range(20_000):
        backlog.put(block(0, b"\n"))
    kept = [item for item in take_all(backlog) if isinstance(item, LogBlock)]
    assert 0 < len(kept) < 1000


def test_block_larger_than_the_bound() -> None:
    """Of a block that cannot fit the newest lines stay; the others are counted."""
    backlog = Backlog(1000)
    backlog.put(block(0, b"".join(b"%04d\n" % number for number in range(1000))))
    gap, kept = take_all(backlog)
    assert isinstance(gap, Gap)
    assert isinstance(kept, LogBlock)
    assert 100 < len(kept.data) <= 1000
    assert kept.data.endswith(b"0998\n0999\n")
    assert gap == Gap(0, 1000 - len(kept.data) // 5, 5000 - len(kept.data), torn=False)


def test_line_larger_than_the_bound() -> None:
    """A line that cannot fit is left out and counted, with what it tears."""
    backlog = Backlog(1000)
    backlog.put(block(0, b"x\n" + b"rest" * 1000))
    assert take_all(backlog) == [Gap(0, 1, 4002, torn=True)]


def test_take_waits() -> None:
    """Taking waits without a time limit until something comes, or until the end."""
    backlog = Backlog(1000)
    taken: list[list[LogBlock | Gap] | None] = []
    thread = threading.Thread(target=lambda: taken.extend(backlog.take(1000, None) for _ in range(2)))
    thread.start()
    backlog.put(block(0, b"a\n"))
    backlog.close()
    thread.join(10)
    assert taken[1:] == [None]
    assert [item.data for item in taken[0] or [] if isinstance(item, LogBlock)] == [b"a\n"]


def test_nothing_after_close() -> None:
    """What comes after the end is not shown."""
    backlog = Backlog(1000)
    backlog.close()
    backlog.put(block(0, b"late\n"))
    assert take_all(backlog) == []
