"""All that a user may ask for: each option once, checked once, before anything is done.

To add an option: its type, as a user writes it, in `JobKeywords` (in `NodeKeywords` if only a start
on this node can take it); its field, with its check and a line of documentation, in `JobOptions` (or
`Display`, or `Wish` for what the search for nodes and devices needs); a row of the same name in
`cli/options_start.py` or `cli/options_run.py`. The managers, the blocking calls and their awaitable
twins, and what is sent to other nodes carry the whole object: the place that uses the option reads it
there.
"""

from __future__ import annotations

import inspect
import os  # noqa: TC003 # `typing.get_type_hints` and the wire read the annotations
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path  # noqa: TC003 # as above
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from davincirunsdk.arguments import (
    Hook,
    absolute,
    command_words,
    flag,
    handled_signal,
    hook,
    job_name,
    number,
    one_of,
    parse_binding,
    parse_prefix,
    parse_ranks,
    positive,
    refuse_unknown,
    seconds,
    silence,
    text,
    text_that,
    variables,
)
from davincirunsdk.environment.worker import FRAMEWORKS
from davincirunsdk.host.devices import parse_list
from davincirunsdk.phrases import ranks
from davincirunsdk.steps.shapes import parse_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.types import RunResult

MeetChoice = Literal["auto", "off", "require"]
ColourChoice = Literal["auto", "always", "never"]
C = TypeVar("C", bound=Callable[..., object])
T = TypeVar("T")


class JobKeywords(TypedDict, total=False):
    """Keywords of every call that starts a job, on one node or on many; see `JobOptions`."""

    nproc_per_node: int | None
    master_port: int | None
    name: str | None
    visible: Literal["all", "one"]
    iface: str
    bind: str
    grace_period: float
    stop_signal: str
    env: Mapping[str, str] | None
    expand: bool
    framework: str
    fail_fast: bool
    keep_going: bool
    straggler_timeout: float | None
    log_limit: int | None
    keep_logs: int | None
    progress_pattern: str | None
    timeout: float | None
    warn_signal: str | None
    warn_before: float | None
    stall_timeout: float | None
    on_stall: str
    max_restarts: int
    restart_delay: float
    report: str | os.PathLike[str] | None
    html: str | os.PathLike[str] | None
    lang: str | None
    metrics: str | os.PathLike[str] | None
    on_end: str | Callable[[RunResult], object] | None
    lost_after: float
    echo: str | None
    prefix: str
    color: ColourChoice
    live: bool


class NodeKeywords(JobKeywords, total=False):
    """Keywords of the calls that start this node's part of a job; see `JobOptions`."""

    rank_table: str | os.PathLike[str] | None
    rank_table_timeout: float | None
    nnodes: int | None
    node_rank: int | None
    master_addr: str | None
    ignore_platform: bool
    devices: str | None
    debug: int | None
    wait_devices: float | None
    meet: MeetChoice
    meet_port: int | None
    meet_timeout: float
    meet_key_file: str | os.PathLike[str] | None
    leave_after: float | None


