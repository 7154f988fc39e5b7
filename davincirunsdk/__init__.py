"""Start, supervise and end one training process per NPU of this machine."""

from __future__ import annotations

__version__ = "0.3.0"

# Not imported from `typing`, which takes longer than Python's own start: the guardians do without.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from davincirunsdk import aio, engines
    from davincirunsdk.blocking import (
        init_rank_table,
        set_random_ms_cache_dir,
        start_and_wait_distributed_train,
        start_distributed_train,
        wait_distributed_train,
    )
    from davincirunsdk.errors import (
        DavinciRunError,
        DistributedRuntimeError,
        JobTimeoutError,
        PlatformError,
        RankTableError,
        RankTableTimeoutError,
        WorkerSpawnError,
    )
    from davincirunsdk.manager import FMKManager
    from davincirunsdk.options import JobOptions
    from davincirunsdk.script.progress import progress
    from davincirunsdk.script.record import record
    from davincirunsdk.script.stacks import register_stacks
    from davincirunsdk.types import (
        AttemptRecord,
        Event,
        FailureReport,
        JobState,
        Leftover,
        LogBlock,
        LogLine,
        Progress,
        RunResult,
        Stacks,
        Verdict,
        WorkerFailure,
        WorkerStack,
        WorkerState,
        WorkerStatus,
    )

_HOMES = {
    "aio": "",
    "engines": "",
    "init_rank_table": "blocking",
    "set_random_ms_cache_dir": "blocking",
    "start_and_wait_distributed_train": "blocking",
    "start_distributed_train": "blocking",
    "wait_distributed_train": "blocking",
    "DavinciRunError": "errors",
    "DistributedRuntimeError": "errors",
    "JobTimeoutError": "errors",
    "PlatformError": "errors",
    "RankTableError": "errors",
    "RankTableTimeoutError": "errors",
    "WorkerSpawnError": "errors",
    "FMKManager": "manager",
    "AttemptRecord": "types",
    "Event": "types",
    "FailureReport": "types",
    "JobOptions": "options",
    "JobState": "types",
    "Leftover": "types",
    "LogBlock": "types",
    "LogLine": "types",
    "Progress": "types",
    "RunResult": "types",
    "Verdict": "types",
    "WorkerFailure": "types",
    "Stacks": "types",
    "WorkerStack": "types",
    "WorkerState": "types",
    "WorkerStatus": "types",
    "load_ipython_extension": "notebook.magic",
    "progress": "script.progress",
    "record": "script.record",
    "register_stacks": "script.stacks",
}

__all__ = [
    "AttemptRecord",
    "DavinciRunError",
    "DistributedRuntimeError",
    "Event",
    "FMKManager",
    "FailureReport",
    "JobOptions",
    "JobState",
    "JobTimeoutError",
    "Leftover",
    "LogBlock",
    "LogLine",
    "PlatformError",
    "Progress",
    "RankTableError",
    "RankTableTimeoutError",
    "RunResult",
    "Stacks",
    "Verdict",
    "WorkerFailure",
    "WorkerSpawnError",
    "WorkerStack",
    "WorkerState",
    "WorkerStatus",
    "__version__",
    "aio",
    "engines",
    "init_rank_table",
    "progress",
    "record",
    "register_stacks",
    "set_random_ms_cache_dir",
    "start_and_wait_distributed_train",
    "start_distributed_train",
    "wait_distributed_train",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    # Lazy: the command must not load the blocking API, nor an import of the package an event loop.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{home or name}")
    value = module if not home else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
