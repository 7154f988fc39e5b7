"""Command lines of torchrun and msrun, in words of davincirun: the first word is all that has to change.

Every option of theirs is one row below: it becomes an option of ours, it has no meaning here, or it is
refused with the words to write instead. Options and defaults as in torch 2.13's `run.py` and in
MindSpore 2.10's `parallel/cluster/run.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TRUE = frozenset({"true", "yes", "1"})
_FALSE = frozenset({"false", "no", "0", ""})
_STOPPING = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A command line as davincirun reads it.

    Attributes:
        words: Options of davincirun, then the command.
        notes: Lines for the user: what has no meaning here, and what is another default.
    """

    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


class PeerOptionError(ValueError):
    """An option of a peer that cannot be translated; the text names what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What stands on the line besides the option that is being translated."""

    given: Mapping[str, str]
    """Values of the peers' and our own options, by name."""

    env: Mapping[str, str]
    """The launcher's environment."""

    @property
    def placed(self) -> bool:
        """True when option or platform say which node this is."""
        return self.given.get("--node-rank", "-1") != "-1" or any(self.env.get(name) for name in _PLACES)


Words: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """An option of a peer.

    Attributes:
        translate: From its value to words of ours; None when it has no meaning here.
        why: Why it has no meaning here.
        takes_value: It is followed by one.
        quiet: Not even worth a note.
        of_msrun: Only msrun has it.
    """

    translate: Callable[[str, _Line], Words] | None = None
    why: str = ""
    takes_value: bool = True
    quiet: bool = False
    of_msrun: bool = False


def translate(words: Sequence[str], own: Mapping[str, bool], env: Mapping[str, str]) -> Translation:
    """Read a command line that may be written for torchrun or msrun.

    Args:
        words: All words after the first.
        own: Options of davincirun itself, and whether each takes a value.
        env: The launcher's environment: a platform may give the place that the line leaves out.

    Returns:
        The words for davincirun's own parser, unchanged where there is nothing to translate.

    Raises:
        PeerOptionError: An option has no counterpart; the text says what to write instead.
    """
    options, command = _split(words, own)
    line = _Line(given={name: value or "" for name, value in options}, env=env)
    result: list[str] = []
    idle: list[str] = []
    from_torchrun = from_msrun = False
    for name, value in options:
        peer = _PEERS.get(name)
        if name in _BOTH:
            result += _BOTH[name](value or "", line)
        elif name in own:
            result += [name] if value is None else [name, value]
        elif peer is None:
            result += [name] if value is None else [f"{name}={value}"]
        else:
            from_msrun |= peer.of_msrun
            from_torchrun |= not peer.of_msrun
            if peer.translate is not None:
                result += peer.translate(value or "", line)
            elif not peer.quiet:
                idle.append(f"{name} ({peer.why})")
    notes = [f"without effect here: {', '.join(idle)}"] if idle else []
    if from_msrun and "--framework" not in line.given:
        result += ["--framework", "mindspore"]
    if from_torchrun and not from_msrun and "--nproc-per-node" not in line.given:
        notes.append("one worker per device, since --nproc-per-node is not given; torchrun would start one")
    if from_msrun:
        result += _msrun_numbers(line)
    return Translation(words=(*result, *command), notes=tuple(notes))


def _split(
    words: Sequence[str], own: Mapping[str, bool]
) -> tuple[list[tuple[str, str | None]], tuple[str, ...]]:
    """Take the options before the command apart: each with its value, None for a flag."""
    options: list[tuple[str, str | None]] = []
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--" or not word.startswith("-") or word == "-":
            break
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if name.startswith("--"):
            name = name.replace("_", "-")
            name = _ALSO.get(name, name)
        peer = _PEERS.get(name)
        place += 1
        takes_value = (
            True if name in _BOTH else own[name] if name in own else peer.takes_value if peer else False
        )
        if equals:
            options.append((name, value))
        elif takes_value and place < len(words):
            options.append((name, words[place]))
            place += 1
        else:
            options.append((name, None))
    return options, tuple(words[place:])


def _to(option: str) -> Callable[[str, _Line], Words]:
    return lambda value, line: (option, value)


def _refused(text: str) -> Callable[[str, _Line], Words]:
    def refuse(value: str, line: _Line) -> Words:
        raise PeerOptionError(text)

    return refuse


def _nproc_per_node(value: str, line: _Line) -> Words:
    if value in ("auto", "gpu", "npu"):
        # One per device is what happens without the option.
        return ()
    return ("--nproc-per-node", str(len(os.sched_getaffinity(0))) if value == "cpu" else value)