def option(default: T, check: Callable[[str, object], T], *, shown: object = MISSING) -> T:
    """Declare a field that a user may set.

    Args:
        default: What counts when it is not given, or given as None.
        check: Takes name and value, returns what the field holds, refuses everything else.
        shown: Default in the signatures of calls, where it is not `default`.
    """
    metadata = {"check": check, "shown": default if shown is MISSING else shown}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What of the workers' output is shown, and how.

    Attributes:
        echo: Ranks to show on standard output: `all`, `none`, or for example `0,2-3`. The blocking
            calls show all outside a notebook.
        output_notebook: Show a panel in the notebook while the job runs, with the ranks of `echo`,
            with all if that is `none`; no effect elsewhere.
        prefix: What stands before each line: `rank`, `time`, `host`, with commas between them, or
            `none`.
        color: `auto`, `always` or `never`; `auto` colours on a terminal unless NO_COLOR is set.
        live: Show a table of the workers, below it their lines, where the output is a terminal.
    """

    echo: str = option("none", text_that(parse_ranks, "0,2-3"), shown=None)
    output_notebook: bool = option(False, flag)
    prefix: str = option("rank", text_that(parse_prefix, "time,rank"))
    color: ColourChoice = option("auto", one_of(("auto", "always", "never")))
    live: bool = option(False, flag)

    @property
    def on_stream(self) -> bool:
        """True when something is to be shown on standard output."""
        return self.ranks is None or bool(self.ranks)

    @property
    def ranks(self) -> frozenset[int] | None:
        """The ranks of `echo`, None for all."""
        return parse_ranks(self.echo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for about nodes and devices; None means: find out.

    Attributes:
        rank_table: Rank table file; by default the platform's.
        rank_table_timeout: Seconds to wait for a complete rank table.
        nproc_per_node: Workers on each node; by default one per device.
        nnodes: Nodes of the job, where no rank table says so.
        node_rank: Place of this node.
        master_addr: Host or address of node 0.
        master_port: Port for the rendezvous; by default any free one.
        ignore_platform: Where two sources contradict each other about size or place of the job,
            let the more trusted one count: what is given here, then the rank table, then the
            platform. By default that is an error.
        devices: Physical numbers of the NPUs to use on this node, such as `4-7` or `0,2`; by default
            all that are in sight, or those of the rank table.
        wait_devices: Seconds to wait for NPUs that another job or another program of this host holds, and
            for host ports of HCCL_IF_BASE_PORT; by default another job is an error at once, and nothing
            else is looked at.
        visible: `all`: a worker sees every NPU of its node's workers; `one`: its own alone, as number
            0, and with LOCAL_RANK 0.
        iface: Network interface to the other nodes: `auto` finds it, `none` leaves the choice to the
            frameworks, or its name.
        bind: CPUs of the workers: `none` leaves them as they are; `auto` binds each to the CPUs of its
            NPU's NUMA node where that is known and roomy; `node` does so or fails; `exclusive` splits
            these CPUs among the workers; a list such as `0-31` is split likewise.
        command_line: True for a job of the command, whose users expect the logs of CANN and the
            frameworks elsewhere than those of the calls do; not for users to set.
    """

    rank_table: Path | None = option(None, absolute)
    rank_table_timeout: float | None = option(None, seconds)
    nproc_per_node: int | None = option(None, number(1))
    nnodes: int | None = option(None, number(1))
    node_rank: int | None = option(None, number(0))
    master_addr: str | None = option(None, text)
    master_port: int | None = option(None, number(1, 65535))
    ignore_platform: bool = option(False, flag)
    devices: str | None = option(None, text_that(parse_list, "4-7"))
    wait_devices: float | None = option(None, seconds)
    visible: Literal["all", "one"] = option("all", one_of(("all", "one")))
    iface: str = option("auto", text)
    bind: str = option("none", text_that(parse_binding, "0-31"))
    command_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(Wish):
    """One job as its user wants it; `Wish` and `Display` list the rest of the keywords.

    Attributes:
        command: Words of the command; relative paths in it are seen from `work_dir`.
        work_dir: Folder the workers run in, made if missing; `{rank}`, `{local_rank}`, `{node_rank}`,
            `{device}` and `{attempt}` in it are the worker's own numbers.
        log_dir: Folder of the log files; None for the platform's, or `default_log_dir` where it has
            none.
        default_log_dir: `./log`, seen from the caller's folder.
        name: Name of the job, first part of its log files' names; by default the platform's job id,
            or the host's name.
        grace_period: Seconds between `stop_signal` and SIGKILL, for all workers together.
        stop_signal: Name of the signal that asks workers to end, such as `INT` for scripts that save on
            KeyboardInterrupt.
        env: Extra variables for the workers; they come on top of the environment and win over it.
            `{rank}` and its like in a value are the worker's own numbers, as in `work_dir`.
        expand: Put the worker's own numbers in the place of `{rank}` and its like in `command`, too.
        framework: `auto`, `mindspore`, `torch` or `none`: which variables a worker gets.
        fail_fast: Stop the other workers when one fails. Without it `wait` raises at the first
            failure and the others go on until `stop`.
        keep_going: A worker that fails ends no other one: the job goes on until all have ended, and has
            the exit code of the first that failed.
        straggler_timeout: Seconds that the other workers have after the first has ended well; then they
            are named and stopped, with exit code 124. Launchers that were started apart count for their
            own node only.
        log_limit: Bytes that a log file may have: head and tail are kept, a mark says what is left
            out between; None for any number.
        keep_logs: Runs of the job whose log files are kept, with this one; None for all.
        report: File for the report as data, one JSON object, written when the job is over.
        lang: Language of the report: `en`, `zh`, or `auto` for that of the locale.
        html: File for the run report, a page that opens from disk, written when the job is over.
        metrics: File for figures of the job on this node in OpenMetrics text, replaced whole every 10 s:
            state, ranks that run, restarts, step, loss and age of the last output.
        on_end: A command that runs once when all is over, on node 0, with DAVINCIRUN_VERDICT,
            DAVINCIRUN_EXIT_CODE and DAVINCIRUN_REPORT (a file with the report as data) in its
            environment; it has 30 s, no shell, and no influence on the outcome. In Python also a
            function: it is called with the `RunResult`, in a thread of its own, on the same terms.
        sample_usage: True where processor time and memory of the workers are looked at, for the run
            report; not for users to set.
        progress_pattern: A regular expression for lines that tell a worker's step, beside the known
            ones: with a group named `step`, and `total`, `epoch`, `epochs`, `loss`, `seconds`, `ms`
            or `eta` as wanted; without names the first group is the step, the second the total.
        timeout: Seconds that the job may take, all attempts together; then it is stopped as on request, with
            exit code 124.
        warn_signal: Name of a signal, such as `USR1`, that workers which handle it get `warn_before` seconds
            before the time limit, so that a checkpoint can be saved.
        warn_before: See `warn_signal`; by default 60, or half of a shorter `timeout`.
        stall_timeout: Seconds for which no rank printed, made a step, or read or wrote files, after which
            the job has stalled: three times as long while it computes, and before its first step. None
            for no watch. Launchers that were started apart on several nodes do not watch.
        on_stall: What is done then, after the stacks of all workers have been taken: `stop`, with exit code
            124, `restart`, which needs `max_restarts`, or `warn`, once a stall.
        max_restarts: How often the whole group of workers is started anew after a failure that a restart may
            cure. Runs anew by Slurm (SLURM_RESTART_COUNT) count too.
        restart_delay: Seconds before the first restart, doubled for each further one, at most 300: devices
            may still be held.
        lost_after: Seconds without a sign of another node after which it counts as lost, and after
            which a node that was cut off ends its workers; at least 1. Ray has its own.
        debug: A rank that has this process's terminal, so that `breakpoint()` and Ctrl-C work in it; the
            others are not shown, and there is no time limit, nor one for stalls and stragglers.
        meet: Whether launchers that were started apart, one on each node, meet at node 0 to end the job
            as one: `auto` where they can, `off`, or `require`, without which the job fails.
        meet_port: Port of node 0 for it; by default the one after the rendezvous port.
        meet_timeout: Seconds in which all nodes have to come; workers do not wait for it.
        meet_key_file: File with a text that all nodes share, so that nobody else gets in; by default
            the variable DAVINCIRUN_MEET_KEY.
        leave_after: Seconds that the launcher of a healthy node stays after a job that failed on
            another; by default 30 where MindCluster recovers jobs, else 0.
        driven_attempt: Number of the attempt where a driver of several nodes makes them, and decides about
            stalls and limits, for only it knows of all nodes; None where this node does.
        display: What is shown of the workers' output.
    """

    command: tuple[str, ...]
    work_dir: Path
    log_dir: Path | None
    default_log_dir: Path
    name: str | None = option(None, job_name)
    grace_period: float = option(15.0, seconds)
    stop_signal: str = option("SIGTERM", handled_signal, shown="TERM")
    # Values of variables appear nowhere, so not in a repr either.
    env: dict[str, str] = field(
        default_factory=dict, repr=False, metadata={"check": variables, "shown": None}
    )
    expand: bool = option(False, flag)
    framework: str = option("auto", one_of(FRAMEWORKS))
    fail_fast: bool = option(True, flag)
    keep_going: bool = option(False, flag)
    straggler_timeout: float | None = option(None, seconds)
    log_limit: int | None = option(None, number(1))
    keep_logs: int | None = option(None, number(1))
    report: Path | None = option(None, absolute)
    lang: str = option("auto", one_of(("auto", "en", "zh")))
    html: Path | None = option(None, absolute)
    metrics: Path | None = option(None, absolute)
    on_end: Hook | None = option(None, hook)
    sample_usage: bool = False
    progress_pattern: str | None = option(None, text_that(parse_pattern, r"iter (?P<step>\d+)"))
    timeout: float | None = option(None, positive)
    warn_signal: str | None = option(None, handled_signal)
    warn_before: float | None = option(None, seconds)
    stall_timeout: float | None = option(None, positive)
    on_stall: str = option("stop", one_of(("stop", "restart", "warn")))
    max_restarts: int = option(0, number(0))
    restart_delay: float = option(10.0, seconds)
    lost_after: float = option(30.0, silence)
    debug: int | None = option(None, number(0))
    meet: MeetChoice = option("auto", one_of(("auto", "off", "require")))
    meet_port: int | None = option(None, number(1, 65535))
    meet_timeout: float = option(600.0, seconds)
    meet_key_file: Path | None = option(None, absolute)
    leave_after: float | None = option(None, seconds)
    driven_attempt: int | None = None
    display: Display = field(default_factory=Display)

    @classmethod
    def of(
        cls,
        command: Sequence[str | os.PathLike[str]],
        work_dir: str | os.PathLike[str] = "./",
        log_dir: str | os.PathLike[str] | None = "./log",
        **keywords: object,
    ) -> JobOptions:
        """Check what a user gave.

        Args:
            command: Words of the command, strings or path-likes.
            work_dir: Folder the workers run in, relative to the caller's folder.
            log_dir: Folder of the log files, relative to the caller's folder; None for the
                platform's.
            **keywords: Those of `NodeKeywords`, and `output_notebook`; None means the default.

        Returns:
            The options.

        Raises:
            TypeError: `command` is one string, another argument is of a wrong kind, or a keyword is
                unknown.
            ValueError: `command` is empty, or another argument is out of range.
            PlatformError: The current folder, from which a path is seen, has been removed.
        """
        words = command_words(command)
        display = _checked(Display, keywords)
        rest = {name: value for name, value in keywords.items() if name not in _names(Display)}
        refuse_unknown(rest, _names(cls))
        given = None if log_dir is None else absolute("log_dir", log_dir)
        options = cls(
            command=words,
            work_dir=absolute("work_dir", work_dir),
            log_dir=given,
            default_log_dir=given or absolute("log_dir", "log"),
            display=Display(**display),
            **_checked(cls, rest),
        )
        options._refuse_contradictions()
        return options if options.debug is None else options._without_limits()

    def _without_limits(self) -> JobOptions:
        """Leave out what a person at a debugger would run into."""
        from davincirunsdk.supervision import terminal

        if not terminal.is_there():
            raise ValueError(
                f"debug is {self.debug}: standard input and output are not both a terminal to give it"
            )
        return replace(
            self,
            timeout=None,
            warn_signal=None,
            warn_before=None,
            stall_timeout=None,
            on_stall="stop",
            straggler_timeout=None,
            display=replace(self.display, echo="none", live=False),
        )

    def _refuse_contradictions(self) -> None:
        if self.on_stall == "restart" and not self.max_restarts:
            raise ValueError("on_stall is 'restart', but max_restarts is 0: say how often")
        if self.keep_going and self.max_restarts:
            raise ValueError("keep_going lets the others go on and max_restarts starts all anew: choose one")
        if self.on_stall != "stop" and self.stall_timeout is None:
            raise ValueError(f"on_stall is {self.on_stall!r} without stall_timeout: give the seconds with it")
        if self.timeout is None and (self.warn_signal is not None or self.warn_before is not None):
            raise ValueError("timeout is not given: warn_signal and warn_before have no use without it")
        if self.warn_before is not None and self.warn_signal is None:
            raise ValueError("warn_before has no use without warn_signal: give the signal, such as 'USR1'")
        if self.timeout is not None and (self.warn_before or 0.0) >= self.timeout:
            raise ValueError(
                f"warn_before is {self.warn_before}: expected less than the time limit, {self.timeout:g}"
            )


