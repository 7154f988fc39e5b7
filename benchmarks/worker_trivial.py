"""A worker that says one line and ends."""

import os
import sys

RANKS = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK")
if os.environ.get("MS_ROLE") == "MS_SCHED":
    # msrun starts the script once more, for MindSpore's scheduler.
    sys.exit(0)
rank = next(os.environ[name] for name in RANKS if name in os.environ)
os.write(1, f"first line of {rank}.\n".encode())
