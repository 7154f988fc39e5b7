"""A batch file for `sbatch`: one `davincirun` per node, by `srun`.

The job's exit code is srun's: with `--kill-on-bad-exit=1` the other nodes hear of a failure from
srun itself. `--signal` asks for a SIGUSR1 some minutes before the time limit; without `B:` Slurm
sends it to the steps, where `davincirun` passes it on to the workers that handle it.
"""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from davincirunsdk.manifests.pod import HOPELESS, SAVING, launcher

if TYPE_CHECKING:
    from davincirunsdk.manifests.request import Request

_WARNING = 300
"""Seconds before the time limit at which the workers get SIGUSR1."""


def batch_file(request: Request) -> str:
    """Write the file."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={request.name}",
        f"#SBATCH --nodes={request.nnodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        f"#SBATCH --signal=USR1@{_WARNING}",
        "#SBATCH --output=%x-%j.out",
    ]
    if request.queue:
        lines.append(f"#SBATCH --partition={request.queue}")
    lines.append("#SBATCH --requeue" if request.retries else "#SBATCH --no-requeue")
    lines.append("")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in request.env.items()]
    # Slurm's KillWait, 30 s by default, ends the grace period if it is shorter.
    lines.append(f"# KillWait of the cluster should be {math.ceil(request.grace_period) + SAVING} s or more.")
    words = shlex.join(launcher(request))
    step = f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 {words}"
    if not request.retries:
        return "\n".join([*lines, f"exec {step}"]) + "\n"
    hopeless = "|".join(str(code) for code in (0, *HOPELESS))
    lines += [
        step,
        "code=$?",
        "# Slurm itself requeues after the loss of a node only.",
        'case "$code" in',
        f"    {hopeless}) ;;",
        f'    *) if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {request.retries} ]; then',
        '           scontrol requeue "$SLURM_JOB_ID"',
        "       fi ;;",
        "esac",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
