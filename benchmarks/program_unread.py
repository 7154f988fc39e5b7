"""A program that opens its job's streams and never reads them. Arguments: log folder, then the command."""

import asyncio
import sys

from davincirunsdk import FMKManager


async def main() -> None:
    """Run the job."""
    log_dir, *command = sys.argv[1:]
    async with FMKManager(command, log_dir=log_dir, nproc_per_node=2) as manager:
        streams = manager.logs(), manager.log_blocks()
        await manager.wait()
        del streams


asyncio.run(main())
