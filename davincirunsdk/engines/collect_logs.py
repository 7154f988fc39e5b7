"""Log files of other nodes, brought to the driver's log folder after a failure: `--collect-logs`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from davincirunsdk.concurrency import in_thread, opened
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.logs.file import LogFile
from davincirunsdk.phrases import count, ranks, some_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from davincirunsdk.engines.node import Member, NodeHandle
    from davincirunsdk.types import WorkerStatus

logger: logging.Logger = logging.getLogger("davincirunsdk")

_MOST = 256 << 20
"""Bytes that are brought here in all."""

_MOST_OF_FILE = 8 << 20
_LEAST_OF_FILE = 64 << 10
_HEAD = 8
"""One part in so many of what is kept of a longer file is its head: it fails at its end."""

_PIECE = 1 << 20
_NODES_AT_A_TIME = 16
_BEGINNING = 1024
_MOST_SECONDS = 120.0


class _NoRoom(Exception):
    """The driver's folder cannot be read or written; the text says why."""


async def collect_logs(
    members: Sequence[Member], first: Sequence[int], *, proof: Path, attempt: int | None
) -> str:
    """Bring the log files of nodes that do not share the driver's file system.

    Args:
        members: The nodes, whose workers have ended.
        first: Ranks that matter most, should there be too many.
        proof: A file in the driver's log folder: a node that sees it shares the folder.
        attempt: Number to put into the files' names, None for none.

    Returns:
        What was brought, or why not, in one sentence; "" if there was nothing to bring.
    """
    try:
        return await asyncio.wait_for(_collect(members, first, proof, attempt), _MOST_SECONDS)
    except asyncio.TimeoutError:
        return f"not all logs could be brought here within {_MOST_SECONDS:g} s"
    except _NoRoom as error:
        return f"logs cannot be brought here: {error}"


async def _collect(members: Sequence[Member], first: Sequence[int], proof: Path, attempt: int | None) -> str:
    folder = proof.parent
    try:
        beginning = await in_thread(_beginning, proof)
    except OSError as error:
        raise _NoRoom(f"{proof} cannot be read: {error.strerror}") from None
    there = [member for member in members if not member.lost and member.result is not None]
    lost = [member for member in members if member.lost]
    gone = await asyncio.gather(*(in_thread(_is_away, member) for member in lost))
    away = [f"{member.name}, which was lost" for member, is_away in zip(lost, gone, strict=True) if is_away]
    shared = await asyncio.gather(*(_shares(member.handle, proof, beginning) for member in there))
    wanted = [
        (member, worker)
        for member, sees in zip(there, shared, strict=True)
        if not sees
        for worker in (*member.workers, *member.auxiliaries)
    ]
    if not wanted:
        return f"no logs can be brought here of {some_of(away)}" if away else ""
    order = {rank: place for place, rank in enumerate(first)}
    wanted.sort(key=lambda one: order.get(one[1].rank, len(order)))
    most = min(_MOST_OF_FILE, max(_LEAST_OF_FILE, _MOST // len(wanted)))
    chosen, left = wanted[: _MOST // most], wanted[_MOST // most :]
    of_node: dict[str, list[WorkerStatus]] = {}
    for member, worker in chosen:
        of_node.setdefault(member.name, []).append(worker)
    handles = {member.name: member.handle for member in there}
    turns = asyncio.Semaphore(_NODES_AT_A_TIME)
    brought: list[int] = []
    cut: list[int] = []

    async def bring(node: str, workers: Sequence[WorkerStatus]) -> None:
        async with turns:
            for worker in workers:
                path = folder / worker.log_path.name
                if attempt is not None:
                    path = path.with_name(f"{path.stem}-attempt-{attempt}{path.suffix}")
                try:
                    whole = await _bring(handles[node], worker.rank, path, most)
                except (NodeLostError, RuntimeError, _NoRoom) as error:
                    away.append(f"{node}: {error}")
                    return
                if worker.rank >= 0:
                    brought.append(worker.rank)
                    cut.extend(() if whole else (worker.rank,))

    await asyncio.gather(*(bring(node, workers) for node, workers in of_node.items()))
    parts = [f"logs of {ranks(sorted(brought)) if brought else 'no rank'} were brought to {folder}"]
    if cut:
        parts.append(f"of {ranks(sorted(cut))} head and tail, {most >> 10} KiB each")
    if left:
        parts.append(f"{count(len(left), 'more log')} stayed on the nodes")
    if away:
        parts.append(f"not those of {some_of(away)}")
    return "; ".join(parts)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BEGINNING)


def _is_away(member: Member) -> bool:
    return any(not worker.log_path.exists() for worker in member.workers)


async def _shares(handle: NodeHandle, proof: Path, beginning: bytes) -> bool:
    try:
        return await handle.sees_file(str(proof), beginning)
    except NodeLostError:
        # It has nothing that could be brought.
        return True


async def _bring(handle: NodeHandle, rank: int, path: Path, most: int) -> bool:
    """Bring one file; tell whether it is whole.

    Raises:
        NodeLostError: The node is lost.
        PlatformError: The file cannot be read there.
        _NoRoom: It cannot be written here.
    """
    piece = await handle.read_log(rank, 0, min(most, _PIECE))
    size = piece.size
    head = size if size <= most else most // _HEAD
    try:
        file = await opened(
            lambda: LogFile(path, lambda text: logger.warning("%s", text)), close=LogFile.close
        )
    except OSError as error:
        raise _NoRoom(f"{path} cannot be written: {error.strerror}") from None
    try:
        await in_thread(file.write, piece.data[:head])
        place = min(head, len(piece.data))
        while place < size and piece.data:
            if place == head < size:
                place = size - (most - head)
                note = f"\n... {place - head} bytes left out here; the file on the node has all\n"
                await in_thread(file.write, note.encode())
            end = head if place < head else size
            piece = await handle.read_log(rank, place, min(_PIECE, end - place))
            await in_thread(file.write, piece.data)
            place += len(piece.data)
    finally:
        await in_thread(file.close)
    return head == size
