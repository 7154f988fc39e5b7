"""Names under which 0.1.5 had the blocking calls; new code imports them from `davincirunsdk`."""

from davincirunsdk.blocking import (
    init_rank_table,
    set_random_ms_cache_dir,
    start_and_wait_distributed_train,
    start_distributed_train,
    wait_distributed_train,
)

__all__ = [
    "init_rank_table",
    "set_random_ms_cache_dir",
    "start_and_wait_distributed_train",
    "start_distributed_train",
    "wait_distributed_train",
]
