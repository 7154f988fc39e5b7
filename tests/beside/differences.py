"""Every difference between 0.1.5 and this package that the scenarios show, with its reason.

`python tests/beside/differences.py` prints the table of README.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scenarios import Seen

REASONS: dict[str, tuple[str, str]] = {
    # what: (what a user of 0.1.5 finds, why)
    "stdout": (
        "each line of a worker on standard output begins with `[rank N] `",
        "lines of several workers can be told apart; `echo='none'` gives silence",
    ),
    "file events": (
        "`<job>-events.jsonl` stands beside the log files",
        "starts, ends and the report as data, for programs and `davincirunctl`",
    ),
    "file latest": (
        "`latest` beside the log files is a link to the newest run's first log",
        "`tail -f log/latest` needs no name",
    ),
    "file table": (
        "the converted rank table is written to `$MA_HOME/rank_table`; 0.1.5 failed on this v0.1 table",
        "any form of v0.1 is read",
    ),
    "log after failure": (
        "a worker that was still starting when another failed has no last words in its log",
        "the others are told within milliseconds; 0.1.5 looked once a second",
    ),
    "returned 1": (
        "1 after a failure with `raise_exception=False`, where 0.1.5 gave the worker's exit code",
        "0 and 1 are documented; the code is in `manager` and in the report",
    ),
    "returned table": (
        "a v0.1 table whose pods have no number at their end is used, where 0.1.5 raised ValueError",
        "the order of the pods in the table counts then",
    ),
    "returned named table": (
        "a table that RANK_TABLE_FILE names and that is not there is an error, where 0.1.5 gave False",
        "a job without the ranks that were meant is worse than an error",
    ),
    "returned without a table": (
        "PlatformError says which variable or argument to set, where 0.1.5 raised a bare RuntimeError",
        "it is a RuntimeError still",
    ),
    "env torch": (
        "RANK, WORLD_SIZE, MASTER_ADDR and the other names of torchrun are set as well",
        "scripts for torch run unchanged; `framework='none'` leaves them out",
    ),
    "env OMP_NUM_THREADS": (
        "OMP_NUM_THREADS is the machine's cores divided by the workers, unless set",
        "without it, workers fight for the cores",
    ),
    "env RANK_START": ("RANK_START is set in any case", "0.1.5 set it after `init_rank_table()` only"),
    "files of a failed start": (
        "no log folder is left by a command that is not there",
        "nothing is half-written",
    ),
}
TORCH = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
    " ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"
    " TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_ERROR_FILE".split()
)


def differences(scenario: str, old: Seen, new: Seen) -> set[str]:
    """Name each difference by its key in `REASONS`, or in words that stand for themselves.

    Args:
        scenario: Name of the scenario.
        old: What 0.1.5 left.
        new: What this package left.
    """
    found = set()
    if [line.rpartition("] ")[2] for line in new.stdout] != old.stdout and "fails" not in scenario:
        if "v0.1" not in scenario:
            found.add(f"lines on standard output: {old.stdout} and {new.stdout}")
    if new.stdout != old.stdout:
        found.add("stdout")
    found |= _returned(old, new)
    ran = bool(old.env) and bool(new.env)
    found |= _files(scenario, old, new)
    if ran:
        for rank in sorted({*old.env, *new.env}):
            found |= _variables(old.env.get(rank), new.env.get(rank))
        if any(new.cwd[rank] != old.cwd[rank] for rank in {*old.cwd} & {*new.cwd}):
            found.add(f"folders of the workers: {old.cwd} and {new.cwd}")
        if old.logs != new.logs:
            found.add("log after failure" if "fails" in scenario else f"logs: {old.logs} and {new.logs}")
    return found


def table() -> str:
    """The differences as README shows them."""
    rows = [f"| {what} | {why} |" for what, why in REASONS.values()]
    return "\n".join(["| what changed since 0.1.5 | why |", "| --- | --- |", *rows])


def _returned(old: Seen, new: Seen) -> set[str]:
    if (old.returned, old.exit_code) == (new.returned, new.exit_code):
        return set()
    known = {
        ("returned 3", "returned 1"): "returned 1",
        ("raised ValueError", "table True returned 0"): "returned table",
        ("returned False", "raised RankTableMissingError"): "returned named table",
        ("raised RuntimeError True False False", "raised PlatformError True False False"): (
            "returned without a table"
        ),
        ("raised FileNotFoundError False False True", "raised CommandNotFoundError False False True"): "",
        ("raised FileNotFoundError False False True", "raised RankTableMissingError False False True"): "",
    }
    key = known.get((old.returned, new.returned))
    if key is None:
        return {f"returned: {old.returned!r} and {new.returned!r}"}
    return {key} - {""}


def _files(scenario: str, old: Seen, new: Seen) -> set[str]:
    found = set()
    for name in {*old.files} ^ {*new.files}:
        if name.endswith("/latest"):
            found.add("file latest")
        elif name.endswith("-events.jsonl"):
            found.add("file events")
        elif name.startswith("rank_table"):
            found.add("file table")
        elif name == "log" and name in old.files:
            found.add("files of a failed start")
        elif "v0.1" not in scenario:
            found.add(f"file {name} of {'0.1.5' if name in old.files else 'this package'} only")
    return found


def _variables(old: dict[str, str] | None, new: dict[str, str] | None) -> set[str]:
    if old is None or new is None:
        return set()
    found = set()
    for name in {*old, *new}:
        if old.get(name) == new.get(name):
            continue
        if name in TORCH and name not in old:
            found.add("env torch")
        elif f"env {name}" in REASONS and name not in old:
            found.add(f"env {name}")
        else:
            found.add(f"variable {name}: {old.get(name)!r} and {new.get(name)!r}")
    return found


if __name__ == "__main__":
    print(table())
