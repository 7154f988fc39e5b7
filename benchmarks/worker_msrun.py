"""What msrun is given: it starts one command for the workers and for MindSpore's scheduler alike.

Arguments: the program of the workers and its own arguments. The scheduler here ends with the last worker,
which MindSpore's own one does not do any sooner.
"""

import os
import sys
import time

if os.environ["MS_ROLE"] != "MS_SCHED":
    os.execv(sys.executable, [sys.executable, "-I", "-S", *sys.argv[1:]])

parent, me = os.getppid(), os.getpid()
seen = False
while os.getppid() == parent:
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        others = [pid for pid in file.read().split() if int(pid) != me]
    states = []
    for pid in others:
        try:
            with open(f"/proc/{pid}/stat") as file:
                states.append(file.read().rpartition(")")[2].split()[0])
        except OSError:
            continue
    living = any(state != "Z" for state in states)
    if seen and not living:
        break
    seen = seen or living
    time.sleep(0.05)
