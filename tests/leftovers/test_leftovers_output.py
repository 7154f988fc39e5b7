"""What a helper still carries when its worker ends comes to the log, within a bound."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from recorded import in_time

from davincirunsdk import DistributedRuntimeError, FMKManager, RunResult
from davincirunsdk.leftovers.ending import SILENCE

pytestmark = pytest.mark.usefixtures("job_folder")


async def run(
    script: str, *, count: int = 1, grace_period: float = 15.0
) -> RunResult | DistributedRuntimeError:
    """Run a script of bash to its end."""
    try:
        async with FMKManager(
            ["bash", "-c", script], nproc_per_node=count, grace_period=grace_period
        ) as manager:
            return await manager.wait()
    except DistributedRuntimeError as error:
        return error


def logs() -> list[str]:
    """Read all that the workers have printed."""
    return [path.read_text() for path in sorted(Path("log").glob("*-proc-*.txt"))]


async def test_the_cause_behind_tee_is_in_log_and_report() -> None:
    """A worker that ends at once behind `tee` has its last words everywhere, every time."""
    for _ in range(5):
        ended = await run("exec > >(tee -a copy) 2>&1; echo the cause; exit 3")
        assert isinstance(ended, DistributedRuntimeError)
        assert Path("log").joinpath(ended.root_cause.log_path.name).read_text() == "the cause\n"
        assert "the cause" in str(ended)


@pytest.mark.parametrize("code", [0, 3])
async def test_a_slow_filter_has_the_grace_period(code: int) -> None:
    """It may think longer between two lines than any other helper may be silent."""
    lines = "echo 1; echo 2; echo 3; echo 4"
    pause = f'sleep {0.3 * SILENCE}; [ "$line" = 3 ] && sleep {1.1 * SILENCE}'
    filter_ = f'while read -r line; do {pause}; echo "$line"; done'
    ended = await run(f"({lines}) > >({filter_}); exit {code}")
    assert logs() == ["1\n2\n3\n4\n"]
    assert isinstance(ended, DistributedRuntimeError if code else RunResult)


async def test_a_filter_has_no_longer_than_the_grace_period() -> None:
    """One that never ends is killed with what is left."""
    began = time.monotonic()
    await run("echo first > >(cat; sleep 600); true", grace_period=1.0)
    assert time.monotonic() - began < in_time(1.0 + 2.0)
    assert logs() == ["first\n"]


@pytest.mark.parametrize("code", [0, 3])
async def test_a_child_that_prints_later(code: int) -> None:
    """A helper in the background may go on as long as it says something."""
    await run(f"(for n in 1 2 3; do sleep {0.6 * SILENCE}; echo late $n; done) & echo first; exit {code}")
    assert logs() == ["first\nlate 1\nlate 2\nlate 3\n"]


async def test_a_silent_helper_is_asked_to_end() -> None:
    """One that holds the output and prints nothing holds the job for some seconds only."""
    began = time.monotonic()
    ended = await run("sleep 600 & echo first")
    assert SILENCE < time.monotonic() - began < in_time(SILENCE + 2.0)
    assert isinstance(ended, RunResult)
    assert [leftover.command for leftover in ended.leftovers] == ["sleep"]


async def test_a_helper_without_the_output_is_not_waited_for() -> None:
    """What carries nothing to the log is ended at once."""
    began = time.monotonic()
    await run("sleep 600 >/dev/null 2>&1 & echo first")
    assert time.monotonic() - began < in_time(SILENCE)


async def test_a_helper_that_never_falls_silent_has_an_end() -> None:
    """One that prints for ever has the grace period at most, and nothing before is lost."""
    began = time.monotonic()
    await run("(trap '' TERM; while :; do echo more; sleep 0.1; done) & echo first", grace_period=3.0)
    assert time.monotonic() - began < in_time(3.0 + 2.0)
    (log,) = logs()
    assert log.count("more\n") >= 10 / in_time(1.0)


@pytest.mark.skipif(shutil.which("script") is None, reason="needs script")
async def test_behind_script() -> None:
    """A recorder that gives the worker a terminal of its own has all it printed."""
    await run(f"script -qec '{sys.executable} -c \"print(1); print(2)\"' /dev/null")
    assert logs()[0].split() == ["1", "2"]
