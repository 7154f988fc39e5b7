"""One object holds all that a user may ask for: complete, checked, the same for every call."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

import pytest

from davincirunsdk import FMKManager, aio, blocking
from davincirunsdk.arguments import node_range
from davincirunsdk.engines import ray
from davincirunsdk.engines.driver import NodesManager
from davincirunsdk.options import Display, JobKeywords, JobOptions, NodeKeywords

if TYPE_CHECKING:
    from pathlib import Path

CALLS = [
    FMKManager,
    blocking.start_distributed_train,
    blocking.start_and_wait_distributed_train,
    aio.start_distributed_train,
    aio.start_and_wait_distributed_train,
]


def options_of(kind: type) -> set[str]:
    """Names of the fields that a user may set."""
    return {field.name for field in fields(kind) if "check" in field.metadata}


def test_each_keyword_is_an_option_and_each_option_a_keyword() -> None:
    """What a type checker lets through is what the checks know."""
    keywords = {*NodeKeywords.__annotations__, "output_notebook"}
    assert keywords == options_of(JobOptions) | options_of(Display)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_on_one_node_shows_every_option(call: object) -> None:
    """`help` and editors list them, keyword-only and with defaults."""
    assert callable(call)
    parameters = inspect.signature(call).parameters
    for name in NodeKeywords.__annotations__:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is not inspect.Parameter.empty


@pytest.mark.parametrize("call", [NodesManager, ray.manager, ray.run, ray.run_blocking])
def test_calls_for_many_nodes_show_what_they_take(call: object) -> None:
    """All but what is one node's own."""
    assert callable(call)
    names = set(inspect.signature(call).parameters)
    assert set(JobKeywords.__annotations__) <= names
    assert not {"devices", "node_rank", "master_addr"} & names


def test_options_are_frozen_and_can_be_sent() -> None:
    """They go to other nodes by pickle and arrive equal."""
    given = JobOptions.of(["true"], grace_period=3, env={"A": "b"}, echo="0,2-3", nnodes=2)
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(FrozenInstanceError):
        given.grace_period = 1.0  # type: ignore[misc] # that is what is tested


def test_none_means_the_default() -> None:
    """A caller that hands on its own optional arguments need not know our defaults."""
    nothing: dict[str, Any] = dict.fromkeys([*NodeKeywords.__annotations__, "output_notebook"])
    assert JobOptions.of(["true"], **nothing) == JobOptions.of(["true"])


def test_no_value_of_a_variable_is_in_a_repr() -> None:
    """Options may end in a log."""
    assert "secret" not in repr(JobOptions.of(["true"], env={"TOKEN": "secret"}))


@pytest.mark.parametrize(
    ("keywords", "kind", "said"),
    [
        (
            {"rank_tabel": "x"},
            TypeError,
            "unexpected keyword argument 'rank_tabel': did you mean 'rank_table'?",
        ),
        ({"rank_table": ""}, ValueError, "rank_table is '': expected a path"),
        ({"rank_table": 5}, TypeError, "rank_table is 5: expected a path"),
        ({"echo": [0]}, TypeError, "echo is [0]: expected a string such as '0,2-3'"),
        ({"echo": "x"}, ValueError, "echo: 'x' in 'x' is not a rank"),
        ({"echo": "0-99999999999"}, ValueError, "out of range"),
        ({"prefix": "pid"}, ValueError, "prefix: "),
        (
            {"framework": "jax"},
            ValueError,
            "framework is 'jax': expected one of auto, mindspore, torch, none",
        ),
        ({"nproc_per_node": True}, TypeError, "nproc_per_node is True: expected a whole number"),
        ({"nproc_per_node": 0}, ValueError, "nproc_per_node is 0: expected 1 or more"),
        ({"master_port": 70000}, ValueError, "master_port is 70000: expected 1 to 65535"),
        ({"live": 1}, TypeError, "live is 1: expected True or False"),
        ({"name": "a/b"}, ValueError, "name is 'a/b': expected a name for log files"),
        ({"name": "a\x1b[0m"}, ValueError, "expected a text without control characters"),
        ({"name": ""}, ValueError, "name is ''"),
        ({"master_addr": 5}, TypeError, "master_addr is 5: expected a string"),
    ],
)
def test_wrong_options_are_refused_in_words(
    keywords: dict[str, Any], kind: type[Exception], said: str
) -> None:
    """Before anything is done, with what was found and what was expected."""
    with pytest.raises(kind) as caught:
        JobOptions.of(["true"], **keywords)
    assert said in str(caught.value)


def test_what_one_node_takes_is_refused_for_many() -> None:
    """Devices of one node settle nothing on the others."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'devices'"):
        ray.manager(["true"], nnodes=2, devices="0")  # type: ignore[call-arg] # that is what is tested


def test_a_range_of_nodes_is_read() -> None:
    """One number is both ends; what is no range is told with an example."""
    assert node_range("nnodes", 3) == (3, 3)
    assert node_range("nnodes", "2:4") == (2, 4)
    for wrong in ("4:2", "0:2", "2:", "a:b", "-1"):
        with pytest.raises(ValueError, match=r"nnodes is '.*': expected"):
            node_range("nnodes", wrong)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"echo": "0,5-6"}, "echo names ranks 5, 6, but the job has ranks 0-1"),
        ({"env": {"RANK": "s3cret", "MINE": "x"}}, "env gives RANK, which the job sets by itself"),
        ({"echo": "1", "env": {"MINE": "x"}}, ""),
    ],
)
async def test_options_without_effect_are_told(
    keywords: dict[str, Any], said: str, job_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a warning, in log and events, without a value."""
    async with FMKManager(["true"], nproc_per_node=2, **keywords) as manager:
        await manager.wait()
    warnings = [event.detail async for event in manager.events() if event.kind == "warning"]
    assert (said in " ".join(warnings)) if said else not warnings
    assert "s3cret" not in caplog.text + " ".join(warnings)


def test_a_job_has_its_name(job_folder: Path) -> None:
    """`name` is the first part of the files' names and the job's id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOB_ID", "platform")
        manager = blocking.start_distributed_train(["true"], nproc_per_node=1, name="sweep 7")
        assert blocking.wait_distributed_train(manager) == 0
    assert manager.job_id == "sweep 7"
    assert (job_folder / "log" / "sweep 7-proc-rank-0-device-0.txt").exists()
