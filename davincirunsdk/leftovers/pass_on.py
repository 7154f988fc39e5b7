"""Pass on a signal that asks for a checkpoint, to those processes of a job that handle it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from davincirunsdk.leftovers.proc import send
from davincirunsdk.leftovers.stop_order import Order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from davincirunsdk.leftovers.proc import MarkedProcess
    from davincirunsdk.leftovers.process_tree import ProcessTree, Top


def pass_on(number: int, tree: ProcessTree, tops: Sequence[Top]) -> tuple[MarkedProcess, ...]:
    """Signal every process of a job that has a handler for a signal, or blocks it and waits for it.

    Others would die of it, wrappers and `tee` among them. What a launcher within the job has started
    gets the signal from that launcher. Blocking, for a thread that may be left behind.

    Args:
        number: The signal.
        tree: Finds the processes.
        tops: The job's workers.

    Returns:
        The processes that were signalled.
    """
    living = tree.find(tops)
    order = Order(tree.see(living), number=number)
    return tuple(
        process
        for process in living
        if _handles(tree, process, number) and not order.is_left_to_launcher(process)
        if _send(tree, process, number)
    )


def reached_by_sender(environment: Mapping[str, str]) -> bool:
    """Tell whether whoever signals this process signals all its descendants as well.

    Slurm does, to every process of a step; it does not where the job's batch script runs the launcher.

    Args:
        environment: The launcher's.
    """
    return environment.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in environment


def _handles(tree: ProcessTree, process: MarkedProcess, number: int) -> bool:
    signals = tree.proc.disposition(process.pid)
    if signals is None or signals.ignores(number):
        return False
    return signals.catches(number) or tree.proc.awaits_signal(process.pid, number)


def _send(tree: ProcessTree, process: MarkedProcess, number: int) -> bool:
    try:
        return send(tree.proc, process, number)
    except PermissionError:
        return False
