"""All that a user may ask for: each option once, checked once, before anything is done.

To add an option: its type, as a user writes it, in `JobKeywords` (in `NodeKeywords` if only a start
on this node can take it); its field, with its check and a line of documentation, in `JobOptions` (or
`Display`, or `Wish` for what the search for nodes and devices needs); a decorator of the same name in
`cli/options.py`. The managers, the blocking calls and their awaitable twins, and what is sent to
other nodes carry the whole object: the place that uses the option reads it there.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, cast

from davincirunsdk.environment.worker import FRAMEWORKS
from davincirunsdk.errors import PlatformError
from davincirunsdk.host.devices import parse_list
from davincirunsdk.phrases import ranks
from davincirunsdk.steps.shapes import parse_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.types import RunResult

    Hook: TypeAlias = str | Callable[[RunResult], object]
else:
    # What is sent to other nodes, whose wire reads this, has none that is a function.
    Hook = str

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


def command_words(command: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Check a command and return its words.

    Raises:
        TypeError: It is one string, or holds something that is neither string nor path-like.
        ValueError: It is empty.
    """
    given: object = command
    if isinstance(given, str):
        raise TypeError(
            f"command is one string: {given!r}; expected a list of words, write {given.split()!r}"
        )
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TypeError(f"command is {given!r}: expected a list of words such as ['python', 'train.py']")
    words = []
    for word in cast("Iterable[object]", given):
        if not isinstance(word, (str, os.PathLike)):
            raise TypeError(f"command holds {word!r} ({type(word).__name__}): expected strings or path-likes")
        words.append(os.fsdecode(word))
        if "\0" in words[-1]:
            raise ValueError(f"command holds a NUL character: {word!r}; no program can be given one")
    if not words or not words[0]:
        raise ValueError("command is empty: expected a list of words such as ['python', 'train.py']")
    return tuple(words)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read a choice of ranks.

    Args:
        text: `all`, `none`, `0`, or for example `0,2-3`.

    Returns:
        The ranks, None for all.

    Raises:
        ValueError: It is none of these.
    """
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise ValueError(f"{part!r} in {text!r} is not a rank: expected all, none, or for example 0,2-3")
        if dash and int(last) < int(first):
            raise ValueError(f"{part!r} in {text!r} runs backwards: expected the smaller rank first")
        if len(first) > 9 or len(last) > 9:
            raise ValueError(f"{part!r} in {text!r} is out of range: expected ranks of the job")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def parse_prefix(text: str) -> tuple[str, ...]:
    """Read what stands before each line: see `output.parse_prefix`."""
    from davincirunsdk.output import parse_prefix as parse

    return parse(text)


def parse_binding(text: str) -> object:
    """Read how workers are bound to CPUs: a word, or a list of CPUs."""
    from davincirunsdk.host.binding import MODES, parse_cpus

    return text if text in MODES else parse_cpus(text)


def absolute(name: str, path: object) -> Path:
    """Turn a path seen from the current folder into one that holds wherever it is seen from.

    Raises:
        PlatformError: The current folder has been removed.
        TypeError: It is not a path.
        ValueError: It is empty or holds a NUL.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} is {path!r}: expected a path")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValueError(f"{name} is {text!r}: expected a path")
    try:
        return Path(text).absolute()
    except FileNotFoundError:
        raise PlatformError(
            f"{name} {path} is seen from the current folder, which does not exist any more: change to another"
        ) from None


def seconds(name: str, value: object) -> float:
    """Check a time span.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative, infinite or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: expected seconds, 0 or more")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}: expected seconds, 0 or more")
    return float(value)


def _silence(name: str, value: object) -> float:
    """Check how long another node may be silent: beats have to fit in.

    Raises:
        TypeError: It is not a number.
        ValueError: It is less than a second.
    """
    if seconds(name, value) < 1:
        raise ValueError(f"{name} is {value}: expected seconds, 1 or more")
    return seconds(name, value)


def _positive(name: str, value: object) -> float:
    """Check a time span that has to be longer than nothing."""
    span = seconds(name, value)
    if not span:
        raise ValueError(f"{name} is {value}: expected seconds, more than 0")
    return span


def _signal(name: str, value: object) -> str:
    """Check the name of a signal that a process can handle, and return it as `SIGUSR1`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: expected the name of a signal, such as 'USR1'")
    word = f"SIG{value.upper().removeprefix('SIG')}"
    if word not in signal.Signals.__members__ or word in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"{name} is {value!r}: expected a signal that a process can handle, such as 'USR1'")
    return word