def without_effect(options: JobOptions, *, world_size: int, environment: Mapping[str, str]) -> list[str]:
    """Say which options change nothing in a job.

    Args:
        options: What the user asked for.
        world_size: Workers of the job.
        environment: What a worker gets.

    Returns:
        A sentence for each; no variable's value is in it.
    """
    found = []
    if beyond := sorted(rank for rank in options.display.ranks or () if rank >= world_size):
        last = f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0"
        found.append(f"echo names {ranks(beyond)}, but the job has {last}: expected ranks of the job")
    if overruled := sorted(name for name, value in options.env.items() if environment.get(name) != value):
        found.append(
            f"env gives {', '.join(overruled)}, which the job sets by itself: the given value has no effect"
        )
    return found


def spelled_out(keywords: type, but: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Show every option in the signature of a call that takes them as `**keywords`: `help` asks there.

    Args:
        keywords: The `TypedDict` of its keywords.
        but: Options that the call settles itself.
    """

    def spell_out(call: C) -> C:
        signature = inspect.signature(call)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        defaults = {
            one.name: one.metadata["shown"] for kind in (Display, JobOptions) for one in _fields(kind)
        }
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=getattr(hint, "__forward_arg__", hint),
            )
            for name, hint in keywords.__annotations__.items()
            if name not in but
        ]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # inspect reads it
        return call

    return spell_out


def _fields(kind: type) -> list[Field[Any]]:
    """List the fields that a user may set."""
    return [one for one in fields(kind) if "check" in one.metadata]


def _names(kind: type) -> list[str]:
    return [one.name for one in _fields(kind)]


def _checked(kind: type, keywords: Mapping[str, object]) -> dict[str, Any]:
    return {
        one.name: one.metadata["check"](one.name, keywords[one.name])
        for one in _fields(kind)
        if keywords.get(one.name) is not None
    }
