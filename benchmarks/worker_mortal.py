"""A worker that waits, obeys SIGTERM and notes when it came; one of them dies when told to.

Arguments: folder of the notes, rank that dies, how (`exit` or `kill`), seconds until then.
"""

import os

RANKS = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK")
if os.environ.get("MS_ROLE") == "MS_SCHED":
    # msrun starts the script once more as MindSpore's scheduler and waits for that, too, however long it
    # takes; this one ends with the first death, as if it had noticed at once.
    import sys
    import time

    above = os.getppid()
    while not os.path.exists(f"{sys.argv[1]}/died") and os.getppid() == above:
        time.sleep(0.005)
    sys.exit(0)
rank = next(os.environ[name] for name in RANKS if name in os.environ)
os.write(1, f"first line of {rank}.\n".encode())

import signal  # noqa: E402  # the line is the launcher's figure, this import would be ours
import sys  # noqa: E402
import time  # noqa: E402

folder, victim, way, delay = sys.argv[1:]
# Opened now: the note itself must cost next to nothing.
note = os.open(f"{folder}/{rank}.moment", os.O_WRONLY | os.O_CREAT)


def leave(number: int, frame: object) -> None:
    os.write(note, b"%r" % time.monotonic())
    os._exit(0)


signal.signal(signal.SIGTERM, leave)
with open(f"{folder}/{rank}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.ready")
if rank == victim:
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    time.sleep(float(delay))
    os.write(note, b"%r" % time.monotonic())
    os.close(os.open(f"{folder}/died", os.O_CREAT))
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(7)
while True:
    signal.pause()
