"""Lists of sub-commands can be read whole on a terminal of the usual width."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from davincirunsdk.ctl.main import cli
from davincirunsdk.rank_table.cli import main


@pytest.mark.parametrize("group", [cli, main], ids=["davincirunctl", "hccl-ranktable"])
def test_each_sub_command_has_a_whole_sentence_and_options_with_words(group: click.Group) -> None:
    """No sentence is cut short, none takes a second line, and every option says what it does."""
    said = CliRunner().invoke(group, ["--help"], terminal_width=80).output
    listed = said.split("Commands:\n")[1].splitlines()
    assert len(listed) == len(group.commands) >= 5
    for line in listed:
        found = re.fullmatch(r"  ([a-z]+) +([A-Z].*[^.]\.)", line)
        assert found is not None, line
        for parameter in group.commands[found[1]].params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, (found[1], parameter.name)
