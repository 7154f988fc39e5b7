"""How long rank tables take: parsed, checked and converted, up to the largest clusters.

    python benchmarks/rank_tables.py

Each case runs in a process of its own, so that its peak memory is its own. Targets: 131,072 devices
parsed and checked in 1 s, converted from v0.1 in 1.5 s, 250 MB at most; 64 devices in 5 ms.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from davincirunsdk.rank_table import dump, parse

DEVICES = 8
"""Devices per server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure."""

    name: str
    form: str
    servers: int
    seconds: float
    megabytes: float | None = None


CASES = (
    Case(name="v1.0, 64 devices: parse and check", form="v1.0", servers=8, seconds=0.005),
    Case(name="v0.1, 64 devices: to v1.0", form="v0.1", servers=8, seconds=0.005),
    Case(
        name="v1.0, 131,072 devices: parse and check", form="v1.0", servers=16384, seconds=1.0, megabytes=250
    ),
    Case(name="v0.1, 131,072 devices: to v1.0", form="v0.1", servers=16384, seconds=1.5, megabytes=250),
)


def main() -> None:
    """Run every case, each in a fresh process, and print its figures beside the target."""
    missed = False
    for place, case in enumerate(CASES):
        done = subprocess.run(
            [sys.executable, __file__, str(place)], check=True, stdout=subprocess.PIPE, text=True
        )
        seconds, megabytes = (float(word) for word in done.stdout.split())
        good = seconds <= case.seconds and (case.megabytes is None or megabytes <= case.megabytes)
        missed = missed or not good
        print(
            f"{case.name:<42} {seconds * 1000:9.2f} ms (target {case.seconds * 1000:g}), "
            f"peak {megabytes:.0f} MB{'' if good else '   MISSED'}",
            flush=True,
        )
    sys.exit(1 if missed else 0)


def measure(case: Case) -> None:
    """Print the seconds and the peak memory in MB of one case: the best run, as load only adds."""
    data = v1_table(case.servers) if case.form == "v1.0" else v0_table(case.servers)
    times = []
    for _ in range(5 if case.servers > 1000 else 101):
        started = time.perf_counter()
        table = parse(data)
        if case.form == "v0.1":
            dump(table)
        times.append(time.perf_counter() - started)
        del table
    print(min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def server_id(number: int) -> str:
    """Address of the n-th server."""
    return f"10.{number >> 14}.{number >> 7 & 127}.{number & 127}"


def device(server: int, number: int) -> dict[str, str]:
    """A device with an address of its own."""
    return {"device_id": str(number), "device_ip": f"29.{server >> 8}.{server & 255}.{number + 1}"}


def v1_table(servers: int) -> bytes:
    """A v1.0 table as the operator writes it."""
    listed = [
        {
            "server_id": server_id(s),
            "device": [{**device(s, d), "rank_id": str(s * DEVICES + d)} for d in range(DEVICES)],
        }
        for s in range(servers)
    ]
    return json.dumps(
        {"status": "completed", "version": "1.0", "server_count": str(servers), "server_list": listed}
    ).encode()


def v0_table(servers: int) -> bytes:
    """A v0.1 table with one pod per server."""
    listed = [
        {
            "pod_name": f"job-worker-{s}",
            "server_id": server_id(s),
            "devices": [device(s, d) for d in range(DEVICES)],
        }
        for s in range(servers)
    ]
    group = {
        "group_name": "worker",
        "device_count": str(servers * DEVICES),
        "instance_count": str(servers),
        "instance_list": listed,
    }
    return json.dumps({"status": "completed", "group_count": "1", "group_list": [group]}).encode()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(CASES[int(sys.argv[1])])
    else:
        main()
