"""A small all-reduce over TCP: every worker sends its numbers to rank 0 and gets back the sum.

Rank 0 adds in the order of ranks and everybody gets the same bytes, so the result is the same on every worker
to the last bit, in every run.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from davincirunsdk.demo.place import DemoError, Place

if TYPE_CHECKING:
    from davincirunsdk.demo.network import Array

TIMEOUT = 60.0
"""Seconds that workers wait for each other, at the start and in every step."""

_HELLO = struct.Struct("!8sII")
_HELLO_MARK, _WELCOME = b"dvcdemo?", b"dvcdemo!"
_HELLO_TIMEOUT = 5.0
_RETRY_INTERVAL = 0.05
_BACKLOG = 512
_SIZE = struct.Struct("!Q")


class AllReduce:
    """Adds up vectors over all workers of a job.

    Args:
        place: This worker's place.
        timeout: Seconds to wait for the other workers, at the start and in each all-reduce.

    Raises:
        DemoError: The others cannot be reached in time, or are not of this job.
    """

    def __init__(self, place: Place, *, timeout: float = TIMEOUT) -> None:
        self._place = place
        self._timeout = timeout
        self._links: dict[int, socket.socket] = {}
        self._held: list[int] = []
        try:
            if place.rank > 0:
                self._links[0] = _join(place, timeout)
            elif place.world_size > 1:
                _gather(place, timeout, self._links)
            for link in self._links.values():
                link.settimeout(timeout)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Python closes sockets some time before a failing process has ended. Only the kernel closes
                # these copies: peers see a worker go when it really does, so the first to fail ends first.
                self._held.append(os.dup(link.fileno()))
        except BaseException:
            self.close()
            raise

    def __call__(self, values: Array) -> Array:
        """Adds up the workers' vectors, element by element; each worker must call it with the same length.

        Args:
            values: This worker's vector.

        Returns:
            The sum, the same on all workers.

        Raises:
            DemoError: Another worker has gone, sent something else, or is silent for too long.
        """
        if self._place.rank > 0:
            self._send(0, values)
            return self._receive(0, values.size)
        total: Array = values.copy()
        for rank in sorted(self._links):
            total += self._receive(rank, values.size)
        for rank in self._links:
            self._send(rank, total)
        return total

    def close(self) -> None:
        """Closes the connections; may be called twice."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        while self._held:
            os.close(self._held.pop())

    def _send(self, rank: int, values: Array) -> None:
        try:
            self._links[rank].sendall(_SIZE.pack(values.size) + values.tobytes())
        except OSError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int, size: int) -> Array:
        values = np.empty(size, np.float32)
        try:
            (announced,) = _SIZE.unpack(_read(self._links[rank], _SIZE.size))
            if announced != size:
                raise DemoError(
                    f"{self._place}: rank {rank} sent {announced} numbers where {size} were expected; "
                    "do all workers run the same command and version?"
                )
            values[:] = np.frombuffer(_read(self._links[rank], values.nbytes), np.float32)
        except OSError as error:
            raise self._lost(rank, error) from error
        return values

    def _lost(self, rank: int, error: OSError) -> DemoError:
        if isinstance(error, TimeoutError):
            return DemoError(f"{self._place}: no answer from rank {rank} within {self._timeout:g} s")
        return DemoError(f"{self._place}: rank {rank} left in the middle of the training ({_reason(error)})")


def _gather(place: Place, timeout: float, links: dict[int, socket.socket]) -> None:
    """Rank 0: waits until every other worker has connected."""
    deadline = time.monotonic() + timeout
    with _listen(place) as server:
        while len(links) < place.world_size - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = server.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, place.world_size) if rank not in links]
                raise DemoError(f"{place}: no connection from ranks {missing} within {timeout:g} s") from None
            try:
                link.settimeout(_HELLO_TIMEOUT)
                mark, rank, world_size = _HELLO.unpack(_read(link, _HELLO.size))
                if mark != _HELLO_MARK:
                    raise ConnectionError("not one of us")
                if world_size != place.world_size or not 0 < rank < world_size or rank in links:
                    raise DemoError(
                        f"{place}: somebody who calls itself rank {rank} of {world_size} connected to "
                        f"{_address(place)}; do two jobs share this port, or two workers one rank?"
                    )
                link.sendall(_WELCOME)
            except OSError:  # some other program knocked, or the worker has already gone and will be missed
                link.close()
            except DemoError:
                link.close()
                raise
            else:
                links[rank] = link


def _listen(place: Place) -> socket.socket:
    """Listens on the master address; on all addresses if that is not ours (a service's, say)."""
    try:
        families = []
        for family, _, _, _, address in socket.getaddrinfo(
            place.master_addr, place.master_port, type=socket.SOCK_STREAM
        ):
            families.append(family)
            try:
                return socket.create_server(address, family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        return socket.create_server(("", place.master_port), family=families[-1], backlog=_BACKLOG)
    except OSError as error:
        raise DemoError(
            f"{place}: cannot listen on {_address(place)} ({_reason(error)}); "
            "choose another address or port with --master-addr and --master-port"
        ) from error


def _join(place: Place, timeout: float) -> socket.socket:
    """Any other rank: tries until rank 0 listens, which may be started later."""
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        try:
            return _knock(place, max(remaining, 0.001))
        except OSError as error:
            if remaining <= 0:
                address, reason = _address(place), _reason(error)
                raise DemoError(
                    f"{place}: cannot reach rank 0 at {address} within {timeout:g} s ({reason})"
                ) from error
        time.sleep(_RETRY_INTERVAL)


def _knock(place: Place, timeout: float) -> socket.socket:
    link = socket.create_connection((place.master_addr, place.master_port), timeout)
    try:
        # While nobody listens on a port of this machine, the kernel may choose that very port for our own end
        # and connect us to ourselves.
        if link.getsockname() == link.getpeername():
            raise ConnectionError("nobody listens there yet")
        link.sendall(_HELLO.pack(_HELLO_MARK, place.rank, place.world_size))
        if _read(link, len(_WELCOME)) != _WELCOME:
            raise ConnectionError("another program listens there")
    except BaseException:
        link.close()
        raise
    return link


def _read(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("connection closed")
        view = view[count:]
    return data


def _address(place: Place) -> str:
    return f"{place.master_addr}:{place.master_port}"


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # Python adds the address to some texts, and we name it already
    return error.strerror or str(error)
