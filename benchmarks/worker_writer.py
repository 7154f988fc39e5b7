"""A worker that writes lines as fast as the pipe takes them.

Arguments: folder of the notes, number of MiB, bytes per write. All writers begin together and stay
until told to go, so that what supervises them can still be asked.
"""

import os
import sys
import time

LINE = 128
BLOCK = 1 << 20
RANKS = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK")


def first_block(rank: int) -> bytearray:
    """Make a MiB of lines, each different."""
    lines = (f"rank {rank} line {number:5d} loss ".ljust(LINE - 1, "-") for number in range(BLOCK // LINE))
    return bytearray("\n".join([*lines, ""]).encode())


def number_block(block: bytearray, number: int) -> None:
    """Make it the block of that number: no two blocks of a file are equal."""
    block[0:16] = b"block %10d" % number


def main() -> None:
    """Write."""
    folder, size, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = int(next(os.environ[name] for name in RANKS if name in os.environ))
    block = first_block(rank)
    note(folder, f"{rank}.ready", str(os.getpid()))
    wait(folder, "go")
    begin = time.time()
    for number in range(size):
        number_block(block, number)
        view = memoryview(block)
        for start in range(0, BLOCK, step):
            rest = view[start : start + step]
            while rest:
                rest = rest[os.write(1, rest) :]
    note(folder, f"{rank}.written", f"{begin!r} {time.time()!r}")
    wait(folder, "end")


def note(folder: str, name: str, text: str) -> None:
    """Leave a note that is whole when it is seen."""
    with open(f"{folder}/{name}.tmp", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}")


def wait(folder: str, name: str) -> None:
    """Wait for a note."""
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.001)


if __name__ == "__main__":
    main()
