"""The blocking API and its awaitable twins are the same calls; the documented ones keep their shape."""

from __future__ import annotations

import inspect

import pytest

import davincirunsdk
from davincirunsdk import aio, blocking

DOCUMENTED = {
    "init_rank_table": "()",
    "set_random_ms_cache_dir": "()",
    "start_distributed_train": "(command, work_dir='./', log_dir='./log', *, output_notebook=False",
    "wait_distributed_train": "(fmk_manager, destroy_when_finished=True, raise_exception=True)",
    "start_and_wait_distributed_train": (
        "(command, work_dir='./', log_dir='./log', *, output_notebook=False, random_cache_dir=True, "
        "destroy_when_finished=True, raise_exception=True"
    ),
}


def _shape(function: object) -> inspect.Signature:
    assert callable(function)
    signature = inspect.signature(function)
    empty = inspect.Signature.empty
    return signature.replace(
        parameters=[parameter.replace(annotation=empty) for parameter in signature.parameters.values()],
        return_annotation=empty,
    )


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_twins_take_the_same_arguments(name: str) -> None:
    """Names, order, kinds and defaults of the parameters agree."""
    assert _shape(getattr(blocking, name)) == _shape(getattr(aio, name))


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_documented_arguments_come_first(name: str) -> None:
    """A script written for 0.1.5 finds its arguments, positional or by keyword."""
    assert str(_shape(getattr(davincirunsdk, name))).startswith(DOCUMENTED[name])


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_added_arguments_are_keyword_only_with_defaults(name: str) -> None:
    """What we added changes no documented call."""
    documented = DOCUMENTED[name].count(",") + 1
    for parameter in list(_shape(getattr(blocking, name)).parameters.values())[documented:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


def test_every_public_name_is_there() -> None:
    """`__all__` holds what the package gives, each with a docstring."""
    for name in davincirunsdk.__all__:
        value = getattr(davincirunsdk, name)
        assert name == "__version__" or value.__doc__, name
    assert blocking.__all__ == aio.__all__
