"""The failure report: the text that a person reads when a job has failed."""

from __future__ import annotations

import textwrap
from datetime import datetime
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.excerpt import excerpt, headline, shorten
from davincirunsdk.diagnosis.exits import explain_exit, name_exit
from davincirunsdk.diagnosis.matching import find, hint
from davincirunsdk.diagnosis.order import is_victim
from davincirunsdk.types import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from davincirunsdk.types import WorkerFailure, WorkerStatus

_WIDTH = 98  # a terminal of 100 columns, less two for wide characters and frames
_MAX_LINES = 38
_MAX_TAIL = 20
_MIN_TAIL = 5
_MAX_FAILURES = 10
_MAX_OTHERS = 4
_MAX_LISTED = 12
_MAX_PATH = 4096
_MAX_VALUE = 4 * _WIDTH
_MAX_NODE = 24
_CLOCKS = (
    "each node's own: times tell the order within a node; nodes stand in the order in which the news came"
)

# How a worker ends that obeyed our SIGTERM, directly or under a shell.
_OBEYED = frozenset({0, -15, 143, None})
_STOPPED_BY_US = frozenset({WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.KILLED})


def failure_report(
    *,
    failures: tuple[WorkerFailure, ...],
    workers: tuple[WorkerStatus, ...],
    job_id: str,
    nnodes: int,
    log_dir: Path,
    stopped_reason: str = "",
    clocks_differ: bool = False,
) -> str:
    """Write the report about a failed job.

    It names the root cause with all that helps to find it, what the known error in its output
    means, the other failures in one line each, workers that ended badly only while they were
    being stopped, and what became of the rest. It stays within about 40 lines of 100 columns,
    however many workers there are. Apart from what workers printed themselves it holds no value
    of an environment variable.

    Args:
        failures: Workers that failed by themselves, root cause first (see `order`); may be empty
            when the job was stopped for another reason, such as silence of all workers.
        workers: Every worker of this node, or of all nodes that the report is about.
        job_id: Name of the job.
        nnodes: Nodes of the job; with several, each rank's node is named.
        log_dir: Folder of the log files.
        stopped_reason: Why the job was stopped, if not only because a worker failed.
        clocks_differ: True when the failures are of several nodes, whose times are not comparable.

    Returns:
        Plain text without a line end at its end.
    """
    own = {_name(failure) for failure in failures}
    rest = [worker for worker in workers if worker.name not in own]
    if failures:
        root = failures[0]
        victim = is_victim(root)
        before = _about(root, nnodes, victim)
        after = [
            *_field("hint", root.hint or hint(root.tail)),
            *(_suspects(rest, nnodes) if victim else _overruled(root, failures[1:])),
            *_other_failures(failures[1:], nnodes),
            *_ended_badly(rest),
            *_remaining(rest),
        ]
        part = "failed first" if victim else "is the root cause"
        title = f"job {job_id} failed: {_called(root)} {part}, {_short_end(root)}"
    else:
        root = None
        before = []
        after = _still_running(rest)
        title = f"job {job_id} failed: no worker failed by itself"
    if stopped_reason:
        before += _field("stopped", stopped_reason)
    if clocks_differ and failures:
        after += _field("clocks", _CLOCKS)
    after += _path_field("all logs", log_dir)
    head = [shorten(title, _WIDTH), *before]
    if root is not None and not _is_node(root):
        room = max(_MIN_TAIL, min(_MAX_TAIL, _MAX_LINES - len(head) - len(after) - 1))
        head += _last_lines(root, room)
    return "\n".join([*head, *after])


def _about(root: WorkerFailure, nnodes: int, victim: bool) -> list[str]:
    if _is_node(root):
        place = [_called(root)]
    elif root.rank < 0:
        place = [f"MindSpore's {_name(root)}, an auxiliary process, not a rank"]
    else:
        place = [f"rank {root.rank}"]
        if root.local_rank != root.rank:
            place.append(f"local rank {root.local_rank}")
        # A rank table and the tools of the host count otherwise than the worker, which sees its own only.
        on_host = f" (NPU {root.npu_id} of the host)" if root.npu_id not in (-1, root.device_id) else ""
        place.append(f"device {root.device_id}{on_host}")
    if nnodes > 1:
        place.append(f"node {root.node} (node rank {root.node_rank})")
    if not _is_node(root):
        place.append("no process" if root.pid is None else f"pid {root.pid}")
    lines = []
    if victim:
        lines += _field("root cause", "unclear: the first failure looks like the effect of another rank")
    lines += _field("failed first" if lines else "root cause", ", ".join(place))
    lines += _field("ended", _long_end(root))
    if root.reason and root.reason not in (_long_end(root), _short_end(root)):
        lines += _field("reason", root.reason)
    lines += _field("time", _stamp(root.ended))
    lines += _path_field("log", root.log_path)
    return lines


def _last_lines(root: WorkerFailure, room: int) -> list[str]:
    lines = excerpt(root.tail, room)
    if not lines:
        return _field("output", "no output before exit")
    return ["last lines:", *("  | " + shorten(line, _WIDTH - 4) for line in lines)]


def _overruled(root: WorkerFailure, others: Sequence[WorkerFailure]) -> list[str]:
    """Say why the root cause is not the earliest; `order` left whoever it overruled right behind it."""
    if not others or others[0].ended >= root.ended or not is_victim(others[0]):
        return []
    match = find(others[0].tail)
    sign = match.label if match else "its output"
    said = f"{_called(others[0])} ended earlier, but {sign} says that it was waiting for another rank"
    return _field("order", said)