def _nnodes(value: str, line: _Line) -> Words:
    least, colon, most = value.partition(":")
    return ("--nnodes", least if not colon or least == most else value)


def _node_rank(value: str, line: _Line) -> Words:
    # msrun's -1: ranks as the nodes come. Whether that will do depends on the number of nodes.
    return () if value == "-1" else ("--node-rank", value)


def _log_dir(value: str, line: _Line) -> Words:
    return ("--log-dir", value or ".")


def _rdzv_backend(value: str, line: _Line) -> Words:
    if value not in ("static", "c10d"):
        raise PeerOptionError(
            f"--rdzv-backend {value} is not available: nodes meet at node 0 without another service; "
            "write --master-addr HOST and --master-port PORT instead"
        )
    _need_place("--rdzv-backend", line)
    return ()


def _rdzv_endpoint(value: str, line: _Line) -> Words:
    _need_place("--rdzv-endpoint", line)
    if "--standalone" in line.given or not value:
        return ()
    found = re.fullmatch(r"(\[[^\]]+\]|[^:]*)(?::([0-9]+))?", value)
    if found is None:
        raise PeerOptionError(f"--rdzv-endpoint {value!r} is not understood: expected HOST:PORT")
    host, port = found[1].strip("[]"), found[2]
    words: Words = ("--master-addr", host) if host and "--master-addr" not in line.given else ()
    if port and port != "0" and "--master-port" not in line.given:
        words += ("--master-port", port)
    return words


def _need_place(option: str, line: _Line) -> None:
    """Refuse a rendezvous that would have to give the nodes their places."""
    nodes = line.given.get("--nnodes", line.env.get("PET_NNODES", "1")).rpartition(":")[2]
    if nodes.isdigit() and int(nodes) > 1 and not line.placed:
        raise PeerOptionError(
            f"{option} gives the nodes no places here: write --node-rank 0 on the node of the endpoint and "
            "--node-rank 1, 2, ... on the others"
        )


_PLACES = ("PET_NODE_RANK", "DAVINCIRUN_NODE_RANK", "SLURM_NODEID", "VC_TASK_INDEX", "OMPI_COMM_WORLD_RANK")


def _rdzv_id(value: str, line: _Line) -> Words:
    return () if value in ("", "none") or "--name" in line.given else ("--name", value)


def _signals(value: str, line: _Line) -> Words:
    others = {name.strip().upper() for name in value.split(",")} - _STOPPING
    if others - {"SIGUSR1", "SIGUSR2"}:
        raise PeerOptionError(
            f"--signals-to-handle {value}: SIGTERM, SIGINT, SIGHUP and SIGQUIT stop the job, SIGUSR1 and "
            "SIGUSR2 are passed on to the workers; leave the option out"
        )
    return ()


def _numa_binding(value: str, line: _Line) -> Words:
    if value in ("node", "exclusive"):
        return ("--bind", value)
    raise PeerOptionError(f"--numa-binding {value} is not available: write --bind node or --bind exclusive")


def _bind_core(value: str, line: _Line) -> Words:
    if value.lower() in _FALSE:
        return ()
    if value.lower() in _TRUE:
        # Where it finds no way msrun goes on without, and so does `auto`.
        return ("--bind", "auto")
    raise PeerOptionError("cores per device are given as a list here: write --bind 0-9,10-19,...")


def _join(value: str, line: _Line) -> Words:
    # What msrun's default does, leaving the workers alone, has an option of its own here.
    return ()


def _cluster_time_out(value: str, line: _Line) -> Words:
    return ("--env", f"MS_TOPO_TIMEOUT={value}")


def _rank_table_file(value: str, line: _Line) -> Words:
    return ("--rank-table", value) if value else ()


def _tail_worker_log(value: str, line: _Line) -> Words:
    return ("--echo", "all" if value in ("-1", "") else value)


def _sim(value: str, line: _Line) -> Words:
    if value in ("-1", ""):
        return ()
    raise PeerOptionError(
        "a dry run without devices needs no launcher: set MS_SIMULATION_LEVEL and RANK_ID, and run the "
        "script with python"
    )


