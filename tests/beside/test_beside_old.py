"""The documented scripts under 0.1.5 and under this package: every difference has a reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from differences import REASONS, differences, table
from scenarios import SCENARIOS, Scenario, Seen, cleared, run

pytestmark = [pytest.mark.beside, pytest.mark.timeout(150)]
OLD = os.environ.get("DAVINCIRUN_OLD_PYTHON", "")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    """What each scenario left under both, in one folder after the other so that paths are equal."""
    assert OLD, "DAVINCIRUN_OLD_PYTHON has to name an interpreter with davincirunsdk 0.1.5 (session beside)"
    folder = tmp_path_factory.mktemp("beside") / "here"
    return {
        scenario.name: (
            run(scenario, OLD, cleared(folder)),
            run(scenario, sys.executable, cleared(folder)),
        )
        for scenario in SCENARIOS
    }


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_difference_has_a_reason(scenario: Scenario, seen: dict[str, tuple[Seen, Seen]]) -> None:
    """Return value, exception, files, environment and output differ only where that is meant."""
    unexplained = differences(scenario.name, *seen[scenario.name]) - {*REASONS}
    assert not unexplained


def test_every_reason_is_needed(seen: dict[str, tuple[Seen, Seen]]) -> None:
    """A row of the table that no scenario shows any more is taken out."""
    # Which of the others got as far as a line before the stop is chance.
    shown = {"log after failure"}
    for name, pair in seen.items():
        shown |= differences(name, *pair)
    assert {*REASONS} <= shown


def test_readme_shows_the_table() -> None:
    """The table that users read is this one."""
    assert table() in (Path(__file__).parents[2] / "README.md").read_text()
