"""Start, supervise and end one training process per NPU of this machine."""

__version__ = "0.2.0"
