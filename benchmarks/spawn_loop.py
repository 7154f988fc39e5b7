"""The least a launcher can do: start N workers, end the others when one fails.

    python spawn_loop.py plain|asyncio N WORD...

`plain` is `subprocess.Popen` in a loop; its workers write to its own standard output. `asyncio` is what
any launcher in Python pays with asyncio and click: imports, a subprocess and a pipe per worker.
"""

from __future__ import annotations

import os
import sys


def plain(number: int, command: list[str]) -> int:
    """Start workers in a loop and wait for whichever ends next."""
    import subprocess

    workers = {}
    for rank in range(number):
        worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "RANK": str(rank)})
        workers[worker.pid] = worker
    first = 0
    while workers:
        pid, status = os.waitpid(-1, 0)
        worker = workers.pop(pid)
        worker.returncode = os.waitstatus_to_exitcode(status)
        if worker.returncode and not first:
            first = worker.returncode
            for other in workers.values():
                other.terminate()
    return first


def with_asyncio(number: int, words: list[str]) -> int:
    """Start workers as asyncio subprocesses, pass on what they print."""
    import asyncio
    import contextlib

    import click

    async def run(command: tuple[str, ...]) -> int:
        workers: list[asyncio.subprocess.Process] = []

        async def see_through(worker: asyncio.subprocess.Process) -> int:
            assert worker.stdout is not None
            async for line in worker.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            code = await worker.wait()
            if code and all(other.returncode in (None, 0) for other in workers if other is not worker):
                for other in workers:
                    if other.returncode is None:
                        with contextlib.suppress(ProcessLookupError):
                            other.terminate()
            return code

        async def start(rank: int) -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "RANK": str(rank)},
            )

        workers.extend([await start(rank) for rank in range(number)])
        return next(filter(None, await asyncio.gather(*map(see_through, workers))), 0)

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("command", nargs=-1, type=click.UNPROCESSED)
    def main(command: tuple[str, ...]) -> None:
        sys.exit(asyncio.run(run(command)))

    main(words)
    return 0


if __name__ == "__main__":
    way, count, *rest = sys.argv[1:]
    sys.exit((plain if way == "plain" else with_asyncio)(int(count), rest))