def _suspects(rest: Sequence[WorkerStatus], nnodes: int) -> list[str]:
    silent = sorted(
        (w for w in rest if w.rank >= 0 and w.state in _STOPPED_BY_US and find([w.last_line]) is None),
        key=lambda w: w.last_output or 0.0,
    )
    where = []
    if silent:
        where.append(f"{_ranks(w.rank for w in silent)}, still running without such an error")
    if nnodes > 1:
        where.append("ranks of other nodes")
    if not where:
        return []
    return _field("suspects", f"look at {', and at '.join(where)}")


def _other_failures(others: Sequence[WorkerFailure], nnodes: int) -> list[str]:
    if not others:
        return []
    shown = others if len(others) < _MAX_FAILURES else others[: _MAX_FAILURES - 1]
    lines = ["other failures:"]
    for other in shown:
        node = f" on {shorten(other.node, _MAX_NODE)}" if nnodes > 1 else ""
        said = headline(other.tail) or "no output before exit"
        end = f"{_called(other)}{node}, {_short_end(other)}, {_stamp(other.ended, date=False)}"
        lines.append("  " + _joined(end, said))
    if len(others) > len(shown):
        lines.append(f"  ... and {len(others) - len(shown)} more")
    return lines


def _ended_badly(rest: Sequence[WorkerStatus]) -> list[str]:
    bad = [worker for worker in rest if _is_bad(worker)]
    if not bad:
        return []
    lines = ["ended badly while being stopped (an effect, not the cause):"]
    lines += [
        "  " + _joined(f"{worker.name}, {name_exit(worker.exit_code)}", worker.last_line)
        for worker in bad[:_MAX_OTHERS]
    ]
    if len(bad) > _MAX_OTHERS:
        lines.append(f"  ... and {len(bad) - _MAX_OTHERS} more")
    return lines


def _is_bad(worker: WorkerStatus) -> bool:
    if worker.state is WorkerState.FAILED:
        return True
    return worker.state is WorkerState.STOPPED and worker.exit_code not in _OBEYED


def _remaining(rest: Sequence[WorkerStatus]) -> list[str]:
    counts = (
        (WorkerState.STOPPED, "stopped by us in time (SIGTERM)"),
        (WorkerState.KILLED, "killed by us after the grace period (SIGKILL)"),
        (WorkerState.SUCCEEDED, "had ended well"),
        (WorkerState.RUNNING, "still running"),
        (WorkerState.STOPPING, "still being stopped"),
        (WorkerState.PENDING, "never started"),
    )
    said = []
    for state, words in counts:
        count = sum(w.rank >= 0 and w.state is state and not _is_bad(w) for w in rest)
        if count:
            said.append(f"{count} {words}")
    return _field("other ranks", ", ".join(said)) if said else []


def _still_running(rest: Sequence[WorkerStatus]) -> list[str]:
    """One line per worker that ran when the job was stopped, the longest silent first."""
    running = sorted(
        (w for w in rest if w.state in _STOPPED_BY_US or w.state is WorkerState.RUNNING),
        key=lambda w: w.last_output or 0.0,
    )
    if not running:
        return _remaining(rest)
    lines = ["workers that were running, the longest silent first:"]
    for worker in running[:_MAX_FAILURES]:
        if worker.last_output is None:
            lines.append(f"  {worker.name}, no output at all")
            continue
        since = _stamp(worker.last_output, date=False)
        lines.append("  " + _joined(f"{worker.name}, silent since {since}", worker.last_line))
    if len(running) > _MAX_FAILURES:
        lines.append(f"  ... and {len(running) - _MAX_FAILURES} more")
    return [*lines, *_remaining(rest)]


def _name(failure: WorkerFailure) -> str:
    return failure.name or (f"rank {failure.rank}" if failure.rank >= 0 else "scheduler")


def _called(failure: WorkerFailure) -> str:
    if _is_node(failure):
        return failure.name
    return f"rank {failure.rank}" if failure.rank >= 0 else f"MindSpore's {_name(failure)}"


def _is_node(failure: WorkerFailure) -> bool:
    """Tell whether a whole node failed, which an engine says of a node it has lost."""
    return failure.rank < 0 and failure.name.startswith("node ")


def _short_end(failure: WorkerFailure) -> str:
    if _is_node(failure):
        return "lost"
    return "not started" if failure.pid is None else name_exit(failure.exit_code)


def _long_end(failure: WorkerFailure) -> str:
    if _is_node(failure):
        return "lost, with all its workers"
    return "could not be started" if failure.pid is None else explain_exit(failure.exit_code)


def _joined(end: str, said: str) -> str:
    """An end and the words that go with it, in one line: the end is kept, the words give way."""
    room = max(8, _WIDTH - 4 - len(end))
    return f"{end}: {shorten(said, room)}" if said else end


def _field(key: str, value: str) -> list[str]:
    return textwrap.wrap(
        shorten(value, _MAX_VALUE),
        _WIDTH,
        initial_indent=_label(key),
        subsequent_indent=_label(""),
        break_on_hyphens=False,
    )


def _path_field(key: str, path: Path) -> list[str]:
    """A path stays in one line, however long, so that it can be copied."""
    return [_label(key) + shorten(str(path), _MAX_PATH)]


def _label(key: str) -> str:
    return f"{key + ':' if key else '':<14}"


def _ranks(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(listed[:_MAX_LISTED])}{more}"


def _stamp(seconds: float, *, date: bool = True) -> str:
    try:
        moment = datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, ValueError, OSError):
        return "time unknown"
    clock = moment.strftime("%H:%M:%S.") + f"{moment.microsecond // 1000:03d}"
    return f"{moment:%Y-%m-%d} {clock} {moment:%z}" if date else clock
