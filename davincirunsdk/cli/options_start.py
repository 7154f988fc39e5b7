"""Options of `davincirun` that say which workers there are, and how they start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from davincirunsdk.cli.groups import NODES, WORKERS, option
from davincirunsdk.cli.parameters import SECONDS, WHOLE, Nodes, variables

if TYPE_CHECKING:
    from collections.abc import Callable

START: list[Callable[[Any], Any]] = [
    option(
        WORKERS,
        "--nproc-per-node",
        type=WHOLE,
        metavar="N",
        help="Workers on each node.  [default: one per device]",
    ),
    option(WORKERS, "-m", "--module", is_flag=True, help="COMMAND is a Python module."),
    option(
        WORKERS,
        "--work-dir",
        default=".",
        type=click.Path(),
        metavar="DIR",
        help="Folder that the workers run in; relative paths in COMMAND start there. {rank}, {local_rank}, "
        "{node_rank}, {device} and {attempt} are filled in, here and in values of --env.  [default: .]",
    ),
    option(
        WORKERS,
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        callback=variables,
        help="Variable for the workers; without =VALUE, its value here. May be given more than once.",
    ),
    option(WORKERS, "--expand", is_flag=True, help="Fill in {rank} and its like in COMMAND, too."),
    option(
        WORKERS,
        "--framework",
        default="auto",
        type=click.Choice(["auto", "mindspore", "torch", "none"]),
        help="Which variables a worker gets; only mindspore starts MindSpore's scheduler.  [default: auto]",
    ),
    option(
        WORKERS,
        "--devices",
        metavar="LIST",
        help="NPUs to use on this node: physical numbers, such as 4-7 or 0,2.  [default: all visible]",
    ),
    option(
        WORKERS,
        "--wait-devices",
        type=SECONDS,
        metavar="SECONDS",
        help="How long to wait for NPUs that a job or a program on this host holds.  [default: do not wait]",
    ),
    option(
        WORKERS,
        "--visible",
        default="all",
        type=click.Choice(["all", "one"]),
        help="NPUs that a worker sees: those of all workers of its node, or only its own one, as number 0.  "
        "[default: all]",
    ),
    option(
        WORKERS,
        "--bind",
        metavar="HOW",
        help="CPUs of a worker: none, any; auto or node, those near its NPU; exclusive, a share of those for "
        "itself; or a list such as 0-31, shared out among the workers.  [default: none]",
    ),
    option(
        WORKERS,
        "--name",
        metavar="NAME",
        help="Name of the job and of its log files.  [default: the platform's job id, or the host name]",
    ),
    option(
        NODES,
        "--rank-table",
        type=click.Path(),
        metavar="FILE",
        help="HCCL rank table of any version; with --engine ray it says which nodes to take.  [default: the "
        "platform's]",
    ),
    option(
        NODES,
        "--rank-table-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="How long to wait for a complete rank table.  [default: 1800]",
    ),
    option(
        NODES,
        "--nnodes",
        type=Nodes(int, "a whole number"),
        metavar="N",
        help="Number of nodes; with --engine ray also MIN:MAX, as many of them as are free.  [default: from "
        "the platform, or 1]",
    ),
    option(
        NODES,
        "--node-rank",
        type=WHOLE,
        metavar="N",
        help="Rank of this node, counted from 0.  [default: from the platform, or 0]",
    ),
    option(
        NODES,
        "--master-addr",
        metavar="HOST",
        help="Name or address of node 0.  [default: from the platform, or 127.0.0.1]",
    ),
    option(
        NODES,
        "--master-port",
        type=WHOLE,
        metavar="PORT",
        help="Port for the rendezvous.  [default: from the platform, or a free one]",
    ),
    option(
        NODES,
        "--iface",
        default="auto",
        metavar="NAME",
        help="Network interface to the other nodes; auto finds it, none sets nothing.  [default: auto]",
    ),
    option(
        NODES,
        "--ignore-platform",
        is_flag=True,
        help="Go by these options where the platform or the rank table says otherwise.",
    ),
    option(
        NODES,
        "--lost-after",
        type=SECONDS,
        metavar="SECONDS",
        help="Silence after which another node counts as lost.  [default: 30]",
    ),
    option(
        NODES,
        "--meet",
        type=click.Choice(["auto", "off", "require"]),
        help="Whether launchers started on several nodes meet at node 0, so that all end together.  "
        "[default: auto]",
    ),
    option(
        NODES,
        "--meet-port",
        type=WHOLE,
        metavar="PORT",
        help="Port on node 0 for the meeting.  [default: the one after the rendezvous port]",
    ),
    option(
        NODES,
        "--meet-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="How long to wait for all nodes to come to the meeting.  [default: 600]",
    ),
    option(
        NODES,
        "--meet-key-file",
        type=click.Path(),
        metavar="FILE",
        help="File with a secret that all nodes share, to keep others out.  "
        "[default: the value of DAVINCIRUN_MEET_KEY]",
    ),
    option(
        NODES,
        "--leave-after",
        type=SECONDS,
        metavar="SECONDS",
        help="How long a healthy node stays after a failure on another one.  "
        "[default: 30 where MindCluster recovers jobs, else 0]",
    ),
]
