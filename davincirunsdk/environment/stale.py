"""Names that an outer launcher or a pod leaves behind, and that mean something else for a worker."""

from __future__ import annotations

import re

STALE = re.compile(
    r"""
      OMPI_.* | PMI_.* | PMIX_.*  # MindSpore, when imported, overwrites RANK_ID from mpirun's names
    | TORCHELASTIC_.* | PET_.* | GROUP_WORLD_SIZE | ROLE_.*
    | RANK | LOCAL_RANK | WORLD_SIZE | LOCAL_WORLD_SIZE | GROUP_RANK
    | MS_ROLE | MS_NODE_ID | MS_WORKER_NUM | MS_SERVER_NUM | MS_SCHED_HOST | MS_SCHED_PORT
    | MS_LOCAL_WORKER | MS_NODE_RANK
    | RANK_ID | RANK_SIZE | DEVICE_ID | ASCEND_DEVICE_ID | RANK_START
      # Lightning, accelerate and others take a rank from these: Slurm's is that of the launcher
    | SLURM_PROCID | SLURM_LOCALID | SLURM_NTASKS | SLURM_STEP_NUM_TASKS
    | SLURM_TASKS_PER_NODE | SLURM_NTASKS_PER_NODE
    | DAVINCIRUN_.*
    """,
    re.VERBOSE,
)
"""What no worker inherits."""

TABLES = ("RANK_TABLE_FILE", "RANK_TABLE_FILE_V_1_0", "MINDSPORE_HCCL_CONFIG_PATH")
"""What names a rank table; in a worker it is that of the worker's job, not of one that it starts."""

CHIEF = (
    "CM_CHIEF_IP",
    "CM_CHIEF_PORT",
    "CM_CHIEF_DEVICE",
    "CM_WORKER_SIZE",
    "CM_WORKER_IP",
    "CM_LOCAL_WORKER",
    "CM_RANK",
)
"""TensorFlow's start without a rank table; it must not stand beside one."""
