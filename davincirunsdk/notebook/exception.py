"""The name under which 0.1.5 had the error of a failed job; new code imports it from `davincirunsdk`."""

from davincirunsdk.errors import DistributedRuntimeError

__all__ = ["DistributedRuntimeError"]