def variables(name: str, env: object) -> dict[str, str]:
    """Check variables for the workers; no message shows a value.

    Raises:
        TypeError: It is not a mapping of names to texts or numbers.
        ValueError: A name or value cannot be given to a process.
    """
    if not isinstance(env, Mapping):
        raise TypeError(f"{name} is a {type(env).__name__}: expected a mapping such as {{'NAME': 'value'}}")
    checked = {}
    for key, value in cast("Mapping[object, object]", env).items():
        if not isinstance(key, str) or not isinstance(value, (str, int, float, os.PathLike)):
            raise TypeError(f"{name} holds {key!r} with a {type(value).__name__}: expected strings")
        checked[key] = text = os.fsdecode(value) if isinstance(value, os.PathLike) else str(value)
        if not key or "=" in key or "\0" in key + text:
            raise ValueError(
                f"{name} holds {key!r}: a name must not be empty, hold '=' or NUL, nor a value NUL"
            )
    return checked


def whole_number(name: str, value: object, least: int, most: float = math.inf) -> int:
    """Check a number.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if not least <= value <= most:
        limit = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"{name} is {value}: expected {limit}")
    return value


def node_range(name: str, value: object) -> tuple[int, int]:
    """Read a number of nodes, or a range of it such as `2:4`.

    Returns:
        The least and the most.

    Raises:
        TypeError: It is neither a whole number nor a text.
        ValueError: It is out of range, or no range.
    """
    if not isinstance(value, str):
        count = whole_number(name, value, 1)
        return count, count
    least, colon, most = value.partition(":")
    if not (least + (most or least)).isascii() or not least.isdigit() or (colon and not most.isdigit()):
        raise ValueError(
            f"{name} is {value!r}: expected a number of nodes, or the least and the most, as 2:4"
        )
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"{name} is {value!r}: expected at least 1, and the smaller number first")
    return found


def number(least: int, most: float = math.inf) -> Callable[[str, object], int]:
    """Make the check of a whole number from `least` to `most`."""
    return lambda name, value: whole_number(name, value, least, most)


def one_of(choices: Sequence[str]) -> Callable[[str, object], Any]:
    """Make the check of a choice.

    Args:
        choices: All that may be given.
    """

    def check(name: str, value: object) -> object:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: expected one of {', '.join(choices)}")
        return value

    return check


def flag(name: str, value: object) -> bool:
    """Check a yes or no.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: expected True or False")
    return value


def text(name: str, value: object) -> str:
    """Check a text.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty or holds a control character.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: expected a string")
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{name} is {value!r}: expected a text without control characters")
    return value


def job_name(name: str, value: object) -> str:
    """Check the name of a job, which names files, too.

    Raises:
        TypeError: It is not a string.
        ValueError: No file can be named so.
    """
    word = text(name, value)
    if "/" in word or word.startswith((".", "-")) or len(os.fsencode(word)) > 100:
        raise ValueError(
            f"{name} is {value!r}: expected a name for log files: without '/', not beginning with '.' or "
            "'-', at most 100 bytes long"
        )
    return word


def _text_that(parse: Callable[[str], object], example: str) -> Callable[[str, object], str]:
    """Make the check of a text that another function can read."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}: expected a string such as {example!r}")
        try:
            parse(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return value

    return check


def _hook(name: str, value: object) -> Hook:
    """Check what is to run at the end."""
    if callable(value) and not inspect.iscoroutinefunction(value):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{name} is {value!r}: expected a command such as 'notify.sh --mail me', or a plain function "
            "that takes a RunResult"
        )
    return _text_that(shlex.split, "")(name, value)


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

    echo: str = option("none", _text_that(parse_ranks, "0,2-3"), shown=None)
    output_notebook: bool = option(False, flag)
    prefix: str = option("rank", _text_that(parse_prefix, "time,rank"))
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
    devices: str | None = option(None, _text_that(parse_list, "4-7"))
    wait_devices: float | None = option(None, seconds)
    visible: Literal["all", "one"] = option("all", one_of(("all", "one")))
    iface: str = option("auto", text)
    bind: str = option("none", _text_that(parse_binding, "0-31"))
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
    stop_signal: str = option("SIGTERM", _signal, shown="TERM")
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
    on_end: Hook | None = option(None, _hook)
    sample_usage: bool = False
    progress_pattern: str | None = option(None, _text_that(parse_pattern, r"iter (?P<step>\d+)"))
    timeout: float | None = option(None, _positive)
    warn_signal: str | None = option(None, _signal)
    warn_before: float | None = option(None, seconds)
    stall_timeout: float | None = option(None, _positive)
    on_stall: str = option("stop", one_of(("stop", "restart", "warn")))
    max_restarts: int = option(0, number(0))
    restart_delay: float = option(10.0, seconds)
    lost_after: float = option(30.0, _silence)
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


def refuse_unknown(given: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse keywords that nobody would look at.

    Raises:
        TypeError: There is one; the text names the nearest that is known.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            import difflib

            near = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
            raise TypeError(f"unexpected keyword argument {name!r}: {meant}")


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
