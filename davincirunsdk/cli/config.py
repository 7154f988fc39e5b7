"""Defaults from a file: never from one that merely lies in the folder, but from one that the user names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 1 << 20


def read_config(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    """Take the defaults of all options from a file.

    Keys are the options' names, with `-` or `_`; `env` may be a table of names and values. In a file
    that others share, the part `[tool.davincirun]` counts.

    Raises:
        click.BadParameter: The file cannot be read, or holds what is not an option.
    """
    if path is None:
        return
    found = _load(path)
    tool = found.get("tool")
    if isinstance(tool, dict) and isinstance(tool.get("davincirun"), dict):
        found = tool["davincirun"]
    known = {one.name: one for one in context.command.params if isinstance(one, click.Option)}
    defaults: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        option = known.get(name)
        if option is None or name in ("config", "help", "help_all", "version"):
            raise click.BadParameter(f"{path} holds {key!r}, which is not an option of davincirun")
        if option.multiple and isinstance(value, dict):
            value = [f"{one}={other}" for one, other in value.items()]
        elif option.multiple and not isinstance(value, list):
            value = [value]
        elif isinstance(value, (dict, list)):
            raise click.BadParameter(f"{path}: {key} is {value!r}: expected one value")
        if option.is_flag and not isinstance(value, bool):
            raise click.BadParameter(f"{path}: {key} is {value!r}: expected true or false")
        defaults[name] = value
    context.default_map = defaults


def _load(path: str) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST)
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}") from None
    try:
        found = _json(data) if path.endswith(".json") else _toml(data)
    except ValueError as error:
        raise click.BadParameter(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(
            f"{path} holds {type(found).__name__}: expected names of options with values"
        )
    return found


def _json(data: bytes) -> Any:
    import json

    return json.loads(data)


def _toml(data: bytes) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(data.decode())
    raise ValueError("TOML needs Python 3.11; expected a file whose name ends in .json")