def _msrun_numbers(line: _Line) -> Words:
    """From workers in all and workers here to nodes."""
    if "--nproc-per-node" in line.given or "--nnodes" in line.given:
        return ()
    total, local = (line.given.get(name, "") for name in ("--worker-num", "--local-worker-num"))
    for name, text in (("--worker_num", total), ("--local_worker_num", local)):
        if text and not (text.isascii() and text.isdigit() and int(text) > 0):
            raise PeerOptionError(f"{name} is {text!r}: expected a number of workers, at least 1")
    if not total and not local:
        return ()
    # msrun's own default is 8 for both; a job smaller than a node is meant to be on this one.
    here = int(local or min(8, int(total)))
    every = int(total or max(8, here))
    if every % here:
        raise PeerOptionError(
            f"--worker_num is {every} and --local_worker_num {here}: nodes must have equally many workers; "
            "with different ones, give every node a rank table (--rank-table)"
        )
    words: Words = ("--nproc-per-node", str(here))
    if every == here:
        return (*words, "--nnodes", "1")
    if not line.placed:
        raise PeerOptionError(
            f"{every} workers, {here} of them here, make {every // here} nodes: write --node_rank 0 on the "
            "node of --master_addr and --node_rank 1, 2, ... on the others"
        )
    return (*words, "--nnodes", str(every // here))


_SHORT = {"-r": "--redirects", "-t": "--tee", "-np": "-n"}
_ALSO = {"--nproc": "--nproc-per-node"}
_BOTH: Mapping[str, Callable[[str, _Line], Words]] = {
    "--nproc-per-node": _nproc_per_node,
    "--nnodes": _nnodes,
    "--node-rank": _node_rank,
    "--log-dir": _log_dir,
}
"""Options of ours that take the peers' values, too."""

_FILES = "all output goes to one file per rank; --echo chooses what is shown"
_PEERS: Mapping[str, _Peer] = {
    # torchrun
    "--rdzv-backend": _Peer(translate=_rdzv_backend),
    "--rdzv-endpoint": _Peer(translate=_rdzv_endpoint),
    "--rdzv-id": _Peer(translate=_rdzv_id),
    "--rdzv-conf": _Peer(why="nodes meet at node 0"),
    "--standalone": _Peer(takes_value=False, translate=lambda value, line: ("--nnodes", "1")),
    "--monitor-interval": _Peer(why="an end is told by the kernel, nothing is polled"),
    "--start-method": _Peer(why="workers are commands"),
    "--event-log-handler": _Peer(why="events are in <job>-events.jsonl"),
    "--role": _Peer(why="workers have one role"),
    "--no-python": _Peer(takes_value=False, quiet=True, why="only *.py gets a Python"),
    "--run-path": _Peer(takes_value=False, quiet=True, why="scripts are run as they are"),
    "--redirects": _Peer(why=_FILES),
    "--tee": _Peer(why=_FILES),
    "--local-ranks-filter": _Peer(translate=_to("--echo")),
    "--duplicate-stdout-filters": _Peer(why="search the ranks' log files"),
    "--duplicate-stderr-filters": _Peer(why="search the ranks' log files"),
    "--local-addr": _Peer(
        translate=_refused("--local-addr is not available: name the interface with --iface NAME")
    ),
    "--logs-specs": _Peer(
        translate=_refused(
            "--logs-specs is not available: read the output in Python, `async for line in manager.logs()`"
        )
    ),
    "--numa-binding": _Peer(translate=_numa_binding),
    "--signals-to-handle": _Peer(translate=_signals),
    "--shutdown-timeout": _Peer(translate=_to("--grace-period")),
    "--virtual-local-rank": _Peer(takes_value=False, translate=lambda value, line: ("--visible", "one")),
    # msrun
    "--worker-num": _Peer(of_msrun=True, quiet=True),
    "--local-worker-num": _Peer(of_msrun=True, quiet=True),
    "--join": _Peer(of_msrun=True, translate=_join),
    "--cluster-time-out": _Peer(of_msrun=True, translate=_cluster_time_out),
    "--bind-core": _Peer(of_msrun=True, translate=_bind_core),
    "--bind-numa": _Peer(of_msrun=True, translate=_bind_core),
    "--sim-level": _Peer(of_msrun=True, translate=_sim),
    "--sim-rank-id": _Peer(of_msrun=True, quiet=True),
    "--rank-table-file": _Peer(of_msrun=True, translate=_rank_table_file),
    "--worker-log-name": _Peer(of_msrun=True, why="files are called <job>-proc-rank-R-device-D.txt"),
    "--tail-worker-log": _Peer(of_msrun=True, translate=_tail_worker_log),
    # mpirun: only the words to write
    "-n": _Peer(translate=_refused("-n and -np are mpirun's: write --nproc-per-node N, and --nnodes N")),
}
