"""How values of options are written on a command line."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # Not generic before click 8.4.
    _ParamType = click.ParamType


class _Number(_ParamType):
    """A number, in plain words; its range is checked with the job's other options."""

    def __init__(self, kind: type[int] | type[float], expected: str) -> None:
        self.name = expected
        self._kind = kind
        self._expected = expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if isinstance(value, bool):
                raise ValueError
            return self._kind(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not {self._expected}", param, ctx)


class Nodes(_Number):
    """A number of nodes; torchrun's range of them is for an engine that can have fewer, as `2:4`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least, colon, most = str(value).partition(":")
        if colon and least.isdigit() and most.isdigit():
            if ctx is not None and ctx.params.get("engine") == "ray":
                return str(value)
            self.fail(
                f"{value!r} is a range, but a job's nodes change in number with --engine ray only: write "
                f"--nnodes {most}",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class _Size(_ParamType):
    """Bytes, such as 500M."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if found is None or int(found[1]) == 0:
            self.fail(f"{value!r} is not a size: expected bytes, such as 1000000 or 500M", param, ctx)
        return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


WHOLE = _Number(int, "a whole number")
SECONDS = _Number(float, "a number of seconds")
SIZE = _Size()


def variables(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str] | None:
    """Read `NAME=VALUE`, or `NAME` for the value that it has here."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise click.BadParameter(f"{name} is not set here: set it, or write {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found or None
