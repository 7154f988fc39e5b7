"""Options by the names that they have on the command line, in errors that name the keywords of the API."""

from __future__ import annotations

import re

from davincirunsdk.options import NodeKeywords

_KEYWORDS = {*NodeKeywords.__annotations__, "work_dir", "log_dir", "resource", "placement_timeout"}
_LONG = "|".join(sorted(name for name in _KEYWORDS if "_" in name))
_PAIR = re.compile(r"(--[a-z][a-z-]*)( [\w-]+)? \((\w+)(?:=[^)\s]*)?\)")
_FIRST = re.compile(rf"({'|'.join(sorted(_KEYWORDS))})(?=:| (?:is|are|holds|names|gives|lets|has)\b)")
# Not within a path, a quotation, another name or an option.
_INSIDE = re.compile(rf"(?<![\w./'\"=-])({_LONG})(?![\w/'\"=-]|\.\w)")


def with_options(text: str) -> str:
    """Call every option by its name on the command line.

    Args:
        text: Names an option as `--node-rank (node_rank)`, by its keyword in front (`name is 'a/b'`), or by a
            keyword of several words anywhere; what stands in quotes is a user's and stays.
    """
    text = _PAIR.sub(
        lambda pair: f"{pair[1]}{pair[2] or ''}" if option(pair[3]) == pair[1] else pair[0], text
    )
    if (first := _FIRST.match(text)) is not None:
        text = f"{option(first[1])}{text[first.end() :]}"
    return _INSIDE.sub(lambda keyword: option(keyword[1]), text)


def option(keyword: str) -> str:
    """Write a keyword as the option that it is."""
    return f"--{keyword.replace('_', '-')}"
